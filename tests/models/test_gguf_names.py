"""GGUF names both ways, against the `gguf` package's own lists, and the transforms against their definitions."""

import pytest
import torch
from gguf.constants import MODEL_ARCH_NAMES, MODEL_TENSORS, TENSOR_NAMES
from gguf.tensor_mapping import get_tensor_name_map

from headlong.checkpoint.gguf_names import GgufNames, num_main_layers
from headlong.checkpoint.transforms import (
    CONV,
    IDENTITY,
    LOG_DECAY,
    MLX_CONV,
    NORM,
    SHARED_GATE,
    Transform,
    inverse,
    rope_row_order,
    tiled_row_order,
)
from headlong.errors import CheckpointError
from headlong.models.registry import BY_ARCHITECTURE

QWEN35, QWEN35MOE, LLAMA = "qwen35", "qwen35moe", "llama"
ELSEWHERE = {"deepseek4"}
"""Whose names the gguf package does not list yet; test_deepseek_v4_names.py is about them."""
ARCHITECTURES = sorted(BY_ARCHITECTURE.keys() - ELSEWHERE)
GGUF_ARCH = {name: arch for arch, name in MODEL_ARCH_NAMES.items() if name in BY_ARCHITECTURE}
LEFT_OUT = {
    # Rotary tables of old files, and the router and experts of Mixtral, which is another model.
    LLAMA: {"attn_rot_embd", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"},
    # And what models without latents have under the same name.
    "deepseek2": {"attn_rot_embd", "attn_k", "attn_v"},
}
SUFFIX = {"ssm_a": "", "ssm_dt": ".bias", "exp_probs_b": ".bias"}
HEAD = {
    "nextn.eh_proj.weight": "mtp.fc.weight",
    "nextn.enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "nextn.hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm.weight": "mtp.norm.weight",
    "nextn.embed_tokens.weight": "mtp.embed_tokens.weight",
    "nextn.shared_head_head.weight": "mtp.lm_head.weight",
}


def names_of(arch: str) -> GgufNames:
    spec = BY_ARCHITECTURE[arch].gguf
    assert spec is not None
    return spec.names


def canonical(name: str, arch: str, num_layers: int) -> str | None:
    return names_of(arch).canonical(name, num_layers)


def disk(name: str, arch: str, num_layers: int) -> str | None:
    return names_of(arch).disk(name, num_layers)


def transform(name: str, arch: str) -> Transform:
    return names_of(arch).transform(name)


def listed(arch: str) -> list[str]:
    """Every tensor name the gguf package gives the architecture, in block 1, which is no head."""
    names = []
    for tensor in MODEL_TENSORS[GGUF_ARCH[arch]]:
        name = TENSOR_NAMES[tensor].format(bid=1)
        kind = name.rpartition(".")[2]
        if kind not in LEFT_OUT.get(arch, ()) and ".nextn." not in name:
            names.append(name + SUFFIX.get(kind, ".weight"))
    return names


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_listed_tensor_has_a_canonical_name_and_comes_back(arch: str) -> None:
    found = {name: canonical(name, arch, 2) for name in listed(arch)}
    assert None not in found.values(), found
    assert len(set(found.values())) == len(found)
    for name, known in found.items():
        assert known is not None and disk(known, arch, 2) == name


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_names_agree_with_the_tensor_map(arch: str) -> None:
    """The gguf package knows Hugging Face names too; ours must lead to the same tensor."""
    theirs = get_tensor_name_map(GGUF_ARCH[arch], 2)
    compared = 0
    for name in listed(arch):
        known = canonical(name, arch, 2)
        assert known is not None
        stem = known.removesuffix(".weight").removesuffix(".dt_bias")
        for spelling in (f"model.{stem}", f"model.{stem}.dt_proj", stem):
            mapped = theirs.get_name(spelling)
            if mapped is not None:
                assert name.removesuffix(".weight").removesuffix(".bias") == mapped
                compared += 1
                break
    assert compared >= 0.7 * len(listed(arch))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_head_is_the_block_after_the_layers(arch: str) -> None:
    for name, known in HEAD.items():
        if names_of(arch).joins_in_layers:
            known = known.replace("mtp.", "mtp.layers.0.")
        assert canonical(f"blk.5.{name}", arch, 5) == known
        assert disk(known, arch, 5) == f"blk.5.{name}"
        assert canonical(f"blk.4.{name}", arch, 5) is None
    assert canonical("blk.5.attn_q.weight", arch, 5) == "mtp.layers.0.self_attn.q_proj.weight"
    assert disk("mtp.layers.0.self_attn.q_proj.weight", arch, 5) == "blk.5.attn_q.weight"
    assert canonical("blk.6.attn_q.weight", arch, 5) == "mtp.layers.1.self_attn.q_proj.weight"


def test_experts_keep_gate_and_up_apart() -> None:
    for kind in ("gate", "up", "down"):
        name = f"layers.0.mlp.experts.{kind}_proj.weight"
        assert canonical(f"blk.0.ffn_{kind}_exps.weight", QWEN35MOE, 2) == name
        assert canonical(f"blk.0.ffn_{kind}_exps.weight", QWEN35, 2) is None
    assert canonical("blk.0.ffn_gate_up_exps.weight", QWEN35MOE, 2) == "layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.attn_q.scale",
        "blk.00.attn_q.weight",
        "blk.-1.attn_q.weight",
        "blk..attn_q.weight",
        "blk.0.",
        "v.blk.0.attn_q.weight",
        "token_embd",
        "",
    ],
)
def test_unknown_on_disk(name: str) -> None:
    assert canonical(name, QWEN35, 2) is None


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("layers.2.self_attn.q_proj.weight", QWEN35),  # there are layers 0 and 1
        ("layers.0.mlp.experts.3.gate_proj.weight", QWEN35MOE),
        ("layers.0.linear_attn.A_log", LLAMA),
        ("mtp.hnorm.weight", QWEN35),
        ("model.norm.weight", QWEN35),
    ],
)
def test_unknown_in_a_model(name: str, arch: str) -> None:
    assert disk(name, arch, 2) is None


def test_biases() -> None:
    assert canonical("blk.0.attn_q.bias", LLAMA, 1) == "layers.0.self_attn.q_proj.bias"
    assert disk("layers.0.mlp.down_proj.bias", LLAMA, 1) == "blk.0.ffn_down.bias"
    assert canonical("rope_freqs.weight", LLAMA, 1) == "rope_freqs.weight"


def test_which_transform() -> None:
    norms = (
        *("norm.weight", "layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight"),
        *("layers.0.self_attn.q_norm.weight", "layers.0.self_attn.k_norm.weight", "mtp.norm.weight"),
        *("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"),
        *("mtp.layers.0.input_layernorm.weight", "mtp.layers.0.self_attn.k_norm.weight"),
    )
    for name in norms:
        assert transform(name, QWEN35) is NORM and transform(name, QWEN35MOE) is NORM
        assert transform(name, LLAMA) is IDENTITY
    assert transform("layers.0.linear_attn.norm.weight", QWEN35) is IDENTITY
    assert transform("layers.0.linear_attn.A_log", QWEN35) is LOG_DECAY
    assert transform("layers.0.linear_attn.dt_bias", QWEN35) is IDENTITY
    assert transform("layers.0.linear_attn.conv1d.weight", QWEN35) is CONV
    assert transform("layers.0.mlp.shared_expert_gate.weight", QWEN35MOE) is SHARED_GATE
    for name in ("embed_tokens.weight", "lm_head.weight", "mtp.fc.weight", "layers.0.mlp.gate.weight"):
        assert transform(name, QWEN35MOE) is IDENTITY


def test_values_there_and_back() -> None:
    weight = torch.randn(64, generator=torch.Generator().manual_seed(0)).bfloat16()
    stored = NORM.to_disk(weight)
    assert stored.dtype is torch.float32 and torch.equal(stored, 1 + weight.float())
    assert torch.equal(NORM.to_model(stored).bfloat16(), weight)
    rates = LOG_DECAY.to_disk(weight)
    assert rates.dtype is torch.float32 and (rates < 0).all()
    torch.testing.assert_close(rates, -torch.exp(weight.float()))
    assert torch.equal(LOG_DECAY.to_model(rates).bfloat16(), weight)
    conv = torch.arange(12.0).view(3, 1, 4)
    assert CONV.to_disk(conv).shape == CONV.disk_shape((3, 1, 4)) == (3, 4)
    assert torch.equal(CONV.to_model(CONV.to_disk(conv)), conv)
    assert CONV.model_shape((3, 4)) == CONV.model_shape((3, 1, 4)) == (3, 1, 4)
    assert torch.equal(MLX_CONV.to_model(conv.transpose(1, 2)), conv)
    assert MLX_CONV.model_shape((3, 4, 1)) == (3, 1, 4) and MLX_CONV.to_disk(conv).shape == (3, 4, 1)
    gate = torch.arange(5.0).view(1, 5)
    assert SHARED_GATE.to_disk(gate).shape == SHARED_GATE.disk_shape((1, 5)) == (5,)
    assert torch.equal(SHARED_GATE.to_model(gate[0]), gate)
    assert torch.equal(SHARED_GATE.to_model(gate), gate)


def test_wide_values_stay_wide() -> None:
    weight = torch.linspace(-1, 2, 7, dtype=torch.float64)
    for kind in (NORM, LOG_DECAY):
        stored = kind.to_disk(weight)
        assert stored.dtype is torch.float64
        torch.testing.assert_close(kind.to_model(stored), weight, rtol=0, atol=1e-15)


def metadata(**fields: object) -> dict[str, object]:
    return {"general.architecture": "qwen35"} | {f"qwen35.{key}": value for key, value in fields.items()}


def test_layers_before_the_head() -> None:
    assert num_main_layers(metadata(block_count=9, nextn_predict_layers=1)) == 8
    assert num_main_layers(metadata(block_count=9)) == 9


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({}, "qwen35.block_count"),
        ({"block_count": 0}, "qwen35.block_count"),
        ({"block_count": -1}, "qwen35.block_count"),
        ({"block_count": True}, "qwen35.block_count"),
        ({"block_count": 2**31}, "qwen35.block_count"),
        ({"block_count": [4]}, "qwen35.block_count"),
        ({"block_count": 2, "nextn_predict_layers": 2}, "qwen35.block_count"),
        ({"block_count": 2, "nextn_predict_layers": "1"}, "qwen35.nextn_predict_layers"),
    ],
)
def test_absurd_counts(fields: dict[str, object], key: str) -> None:
    with pytest.raises(CheckpointError, match=key):
        num_main_layers(metadata(**fields))
    with pytest.raises(CheckpointError, match="'mamba'"):
        num_main_layers({"general.architecture": "mamba"})


def test_tiled_value_heads() -> None:
    """Two key heads with three value heads each: grouped a a a b b b on one side, tiled a b a b a b on the other."""
    grouped = torch.tensor([[key * 10.0 + v] * 4 for key in range(2) for v in range(3)]).view(-1)
    tiled = torch.tensor([[key * 10.0 + v] * 4 for v in range(3) for key in range(2)]).view(-1)
    order = tiled_row_order(2, 6, 4)
    assert torch.equal(tiled[order], grouped)
    assert torch.equal(grouped[inverse(order)], tiled)


def test_rotary_rows_turn_the_same_way() -> None:
    """Rotating neighbours on disk is rotating halves in the model."""
    heads, dim = 3, 8
    angles = torch.linspace(0.1, 1.3, dim // 2)
    stored = torch.randn(heads * dim, generator=torch.Generator().manual_seed(1))
    order = rope_row_order(heads, dim)

    pairs = torch.view_as_complex(stored.view(heads, dim // 2, 2))
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).reshape(-1)

    halves = stored[order].view(heads, dim)
    cos, sin = angles.cos().repeat(2), angles.sin().repeat(2)
    rotated = torch.cat([-halves[:, dim // 2 :], halves[:, : dim // 2]], dim=-1)
    torch.testing.assert_close((halves * cos + rotated * sin).reshape(-1), turned[order])
    assert torch.equal(stored[order][inverse(order)], stored)
