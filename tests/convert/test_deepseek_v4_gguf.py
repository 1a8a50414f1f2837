"""DeepSeek-V4 as GGUF: written with the head in a file of its own, read back bit for bit, and read by llama.cpp."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headlong import LLM, SamplingParams
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.gguf import read_gguf
from headlong.checkpoint.source import EMBEDDED
from headlong.config import EngineConfig
from headlong.convert.from_gguf import from_gguf
from headlong.convert.to_gguf import to_gguf
from headlong.engine.build import survey
from headlong.errors import CheckpointError
from headlong.models import registry
from support import deepseek_v4_files as files
from support.damage import rewrite
from support.llama_cpp import generate
from support.tiny import random_tokens

PROMPTS = [random_tokens(96, count, seed=count) for count in (3, 40)]
LLAMA_CPP: dict[str, Any] = {
    "vocab_size": 8192,
    "sliding_window": 128,
    "head_dim": 128,
    "index_head_dim": 64,
    "qk_rope_head_dim": 32,
}
"""Sizes that llama.cpp takes: it divides by zero where the indexer's heads are as wide as the layer's, and turns them
in blocks of 64."""
META = {
    "block_count": 4,
    "attention.key_length": 16,
    "attention.head_count_kv": 1,
    "attention.compress_ratios": [0, 4, 128, 4],
    "attention.compress_rope_freq_base": 160000.0,
    "attention.sliding_window": 8,
    "attention.q_lora_rank": 32,
    "attention.output_group_count": 2,
    "attention.output_lora_rank": 32,
    "attention.indexer.head_count": 2,
    "attention.indexer.key_length": 16,
    "attention.indexer.top_k": 4,
    "hyper_connection.count": 4,
    "hyper_connection.sinkhorn_iterations": 20,
    "embedding_length_out": 256,
    "hash_layer_count": 1,
    "expert_gating_func": 4,
    "expert_shared_count": 1,
    "expert_weights_scale": 1.5,
    "rope.dimension_count": 8,
    "rope.freq_base": 10000.0,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 16.0,
    "swiglu_clamp_exp": [10.0] * 4,
}


def tokens(path: Path, **options) -> list[list[int]]:
    llm = LLM(path, device="cpu", dtype="float32", **options)
    done = llm.generate(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True, draft_tokens=2))
    assert llm.mtp_refusal is None or not any(each.stats.drafted for each in done)
    return [list(each.token_ids) for each in done]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with the model in floats, `model.gguf` of float32 and its head's file."""
    folder = tmp_path_factory.mktemp("v4")
    files.make(()).write_meant(folder / "floats")
    done = to_gguf(Checkpoint.open(folder / "floats"), folder / "model.gguf", type="f32")
    assert done.has_head and "mtp-model.gguf" in done.notes[-1]
    return folder


def test_tokens_and_drafts_are_those_of_the_folder(made):
    assert tokens(made / "model.gguf", mtp="on") == tokens(made / "floats", mtp="on")


def test_what_the_files_say(made):
    """The keys that llama.cpp asks for; the head's file counts one block more and holds what is read with it."""
    model, head = read_gguf(made / "model.gguf"), read_gguf(made / "mtp-model.gguf")
    assert {key: model.metadata[f"deepseek4.{key}"] for key in META} == META
    assert "deepseek4.nextn_predict_layers" not in model.metadata
    assert (
        head.metadata["deepseek4.block_count"] == 5 and head.metadata["deepseek4.nextn_predict_layers"] == 1
    )
    assert head.metadata["deepseek4.attention.compress_ratios"] == [0, 4, 128, 4, 0]
    outside = {name for name in head.tensors if not name.startswith("blk.4.")}
    shared = {"token_embd.weight", "output_norm.weight", "output.weight"}
    assert outside == shared | {f"output_hc_{kind}.weight" for kind in ("fn", "base", "scale")}
    assert head.tensors["blk.4.nextn.eh_proj.weight"].shape == (64, 128)
    assert not any(name.startswith("blk.4.") for name in model.tensors)
    assert model.tensors["blk.0.ffn_gate_tid2eid.weight"].dtype == "I32"


def test_back_to_safetensors_bit_for_bit(made, tmp_path):
    from_gguf(Checkpoint.open(made / "model.gguf"), tmp_path / "back", type="f32")
    before, after = (
        load_file(folder / "model.safetensors") for folder in (made / "floats", tmp_path / "back")
    )
    copies = {"mtp.0.emb.tok_emb.weight", "mtp.0.head.weight"}
    assert before.keys() - copies == after.keys()
    assert all(torch.equal(after[name], before[name].to(after[name].dtype)) for name in after)
    assert after["layers.0.ffn.gate.tid2eid"].dtype is torch.int64
    found = json.loads((tmp_path / "back" / "config.json").read_text())
    kept = {name: value for name, value in files.CONFIG.items() if name in found}
    assert {name: found[name] for name in kept} == kept | {"compress_ratios": [0, 4, 128, 4]}
    assert registry.read_config(found) == registry.read_config(files.CONFIG)


def test_without_its_head_the_file_is_served_plainly(made, tmp_path):
    shutil.copy(made / "model.gguf", tmp_path)
    refusal = survey(Checkpoint.open(tmp_path / "model.gguf")).head_refusal
    assert refusal is not None and "has no MTP head" in refusal


@pytest.mark.slow
def test_from_packed_to_packed(tmp_path):
    """FP4 experts and FP8 projections become blocks; the head keeps a type of its own."""
    each = files.make(files.packs("mxfp4_deepseek", head="same"))
    packed = Checkpoint.open(each.write(tmp_path / "packed"))
    to_gguf(packed, tmp_path / "model.gguf", type="q8_0", head_type="bf16")
    blueprint = survey(Checkpoint.open(tmp_path / "model.gguf"), EngineConfig(mtp="on"))
    labels = {name: format.label for name, format in blueprint.formats.items()}
    assert labels["layers.1.mlp.experts.gate_proj.weight"] == "Q8_0"
    assert labels["layers.1.self_attn.o_a_proj.weight"] == "Q8_0"
    assert labels["mtp.layers.0.fc.weight"] == "bf16" and labels["layers.1.mlp.gate.weight"] == "f32"
    assert len(tokens(tmp_path / "model.gguf", mtp="on")[0]) == 12


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("attention.compress_ratios", [0, 4], "must be a whole number for each of 4 layers"),
        ("attention.compress_ratios", [0, 4, 8, 4], "compress_ratios must list 4 entries out of 0, 4, 128"),
        ("attention.indexer.top_k", 0, "attention.indexer.top_k: must be a whole number from 1"),
        ("hyper_connection.count", None, "hyper_connection.count: must be a whole number"),
        ("expert_gating_func", 3, "expert_gating_func: must be one of 1, 2, 4, not 3"),
        ("swiglu_clamp_exp", [1.0, 2.0, 1.0, 1.0], "different limits are not supported"),
        ("swiglu_clamp_shexp", [float("nan")] * 4, "must be numbers from 0 on"),
        ("rope.scaling.type", "longrope", "rope.scaling.type: 'longrope' is not supported"),
        ("attention.q_lora_rank", 31, r"expected \[31"),
    ],
)
def test_metadata_that_cannot_be(made, tmp_path, key, value, words):
    path = tmp_path / "model.gguf"
    shutil.copy(made / "model.gguf", path)

    def change(metadata: dict, _: dict) -> None:
        metadata[f"deepseek4.{key}"] = value
        if value is None:
            del metadata[f"deepseek4.{key}"]

    rewrite(path, change)
    with pytest.raises((CheckpointError, ValueError), match=words):
        survey(Checkpoint.open(path))


@pytest.mark.slow
def test_llama_cpp_says_the_same(tmp_path):
    """Greedy tokens of prompts that are shorter than a window, and of ones with entries of both kinds."""
    pytest.importorskip("xllamacpp", reason="xllamacpp (llama.cpp) is not installed")
    folder = files.make((), **LLAMA_CPP).write_meant(tmp_path / "floats")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, folder)
    path = tmp_path / "model.gguf"
    to_gguf(Checkpoint.open(folder), path, type="f32")
    prompts = [random_tokens(8192, count, seed=count) for count in (9, 40, 150, 300)]
    llm = LLM(path, device="cpu", dtype="float32")
    params = SamplingParams(max_tokens=24, ignore_eos=True, draft_tokens=2)
    ours = [list(done.token_ids) for done in llm.generate(prompts, params)]
    assert ours == [reply.tokens for reply in generate(path, prompts, 24)]
