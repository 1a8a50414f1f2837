"""Formats of several tools: values and shapes that cannot be are refused, with the reason."""

import json

import pytest
import torch

from headlong.errors import CheckpointError
from headlong.quant.detect import detect
from support.packing import header, hint_of, pack, unpacked
from support.packing_libraries import STATE

SHAPE = (16, 64)
STATE_NF4 = STATE + "nf4"


def read(how: str, change: dict, hint: dict | None = None):
    parts = pack(torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)), how)
    parts = {name: part for name, part in (parts | change).items() if part is not None}
    return detect(header(parts), SHAPE, hint_of(how) | (hint or {})).pack(parts, SHAPE)


def state(**fields) -> dict:
    text = json.dumps({"quant_type": "nf4", "blocksize": 64, "shape": list(SHAPE)} | fields)
    return {STATE_NF4: torch.tensor(list(text.encode()), dtype=torch.uint8)}


@pytest.mark.parametrize(
    ("how", "change", "words"),
    [
        ("mxfp4_compressed", {"weight_scale": torch.full((16, 2), 255, dtype=torch.uint8)}, "not finite"),
        ("mxfp4_blocks", {"scales": torch.zeros(16, 3, dtype=torch.uint8)}, "scales has the shape"),
        ("mxfp4_modelopt", {"weight": torch.zeros(16, 31, dtype=torch.uint8)}, "weight has the shape"),
        ("mxfp4_deepseek", {"scale": torch.full((16, 2), 255, dtype=torch.uint8)}, "scale holds values"),
        ("mxfp4_deepseek", {"scale": torch.zeros(16, 3, dtype=torch.uint8)}, "scale has the shape"),
        ("mxfp4_deepseek", {"scale": None}, "two to a byte, need scale beside them"),
        ("mxfp4_deepseek", {"weight_scale": torch.ones(16, 2)}, "weight_scale cannot be part of a mxfp4"),
        ("nf4", state(blocksize=128), "says blocksize 128 where tensors say 64"),
        ("nf4", state(quant_type="fp4"), "says quant_type 'fp4' where tensors say 'nf4'"),
        ("nf4", state(shape=[64, 16]), "says shape"),
        ("nf4", {STATE_NF4: torch.tensor([1, 2, 3], dtype=torch.uint8)}, "is no JSON"),
        ("nf4", {STATE_NF4: None}, "needs weight.quant_state"),
        ("nf4", {"weight.absmax": torch.ones(15)}, "no size of blocks"),
        ("nf4_nested", {"weight.nested_absmax": None}, "nested_absmax is missing"),
        ("bnb8", {"weight_format": torch.ones((), dtype=torch.uint8)}, "weight_format is not 0"),
        ("bnb8", {"SCB": torch.full((16,), torch.inf)}, "SCB holds values that are not finite"),
        ("awq_gemv", {"scales": torch.ones(16, 32).half()}, "scales of groups after the 2"),
        ("modelopt_int4_smooth", {"pre_quant_scale": torch.zeros(64).half()}, "pre_quant_scale holds 0"),
        ("modelopt_int4_smooth", {"pre_quant_scale": torch.ones(16).half()}, "pre_quant_scale has the shape"),
        ("torchao_int8", {"_weight_scale": torch.ones(8, 2)}, "none of groups"),
    ],
)
def test_values_that_cannot_be(how, change, words):
    with pytest.raises(CheckpointError, match=words):
        read(how, change)


def test_seven_bits_that_lie_as_eight_do():
    """Once compressed-tensors put four codes of 7 bits into a word, as it does with 8 bits: the config tells them."""
    with pytest.raises(CheckpointError, match="8 bits by its shape and 7 by the config"):
        read("int8_pack", {}, {"bits": 7})
    assert read("int8_pack", {}, {"bits": 8}).format.label == "int8 channel"


def test_floats_with_scales_need_a_config():
    """Whether they are to be rounded their tensors do not say."""
    parts = pack(torch.randn(SHAPE), "unrounded_int4")
    with pytest.raises(CheckpointError, match="weight_scale cannot be part of a f32 weight"):
        detect(header(parts), SHAPE, {})
    with pytest.raises(CheckpointError, match="rounds to float of 4 bits cannot be read"):
        detect(header(parts), SHAPE, {"weights": {"num_bits": 4, "type": "float"}})


@pytest.mark.parametrize("how", ["quark_int4", "quark_uint4"])
def test_codes_of_quark_need_a_config(how):
    """Whether they are below zero, and in which order they lie in a word, no tensor says."""
    parts, said = pack(torch.randn(SHAPE), how), hint_of(how)
    wanted = unpacked(how, parts, SHAPE)
    assert torch.equal(detect(header(parts), SHAPE, said).pack(parts, SHAPE).dequantize(0, SHAPE[0]), wanted)
    for left_out in said:
        with pytest.raises(CheckpointError, match="can be read in several ways"):
            detect(header(parts), SHAPE, {name: value for name, value in said.items() if name != left_out})
    other = {"int4": "uint4", "uint4": "int4", "order": "reorder", "reorder": "order"}
    for name in said:
        values = detect(header(parts), SHAPE, said | {name: other[said[name]]}).pack(parts, SHAPE)
        assert not torch.equal(values.dequantize(0, SHAPE[0]), wanted)


def test_a_mode_of_mlx_that_the_parts_are_not_of():
    with pytest.raises(CheckpointError):
        read("mxfp4_mlx", {}, {"mode": "nvfp4"})
    assert read("mxfp4_mlx", {}, {"mode": "mxfp4"}).format.label == "mxfp4"
