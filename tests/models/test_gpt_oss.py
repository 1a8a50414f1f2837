"""What is gpt-oss's alone: experts in MXFP4, its config, GGUF files of it; and the same tokens whoever drafts."""

import logging
from typing import Any

import gguf
import pytest
import torch

from engine.engine_cases import drive, requests_of, with_depth
from headlong import LLM, SamplingParams
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.convert.from_gguf import from_gguf
from headlong.convert.quantize import quantize
from headlong.convert.reading import Source
from headlong.convert.to_gguf import to_gguf
from headlong.engine.build import survey
from headlong.errors import CheckpointError, ConfigError
from headlong.layers.mlp import MoeMlp
from headlong.models import registry
from headlong.ops.linear.native_source import U4_TABLE
from headlong.ops.moe.native import NativeExperts
from headlong.ops.rope.scaling import YarnScaling
from headlong.ops.silu_mul.activation import Activation
from support import packed_gpt_oss, tiny
from support.steps import Chunk, Driver, load
from support.tiny import random_tokens

LENGTH = 30
EXPERT = "layers.1.mlp.experts"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return packed_gpt_oss.make(tmp_path_factory.mktemp("gpt_oss"), seed=2)


def assert_close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0.0)


def logits_of(folder, made, dtype="float32"):
    """Of a prompt longer than the window, whole, beside one in pieces."""
    script = random_tokens(made.vocab_size, LENGTH + 1, seed=1)
    driver = Driver(load(folder, dtype))
    for row in ("a", "b"):
        driver.open(row, script)
    whole = driver.step(Chunk("a", LENGTH), Chunk("b", 7))["a"].logits
    assert torch.equal(driver.feed("b", [4, LENGTH - 11]).logits, whole[7:])
    return whole


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_packed_experts_are_those_of_transformers(made, dtype):
    script = random_tokens(made.vocab_size, LENGTH + 1, seed=1)[:LENGTH]
    oracle = made.double() if dtype == "float64" else made
    assert_close(logits_of(made.folder, made, dtype), oracle.forward(script)[1])


def test_experts_stay_packed(made, caplog):
    with caplog.at_level(logging.INFO):
        blueprint = survey(Checkpoint.open(made.folder))
    assert not blueprint.detector.disagreements
    assert blueprint.formats[f"{EXPERT}.gate_up_proj"].label == "mxfp4"
    mlp = load(made.folder).model.layers[0].mlp
    assert isinstance(mlp, MoeMlp)
    experts = mlp.experts
    if isinstance(experts, NativeExperts):
        layouts = {p.layout.type for pair in experts.linears for linear in pair for p in linear.panels}
        assert layouts == {U4_TABLE}


def test_files_of_llama_cpp_keep_the_blocks(made, tmp_path):
    """And back from there transformers' own layout is written."""
    to_gguf(Checkpoint.open(made.folder), tmp_path / "there.gguf", type="bf16")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "there.gguf").tensors}
    gate_up = made.model.model.layers[1].mlp.experts.gate_up_proj.transpose(1, 2)
    for first, name in enumerate(("gate", "up")):
        found = stored[f"blk.1.ffn_{name}_exps.weight"]
        assert found.tensor_type == gguf.GGMLQuantizationType.MXFP4
        values = torch.from_numpy(gguf.quants.dequantize(found.data, found.tensor_type))
        assert torch.equal(values.view_as(gate_up[:, first::2]), gate_up[:, first::2])
    to_gguf(Checkpoint.open(made.folder), tmp_path / "exact.gguf", type="f32")
    from_gguf(Checkpoint.open(tmp_path / "exact.gguf"), tmp_path / "back", type="f32")
    wanted = logits_of(made.folder, made)
    for path in ("exact.gguf", "back"):
        torch.testing.assert_close(logits_of(tmp_path / path, made), wanted, atol=1e-5, rtol=0.0)
    back = Checkpoint.open(tmp_path / "back").tensors
    known = {name: tuple(weight.shape) for name, weight in made.model.state_dict().items()}
    assert {name: info.shape for name, info in back.items()} == known


def test_rounded_experts_keep_their_biases(made, tmp_path):
    plain = made.folder.parent / "plain"
    quantize(Checkpoint.open(plain), tmp_path / "int4", format="int4", group_size=32)
    ours, theirs = (Source(Checkpoint.open(folder)) for folder in (tmp_path / "int4", plain))
    for projection in ("gate_proj", "up_proj", "down_proj"):
        name = f"{EXPERT}.{projection}.bias"
        assert torch.equal(ours.vector(name), theirs.vector(name))
    experts = made.model.model.layers[1].mlp.experts
    assert torch.equal(theirs.vector(f"{EXPERT}.up_proj.bias"), experts.gate_up_proj_bias[:, 1::2])
    assert logits_of(tmp_path / "int4", made).isfinite().all()


def test_the_config_of_the_release():
    config = packed_gpt_oss.real_config()
    read = registry.read_config(config)
    assert read.layer_types[:3] == ("sliding_attention", "full_attention", "sliding_attention")
    assert (read.window, read.rope_theta, read.attention.head_dim) == (128, 150000.0, 64)
    assert isinstance(read.rope_scaling, YarnScaling) and not read.rope_scaling.truncate
    assert read.moe is not None and read.moe.biased and read.attention.sinks
    assert (read.moe.num_experts, read.moe.num_active, read.moe.intermediate_size) == (32, 4, 2880)
    assert read.moe.activation == Activation(1.702, 7.0, 1.0)
    usual = {"layer_types", "rope_scaling", "rope_theta", "swiglu_limit", "attention_bias"}
    assert registry.read_config({k: v for k, v in config.items() if k not in usual}) == read


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sliding_window": None}, "layer_types has 'sliding_attention', but there is no sliding_window"),
        ({"sliding_window": 0}, "sliding_window must be a whole number from 1"),
        ({"swiglu_limit": -1.0}, "swiglu_limit must be above 0"),
        ({"num_experts_per_tok": 33}, r"num_experts_per_tok \(33\) is above num_local_experts"),
    ],
)
def test_wrong_fields_are_named(wrong, message):
    with pytest.raises(ConfigError, match=message):
        registry.read_config(packed_gpt_oss.real_config() | wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layer_types": ["full_attention"] * 24}, "every other layer slides"),
        ({"swiglu_limit": 5.0}, "swiglu_limit: GGUF has no keys"),
    ],
)
def test_what_a_gguf_file_cannot_say_is_refused(wrong, message):
    config = packed_gpt_oss.real_config() | wrong
    with pytest.raises(CheckpointError, match=message):
        registry.gguf_metadata(config, head_layers=0)


def test_drafts_of_a_smaller_model_and_pages_change_no_token(tmp_path):
    """Rows that share a beginning, wait for pages, are preempted and read again what was freed; windows end within
    pages."""
    sizes: dict[str, Any] = {"vocab_size": 6, "sliding_window": 11, "swiglu_limit": 0.8, "head": False}
    target = tiny.make(tmp_path / "target", "gpt_oss", seed=8, **sizes)
    smaller: dict[str, Any] = sizes | {"num_hidden_layers": 2}
    tiny.make(tmp_path / "small", "gpt_oss", seed=8, **smaller)
    prompts = [random_tokens(6, 40, seed=0) + random_tokens(6, 5 + n, seed=n) for n in range(5)]
    cases = [(tuple(prompt), SamplingParams(max_tokens=30, logprobs=1)) for prompt in prompts]
    sizes = {"device": "cpu", "page_size": 16, "max_context": 128}
    alone = LLM(target.folder, mtp="off", prefix_cache=False, **sizes)
    wanted = [drive(alone, [request]).results[request.id] for request in requests_of(alone, cases)]
    crowded = LLM(
        target.folder,
        proposer="draft",
        drafter=str(tmp_path / "small"),
        max_rows=5,
        cache_tokens=240,
        **sizes,
    )
    requests = with_depth(requests_of(crowded, cases), [3, 5, 1])
    traces = [drive(crowded, requests) for _ in range(2)]
    for trace in traces:
        assert [trace.results[request.id] for request in requests] == wanted
        assert sum(output.num_accepted for output in trace.outputs)
        assert any(output.num_cached for output in trace.outputs)
    assert traces[0].preempted
