"""Whole models in every packed format, with heads packed the same way, another way and not at all."""

import json

import pytest
import torch
from safetensors.torch import save_file

from headlong import LLM, SamplingParams
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.engine.build import survey
from headlong.errors import HeadError
from headlong.quant.plain import PlainFormat
from support import tiny
from support.packed_models import LEFT_ALONE, packed, write, write_packed
from support.packing import FORMATS, pack, unpacked
from support.steps import Driver, load
from support.tiny import random_tokens

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
SCRIPT = random_tokens(96, 24, seed=3)
PROMPTS = [random_tokens(96, count, seed=count) for count in (3, 9, 17)]


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("dense"), "dense", **SIZES)


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("moe"), "moe", **SIZES)


@pytest.fixture(scope="module")
def latent(tmp_path_factory):
    ranks = {
        "q_lora_rank": 32,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
    }
    sizes = {
        name: SIZES[name]
        for name in ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size")
    }
    return tiny.make(tmp_path_factory.mktemp("latent"), "deepseek_v3", **sizes, **ranks)


def tokens(llm: LLM, drafts: int, **sampling) -> list[list[int]]:
    params = SamplingParams(max_tokens=24, ignore_eos=True, draft_tokens=drafts, **sampling)
    return [completion.token_ids for completion in llm.generate(PROMPTS, params)]


def assert_drafts_change_nothing(folder, **options) -> None:
    llm = LLM(folder, device="cpu", mtp="on", **options)
    for sampling in ({}, {"temperature": 0.9, "top_p": 0.95, "seed": 11}):
        plain = tokens(llm, 0, **sampling)
        for drafts in (1, 3):
            assert tokens(llm, drafts, **sampling) == plain


def logits_of(folder, **options) -> torch.Tensor:
    driver = Driver(load(folder, **options))
    driver.open("a", SCRIPT)
    return driver.feed("a", [len(SCRIPT) - 1]).logits


def others(how: str) -> list[str | None]:
    """Heads to go with a target: left in bfloat16, packed alike, packed another way."""
    return [None, how, "int8_channel" if how != "int8_channel" else "nvfp4_modelopt"]


SELDOM = ("mxfp4_modelopt", "mxfp4_mlx", "mxfp8", "nvfp4_mlx", "bnb8", "modelopt_int4_smooth", "torchao")
SELDOM += ("unrounded", "nf4_nested", "fp4", "quark_int4")
SELDOM += ("mxfp4_deepseek", "fp8_powers", "fp8_bytes")
"""Formats that differ from others in how their parts are called or read, and not in how models are loaded."""


def by_turns() -> list:
    """Every format with every kind of head; by default each has one of them, and each kind of head its turns."""
    return [
        pytest.param(
            how,
            head,
            marks=() if number % 3 == turn and not how.startswith(SELDOM) else pytest.mark.slow,
            id=f"{how}, {head}",
        )
        for number, how in enumerate(FORMATS)
        for turn, head in enumerate(others(how))
    ]


@pytest.mark.parametrize(("how", "head"), by_turns())
def test_every_format_with_every_kind_of_head(dense, tmp_path, how, head):
    folder = tmp_path / "packed"
    meant = write_packed(folder, dense, how, head)
    blueprint = survey(Checkpoint.open(folder))
    assert blueprint.head_refusal is None and blueprint.is_packed
    for name, format in blueprint.formats.items():
        wanted = head if name.startswith("mtp.") else how
        disk = name if name.startswith(("mtp.", "lm_head.")) else f"model.{name}"
        is_plain = wanted is None or any(part in name for part in LEFT_ALONE)
        assert isinstance(format, PlainFormat) == is_plain, f"{disk}: {format.label}"
    write(tmp_path / "floats", dense, meant)
    found, wanted = logits_of(folder), logits_of(tmp_path / "floats")
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert_drafts_change_nothing(folder)


@pytest.mark.parametrize("how", ["fp8_block", "nvfp4_modelopt", "int4_g32", "awq", "gptq_v1"])
def test_experts_packed_one_by_one(moe, tmp_path, how):
    meant = write_packed(tmp_path / "packed", moe, how, None, experts="apart")
    write(tmp_path / "floats", moe, meant)
    torch.testing.assert_close(
        logits_of(tmp_path / "packed"), logits_of(tmp_path / "floats"), rtol=1e-4, atol=1e-4
    )
    assert_drafts_change_nothing(tmp_path / "packed")


@pytest.mark.parametrize("how", ["fp8_block", "nvfp4_modelopt", "int4_g32", "int8_channel"])
def test_latent_attention_packed(latent, tmp_path, how):
    """The matrix that heads multiply from either side is packed too, and unpacked once."""
    meant = write_packed(tmp_path / "packed", latent, how, None, experts="apart")
    write(tmp_path / "floats", latent, meant)
    torch.testing.assert_close(
        logits_of(tmp_path / "packed"), logits_of(tmp_path / "floats"), rtol=1e-4, atol=1e-4
    )
    assert_drafts_change_nothing(tmp_path / "packed")


FUSED_SCALES = {
    # How a fused tensor's parts are named after it.
    "fp8_block": {"weight": "", "weight_scale_inv": "_scale_inv"},
    "fp8_channel": {"weight": "", "weight_scale": "_scale"},
    "nvfp4_modelopt": {"weight": "", "weight_scale": "_weight_scale", "weight_scale_2": "_weight_scale_2"},
}


@pytest.mark.parametrize("how", FUSED_SCALES)
def test_experts_packed_in_one_tensor(moe, tmp_path, how):
    stored, meant = {}, {}
    for name, weight in tiny.tensors(moe).items():
        if weight.dim() != 3 or "experts" not in name:
            stored[name] = meant[name] = weight
            continue
        each = [pack(one, how) for one in weight]
        stored |= {
            name + ending: torch.stack([parts[part] for parts in each])
            for part, ending in FUSED_SCALES[how].items()
        }
        meant[name] = torch.stack([unpacked(how, parts, tuple(weight.shape[1:])) for parts in each])
    write(tmp_path / "packed", moe, stored)
    write(tmp_path / "floats", moe, meant)
    torch.testing.assert_close(
        logits_of(tmp_path / "packed"), logits_of(tmp_path / "floats"), rtol=1e-4, atol=1e-4
    )
    assert_drafts_change_nothing(tmp_path / "packed")


@pytest.mark.parametrize("how", ["mlx4", "mlx8"])
def test_what_mlx_writes(dense, tmp_path, how):
    """Embedding and lm_head packed too, norms with 1 added, taps in the middle."""
    stored, meant = {}, {}
    for name, weight in tiny.tensors(dense).items():
        meant[name] = weight
        if weight.dim() == 2 and weight.shape[0] % 32 == 0:
            parts = pack(weight, how)
            stored |= {name.removesuffix("weight") + part: tensor for part, tensor in parts.items()}
            meant[name] = unpacked(how, parts, tuple(weight.shape))
        elif name.endswith("conv1d.weight"):
            stored[name] = weight.transpose(1, 2).contiguous()
        elif (name.endswith("norm.weight") and "linear_attn" not in name) or "pre_fc_norm" in name:
            stored[name] = weight + 1.0
        else:
            stored[name] = weight
    (tmp_path / "mlx").mkdir()
    write(tmp_path / "mlx", dense, stored)
    save_file(stored, tmp_path / "mlx" / "model.safetensors", metadata={"format": "mlx"})
    write(tmp_path / "floats", dense, meant)
    torch.testing.assert_close(
        logits_of(tmp_path / "mlx"), logits_of(tmp_path / "floats"), rtol=1e-4, atol=1e-4
    )
    assert_drafts_change_nothing(tmp_path / "mlx")


@pytest.mark.parametrize("kind", ["none", "fp8", "int8", "int4"])
@pytest.mark.parametrize("head", [None, "int4_g32"])
def test_a_head_repacked_on_load(dense, tmp_path, kind, head):
    write_packed(tmp_path, dense, "fp8_block", head)
    assert_drafts_change_nothing(tmp_path, draft_quantization=kind)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_head_in_a_dtype_of_its_own(dense, tmp_path, dtype):
    write_packed(tmp_path, dense, "nvfp4_compressed", None)
    assert_drafts_change_nothing(tmp_path, draft_dtype=dtype)


@pytest.mark.parametrize("how", ["gptq_v1", "gptq_v2"])
def test_zero_points_that_no_config_tells(dense, tmp_path, how):
    """A GPTQ head beside a config that says nothing: its values tell the version, or it is said, and a wrong word is
    refused."""
    stored, meant = packed(tiny.tensors(dense), None, how)
    write(tmp_path, dense, stored)
    said = {"gptq_v1": "gptq", "gptq_v2": "gptq_v2"}
    for options in ({}, {"draft_quantization": said.pop(how)}):
        fc = load(tmp_path, **options).head.layers[0].join.parts[0]
        torch.testing.assert_close(fc(torch.eye(fc.in_features)).T, meant["mtp.fc.weight"])
    with pytest.raises(HeadError, match="the zero points have the values of"):
        load(tmp_path, mtp="on", draft_quantization=said.popitem()[1])
    assert_drafts_change_nothing(tmp_path, draft_quantization="auto")


def test_zero_points_of_a_config_beside_the_model(dense, tmp_path):
    """`gptq_v2` in quantize_config.json alone, and AutoRound's own packing."""
    stored, meant = packed(tiny.tensors(dense), "gptq_v2", None)
    write(tmp_path / "floats", dense, meant)
    wanted = logits_of(tmp_path / "floats")
    config = tiny.read_config(dense.folder)
    own = {"quant_method": "auto-round", "bits": 4, "sym": False, "packing_format": "auto_round"}
    for name, section, beside in (
        ("older", {"quant_method": "gptq", "bits": 4}, {"bits": 4, "checkpoint_format": "gptq_v2"}),
        ("own", own, None),
    ):
        folder = tmp_path / name
        folder.mkdir()
        tiny.write(folder, config | {"quantization_config": section}, stored)
        if beside:
            (folder / "quantize_config.json").write_text(json.dumps(beside))
        torch.testing.assert_close(logits_of(folder), wanted, rtol=1e-4, atol=1e-4)
        told = survey(Checkpoint.open(folder)).detector.disagreements.values()
        assert all(sentence.endswith("the tensors are bf16") for sentence in told)
