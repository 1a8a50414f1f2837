"""DeepSeek-V4's packed checkpoints, damaged in every way: one clear sentence each, or, where only the head is at fault,
a plain engine that says why."""

import re
import shutil

import pytest
import torch

from headlong.checkpoint.checkpoint import Checkpoint
from headlong.config import EngineConfig
from headlong.engine.build import build, survey
from headlong.errors import HeadlongError
from support import deepseek_v4_files as files
from support.damage import Damage, config, extra, fewer, filled, gone, tensor, weights

Q, KV = "layers.1.attn.wq_a", "layers.1.attn.wkv"
W1, W2 = "layers.1.ffn.experts.0.w1", "layers.2.ffn.experts.3.w2"
HEAD = "mtp.0.attn.wq_b"
EXPERT = "mtp.0.ffn.experts.2.w3"
NAMED = {
    Q: "layers.1.self_attn.q_a_proj",
    W1: "layers.1.mlp.experts.0.gate_proj",
    EXPERT: "mtp.layers.0.mlp.experts.2.up_proj",
}


def as_type(dtype: torch.dtype):
    return lambda old: old.float().to(dtype)


def all_of(pattern: str, *, keep: bool = False) -> Damage:
    """Every tensor whose name fits is taken away."""

    def change(found: dict) -> None:
        for name in [name for name in found if bool(re.search(pattern, name)) != keep]:
            del found[name]

    return weights(change)


def renamed(old: str, new: str) -> Damage:
    return weights(lambda found: found.update({new: found.pop(old)}))


IN_TARGET: dict[str, tuple[str, Damage, str]] = {
    "FP8 without its scale": (
        "published",
        tensor(f"{Q}.scale", gone),
        f"{NAMED[Q]} in .*an FP8 weight needs .* or scale",
    ),
    "a scale for other blocks": (
        "published",
        tensor(f"{Q}.scale", lambda old: old.repeat(3, 1)),
        r"q_a_proj in .*scale has the shape \[3, 1\], which is no scale",
    ),
    "a scale that is NaN": (
        "published",
        tensor(f"{Q}.scale", lambda old: torch.full_like(old.view(torch.uint8), 255).view(old.dtype)),
        "q_a_proj.weight.*scale holds values that are not finite",
    ),
    "a scale of whole numbers": (
        "published",
        tensor(f"{Q}.scale", as_type(torch.int32)),
        "scale is I32, which must be",
    ),
    "two scales": (
        "published",
        extra(f"{Q}.weight_scale_inv", torch.ones(1, 1)),
        "one scale, .*, and here are weight_scale_inv and scale",
    ),
    "a scale beside floats": (
        "published",
        extra("layers.1.attn.compressor.wkv.scale", torch.ones(1, 1)),
        "compressor.kv_proj in .*scale cannot be part of a bf16 weight",
    ),
    "FP4 without its scale": (
        "published",
        tensor(f"{W1}.scale", gone),
        f"{NAMED[W1]} in .*two to a byte, need scale beside them",
    ),
    "FP4 with a scale by 16": (
        "published",
        tensor(f"{W1}.scale", lambda old: old.repeat(1, 2)),
        r"scale has the shape \[32, 4\], which must be \[32, 2\]",
    ),
    "FP4 with a NaN": (
        "published",
        tensor(f"{W2}.scale", lambda old: torch.full_like(old.view(torch.uint8), 255).view(old.dtype)),
        "experts.3.down_proj.weight.*scale holds values that are not finite",
    ),
    "FP4 of other columns": (
        "published",
        tensor(f"{W1}.weight", fewer(1)),
        r"weight has the shape \[32, 31\], which must be \[32, 32\]",
    ),
    "NVFP4 without the second scale": (
        "anew",
        tensor(f"{W1}.weight_scale_2", gone),
        "weight_scale_2 is missing",
    ),
    "NVFP4 without scales": (
        "anew",
        tensor(f"{W1}.weight_scale", gone),
        "gate_proj in .*weight_scale is missing",
    ),
    "NVFP4 whose second scale is 0": (
        "anew",
        tensor(f"{W1}.weight_scale_2", filled(0.0)),
        "weight_scale_2 is 0",
    ),
    "an expert missing": (
        "published",
        all_of(rf"^{re.escape(W2)}\."),
        "missing: layers.2.mlp.experts.3.down_proj.weight",
    ),
    "an expert too many": (
        "published",
        extra("layers.1.ffn.experts.4.w1.weight", torch.ones(32, 64).bfloat16()),
        r"unexpected: layers.1.mlp.experts.4.gate_proj.weight \(on disk layers.1.ffn.experts.4.w1.weight\)",
    ),
    "no table of experts": (
        "published",
        tensor("layers.0.ffn.gate.tid2eid", gone),
        "missing: layers.0.mlp.gate.tid2eid",
    ),
    "a table of floats": (
        "published",
        tensor("layers.0.ffn.gate.tid2eid", as_type(torch.float32)),
        "tid2eid.*must be whole numbers, found F32",
    ),
    "an expert that is not there": (
        "published",
        tensor("layers.0.ffn.gate.tid2eid", lambda old: old.index_fill(0, torch.tensor([3]), 4)),
        "tid2eid.*holds numbers that are not from 0 to 3",
    ),
    "a table of other tokens": (
        "published",
        tensor("layers.0.ffn.gate.tid2eid", fewer(0)),
        r"tid2eid.*expected \[96, 2\], found \[95, 2\]",
    ),
    "no bias of the choice": (
        "published",
        tensor("layers.1.ffn.gate.bias", gone),
        "missing: layers.1.mlp.gate.e_score",
    ),
    "no sinks": ("published", tensor("layers.3.attn.attn_sink", gone), "missing: layers.3.self_attn.sinks"),
    "no collapse": ("published", tensor("hc_head_fn", gone), "missing: hc_head.hc_fn"),
    "a connection of other streams": (
        "published",
        tensor("layers.2.hc_ffn_fn", fewer(0)),
        r"layers.2.ffn_hc.fn \(on disk layers.2.hc_ffn_fn\): expected \[24, 256\], found \[23, 256\]",
    ),
    "a compressor missing": (
        "published",
        all_of(r"^layers\.2\.attn\.compressor\."),
        "missing: layers.2.self_attn.compressor.",
    ),
    "a compressor too many": (
        "published",
        extra("layers.0.attn.compressor.ape", torch.ones(4, 32)),
        "unexpected: layers.0.self_attn.compressor.position_bias",
    ),
    "another ratio than the tensors have": (
        "published",
        config(compress_ratios=[0, 128, 128, 4, 0]),
        r"layers.1.self_attn.compressor.position_bias .*expected \[128, 16\], found \[4, 32\]",
    ),
    "a ratio that nobody knows": (
        "published",
        config(compress_ratios=[0, 4, 8, 4, 0]),
        "compress_ratios must list 4 entries",
    ),
    "groups that do not divide": (
        "published",
        config(o_groups=3),
        r"o_groups \(3\) must divide num_attention_heads \(4\)",
    ),
    "a name twice": (
        "published",
        extra("layers.1.self_attn.kv_proj.weight", torch.ones(16, 64).bfloat16()),
        "are both 'layers.1.self_attn.kv_proj.weight'",
    ),
}
IN_HEAD: dict[str, tuple[str, Damage, str]] = {
    "FP8 in the head without its scale": (
        "published",
        tensor(f"{HEAD}.scale", gone),
        "mtp.layers.0.self_attn.q_b_proj in .*an FP8 weight needs",
    ),
    "FP4 in the head without its scale": (
        "published",
        tensor(f"{EXPERT}.scale", gone),
        f"{NAMED[EXPERT]} in .*two to a byte",
    ),
    "a scale beside the head's floats": (
        "anew",
        extra(f"{HEAD}.scale", torch.ones(1, 1)),
        "q_b_proj in .*scale cannot be part of a bf16 weight",
    ),
    "half a join": (
        "anew",
        tensor("mtp.0.h_proj.weight", gone),
        r"missing: mtp.layers.0.fc_hidden.weight \[64, 64\]",
    ),
    "a join of another size": (
        "anew",
        tensor("mtp.0.e_proj.weight", fewer(1)),
        r"mtp.layers.0.fc_embedding.weight .*expected \[64, 64\], found \[64, 63\]",
    ),
    "the head without its collapse": (
        "anew",
        tensor("mtp.0.hc_head_base", gone),
        "missing: mtp.layers.0.hc_head.hc_base",
    ),
    "the head without an expert": (
        "anew",
        all_of(r"^mtp\.0\.ffn\.experts\.1\."),
        r"mtp.layers.0.mlp.experts.1",
    ),
    "one tensor of a head": ("anew", all_of(r"^mtp\.0\.(?!enorm)"), "missing: mtp.layers.0"),
    "a head that compresses": (
        "anew",
        extra("mtp.0.attn.compressor.ape", torch.ones(4, 32)),
        "unexpected: mtp.layers.0.self_attn.compressor.position_bias",
    ),
    "blocks of DSpark": (
        "anew",
        lambda folder: (
            all_of(r"^mtp\.0\.[eh]_proj")(folder),
            extra("mtp.0.main_proj.weight", torch.ones(64, 64))(folder),
            extra("mtp.0.markov_head.markov_w1.weight", torch.ones(96, 8))(folder),
        ),
        "DSpark's: there are main_proj, markov_head and no join",
    ),
}
SERVED = ("FP8 in the head without its scale", "blocks of DSpark")
"""Cases whose model is built, too: the others are told from headers alone."""


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("v4")
    return {
        "published": files.make(files.packs("mxfp4_deepseek", head="same")).write(folder / "published"),
        "anew": files.make(files.packs("nvfp4_modelopt")).write(folder / "anew"),
    }


def damaged(good, case, folder):
    base, damage, _ = case
    shutil.copytree(good[base], folder, dirs_exist_ok=True)
    damage(folder)
    return Checkpoint.open(folder)


def test_the_good_ones_are_good(good):
    for folder in good.values():
        assert survey(Checkpoint.open(folder), EngineConfig(mtp="on")).head_refusal is None


@pytest.mark.parametrize("name", IN_TARGET)
def test_a_model_that_does_not_fit(good, name, tmp_path):
    """In one line, which the first fault follows on a line of its own where there may be several."""
    with pytest.raises(HeadlongError) as caught:
        build(survey(damaged(good, IN_TARGET[name], tmp_path)), device=torch.device("cpu"))
    found = str(caught.value)
    assert re.search(IN_TARGET[name][2], found), found
    assert len(found.splitlines()) <= 12 and len(found.splitlines()[0]) < 600


@pytest.mark.parametrize("name", IN_HEAD)
def test_a_head_that_does_not_fit(good, name, tmp_path):
    """The model is served without it; where it is insisted on, it is an error."""
    checkpoint = damaged(good, IN_HEAD[name], tmp_path)
    blueprint = survey(checkpoint)
    assert blueprint.head_refusal is not None and "\n" not in blueprint.head_refusal
    assert re.search(IN_HEAD[name][2], blueprint.head_refusal), blueprint.head_refusal
    with pytest.raises(HeadlongError, match=r"mtp='on', but (?s:.*)use mtp='auto'"):
        survey(checkpoint, EngineConfig(mtp="on"))
    if name in SERVED:
        built = build(blueprint, device=torch.device("cpu"))
        assert built.head is None and built.head_refusal == blueprint.head_refusal


def test_copies_that_differ_are_told(good, tmp_path, caplog):
    """The head's own embedding is left alone, as the target's serves; that it differs is no error."""
    case = ("anew", tensor("mtp.0.emb.tok_emb.weight", filled(9.0)), "")
    with caplog.at_level("WARNING"):
        built = build(survey(damaged(good, case, tmp_path)), device=torch.device("cpu"))
    assert built.head is not None
    assert "mtp.0.emb.tok_emb.weight differs from the target's embed_tokens.weight" in caplog.text
