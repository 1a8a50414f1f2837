"""GGUF files and their sidecars damaged in every way: one clear error, or, where only the head is, a plain engine that
says why. The container alone is fuzzed in tests/checkpoint."""

import os
import shutil
from pathlib import Path

import pytest

from headlong import LLM
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.convert.to_gguf import to_gguf
from headlong.errors import CheckpointError
from support import damage, tiny
from support.damage import (
    GGUF,
    GGUF_SIDECAR,
    INF,
    LFS,
    Case,
    Good,
    cut,
    keys,
    patch,
    put,
    spoil,
    start,
    u32,
    u64,
)

HEAD_SIZES = [
    f"qwen35.attention.{name}" for name in ("head_count", "head_count_kv", "key_length", "value_length")
]
FIT = r"the model does not fit its model(?s:.*)"
Q8, EMBEDDING = "blk.0.attn_qkv.weight", "token_embd.weight"
GGUFS: dict[str, Case] = {
    "wrong magic": ("gguf", start(0, b"GGML"), "not a GGUF file"),
    "version 1": ("gguf", start(4, u32(1)), "GGUF version 1 cannot be read"),
    "version 77": ("gguf", start(4, u32(77)), "GGUF version 77 cannot be read"),
    "big-endian": ("gguf", start(4, b"\0\0\0\3"), "big-endian"),
    "2**60 tensors": ("gguf", start(8, u64(2**60)), r"claims \d+ tensors"),
    "2**60 keys": ("gguf", start(16, u64(2**60)), r"claims \d+ metadata keys"),
    "gguf: a Git LFS pointer": ("gguf", put(GGUF, LFS), "Git LFS pointer"),
    "gguf: empty": ("gguf", cut(GGUF, 0), r"model\.gguf: "),
    "gguf: cut in the header": ("gguf", cut(GGUF, 2500), "truncated"),
    "gguf: cut in the data": ("gguf", cut(GGUF, 0.6), r"tensor '.*truncated"),
    "a string of 2**60 bytes": (
        "gguf",
        patch("general.architecture", 4, u64(2**60)),
        "general.architecture.*truncated",
    ),
    "an array of 2**60 strings": (
        "gguf",
        patch("tokenizer.ggml.tokens", 8, u64(2**60)),
        "ggml.tokens.*do not fit",
    ),
    "a value of no type": (
        "gguf",
        patch("qwen35.context_length", 0, u32(99)),
        "context_length.*unknown value type 99",
    ),
    "alignment 3": ("gguf", keys({"general.alignment": 3}), "general.alignment.*power of two, found 3"),
    "a tensor of no type": ("gguf", patch(Q8, 20, u32(199)), rf"{Q8}.*unknown tensor type 199"),
    "a tensor of another type": ("gguf", patch(Q8, 20, u32(16)), rf"{Q8}|in_proj_qkv"),
    "gguf: 2**40 elements": ("gguf", patch(Q8, 4, u64(2**20) + u64(2**20)), rf"{Q8}.*truncated"),
    "gguf: a product that overflows": ("gguf", patch(Q8, 4, u64(2**62) + u64(2**62)), rf"{Q8}.*absurd"),
    "gguf: no rows": ("gguf", patch(Q8, 12, u64(0)), rf"{Q8}.*absurd"),
    "gguf: nine dimensions": ("gguf", patch(Q8, 0, u32(9)), rf"{Q8}.*9 dimensions"),
    "gguf: past the end": ("gguf", patch(Q8, 24, u64(2**40)), rf"{Q8}.*truncated"),
    "gguf: out of line": ("gguf", patch(Q8, 24, u64(7)), rf"{Q8}.*alignment"),
    "gguf: two tensors in one place": ("gguf", patch(Q8, 24, u64(0)), "overlap"),
    "gguf: a tensor twice": (
        "gguf",
        patch(Q8, -len(Q8), b"blk.1.attn_qkv.weight"),
        "blk.1.attn_qkv.weight.*twice",
    ),
    "gguf: a shuffled shape": ("gguf", patch(Q8, 4, u64(160) + u64(64)), rf"{FIT}in_proj_qkv|{Q8}"),
    "gguf: a scale that is NaN": ("gguf", lambda f: spoil(f / GGUF, Q8), r"in_proj_qkv.*row 0 is nan"),
    "gguf: an infinite scale": (
        "gguf",
        lambda f: spoil(f / GGUF, EMBEDDING, INF),
        r"embed_tokens.*row 0 is inf",
    ),
    "an architecture nobody knows": (
        "gguf",
        keys({"general.architecture": "gpt9"}),
        "general.architecture.*'gpt9'",
    ),
    "no architecture": ("gguf", patch("general.architecture", -1, b"?"), "general.architecture"),
    "no block count": ("gguf", keys({"qwen35.block_count": None}), "qwen35.block_count"),
    "no hidden size, gguf": ("gguf", keys({"qwen35.embedding_length": None}), "qwen35.embedding_length"),
    "no head count": ("gguf", keys({"qwen35.attention.head_count": None}), "qwen35.attention.head_count"),
    "another head count": ("gguf", keys({"qwen35.attention.head_count": 8}), rf"{FIT}self_attn\.q_proj"),
    "head counts whose product overflows": (
        "gguf",
        keys(dict.fromkeys(HEAD_SIZES, 2**24)),
        "attention|does not fit",
    ),
    "a block too many": ("gguf", keys({"qwen35.block_count": 6}), rf"{FIT}layers\.4\."),
    "a block too few": ("gguf", keys({"qwen35.block_count": 4}), rf"{FIT}blk\.4\.nextn\."),
    "nextn that says there is none": ("gguf", keys({"qwen35.nextn_predict_layers": 0}), rf"{FIT}layers\.4\."),
    "nextn that says two": ("gguf", keys({"qwen35.nextn_predict_layers": 2}), r"blk\.4\.nextn\."),
    "2**31 blocks": ("gguf", keys({"qwen35.block_count": 2**31}), "qwen35.block_count"),
    "all blocks a head": (
        "gguf",
        keys({"qwen35.nextn_predict_layers": 5}),
        "qwen35.block_count.*leave no layers",
    ),
    "blocks as a text": ("gguf", keys({"qwen35.block_count": "five"}), "qwen35.block_count.*'five'"),
    "no tokens": ("gguf", keys({"tokenizer.ggml.tokens": None}), "tokenizer.ggml.tokens"),
    "tokens that are numbers": ("gguf", keys({"tokenizer.ggml.tokens": [1, 2]}), "tokenizer.ggml.tokens"),
    "merges that are numbers": ("gguf", keys({"tokenizer.ggml.merges": [1, 2]}), "tokenizer.ggml.merges"),
    "merges of no tokens": ("gguf", keys({"tokenizer.ggml.merges": ["é ü"]}), r"tokenizer\.ggml\."),
    "an end that is no token": (
        "gguf",
        keys({"tokenizer.ggml.eos_token_id": 9999}),
        "tokenizer.ggml.eos_token_id",
    ),
    "an unknown tokenizer": ("gguf", keys({"tokenizer.ggml.model": "rwkv"}), "tokenizer.ggml.model.*rwkv"),
    "an unknown splitting": ("gguf", keys({"tokenizer.ggml.pre": "klingon"}), "tokenizer.ggml.pre.*klingon"),
}


def other_gguf(folder: Path) -> None:
    made = tiny.make(folder / "other", "dense", hidden_size=96)
    to_gguf(Checkpoint.open(made.folder), folder / GGUF_SIDECAR, type="f16", force=True)


def rename_head(folder: Path) -> None:
    """The head's own tensors under names that nobody knows."""
    data = (folder / GGUF).read_bytes()
    (folder / GGUF).write_bytes(data.replace(b".nextn.", b".nextm."))


HEADS: dict[str, Case] = {
    "a head of unknown tensors": ("gguf", rename_head, r"4 missing, 4 unexpected.*mtp\.pre_fc_norm"),
    "a head's block scale is NaN": (
        "gguf",
        lambda folder: spoil(folder / GGUF, "blk.4.nextn.eh_proj.weight"),
        r"mtp\.fc.*nan",
    ),
    "a sidecar of another size": (
        "gguf sidecar",
        other_gguf,
        rf"mtp\.fc\.weight.*\[96, 192\]|{GGUF_SIDECAR}",
    ),
    "a sidecar without a head": (
        "gguf sidecar",
        lambda folder: shutil.copy(folder / GGUF, folder / GGUF_SIDECAR),
        rf"{GGUF_SIDECAR}.*(head|nextn)",
    ),
    "a sidecar of no kind": (
        "gguf sidecar",
        put(GGUF_SIDECAR, b"nonsense" * 9),
        rf"{GGUF_SIDECAR}: not a GGUF file",
    ),
    "a sidecar cut": ("gguf sidecar", cut(GGUF_SIDECAR, 0.5), rf"{GGUF_SIDECAR}: .*truncated"),
    "a sidecar of another architecture": (
        "gguf sidecar",
        keys({"general.architecture": "gpt9"}, file=GGUF_SIDECAR),
        rf"{GGUF_SIDECAR}.*gpt9",
    ),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Good:
    return Good(tmp_path_factory)


@pytest.mark.parametrize("base", ["gguf", "gguf sidecar"])
def test_the_undamaged_drafts(good, base):
    damage.assert_drafts(good(base) / GGUF)


@pytest.mark.parametrize("name", GGUFS)
def test_one_clear_error(good, name, tmp_path):
    damage.assert_one_clear_error(good.damaged(GGUFS[name], tmp_path), GGUFS[name][2])


@pytest.mark.parametrize("name", HEADS)
def test_a_damaged_head_is_told_and_done_without(good, name, tmp_path):
    damage.assert_served_plainly(good.damaged(HEADS[name], tmp_path), HEADS[name][2])


def test_two_models_in_a_folder(good, tmp_path):
    case: Case = ("gguf", lambda folder: shutil.copy(folder / GGUF, folder / "other.gguf"), "")
    good.damaged(case, tmp_path)
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF models .*model\.gguf"):
        LLM(tmp_path, device="cpu")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read(good, tmp_path):
    case: Case = (
        "gguf",
        lambda folder: (folder / GGUF).chmod(0),
        rf"{GGUF}: cannot be read \(Permission denied\)",
    )
    damage.assert_one_clear_error(good.damaged(case, tmp_path), case[2])
