"""NVFP4 in both spellings, by its definition and against compressed-tensors."""

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor

from headlong.errors import CheckpointError
from headlong.quant.format import Part
from headlong.quant.nvfp4 import Nvfp4Format, Nvfp4Weight
from support.packing import header
from support.packing_bits import floats, minifloat, spread


def random_parts(rows: int, columns: int, groups: int, divides: bool, scalar: tuple[int, ...] = ()) -> dict:
    generator = torch.Generator().manual_seed(rows * columns)
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
    scale = (torch.rand(rows, groups, generator=generator) * 400).to(torch.float8_e4m3fn)
    names = ("weight_packed", "weight_global_scale") if divides else ("weight", "weight_scale_2")
    overall = torch.full(scalar, 1234.56 if divides else 0.000731)
    return {names[0]: codes, "weight_scale": scale, names[1]: overall}


def opened(parts: dict[str, Tensor], shape: tuple[int, int]) -> Nvfp4Weight:
    found = Nvfp4Format.detect(header(parts), shape, {})
    assert found is not None
    return found.pack(parts, shape)


def by_definition(parts: dict[str, Tensor], rows: int, columns: int, group: int) -> np.ndarray:
    codes = (parts["weight"] if "weight" in parts else parts["weight_packed"]).numpy()
    values = np.zeros((rows, columns), np.float32)
    for row in range(rows):
        for column in range(columns):
            byte = int(codes[row, column // 2])
            values[row, column] = minifloat(byte >> 4 if column % 2 else byte & 15, 2, 1)
    scale = floats(parts["weight_scale"])
    if "weight" in parts:
        scale = scale * np.float32(parts["weight_scale_2"].item())
    else:
        scale = scale / np.float32(parts["weight_global_scale"].item())
    return values * spread(scale, rows, columns, (1, group))


@pytest.mark.parametrize("scalar", [(), (1,), (1, 1)])
@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "groups", "group"),
    [(5, 64, 4, 16), (1, 16, 1, 16), (3, 40, 3, 16), (4, 64, 2, 32), (2, 2, 1, 16)],
)
def test_definition(rows, columns, groups, group, divides, scalar):
    parts = random_parts(rows, columns, groups, divides, scalar)
    weight = opened(parts, (rows, columns))
    np.testing.assert_array_equal(
        weight.dequantize(0, rows).numpy(), by_definition(parts, rows, columns, group)
    )
    assert weight.format.label == ("nvfp4" if group == 16 else "nvfp4 group 32")
    assert weight.format.bits == 4 + 8 / group


def test_compressed_tensors_agrees():
    parts = random_parts(6, 96, 6, divides=True, scalar=(1,))
    fields = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs.model_validate(fields))
    wanted = NVFP4PackedCompressor.decompress(dict(parts), scheme)["weight"]
    assert wanted.dtype == torch.bfloat16
    assert torch.equal(opened(parts, (6, 96)).dequantize(0, 6).bfloat16(), wanted)


def test_static_activations_are_left_alone():
    extra = {"input_scale": torch.tensor(1.0), "input_global_scale": torch.tensor([2.0])}
    weight = opened(random_parts(2, 32, 2, divides=False) | extra, (2, 32))
    assert extra.keys() <= weight.format.unused.keys()


HEADER = {
    "weight": Part("U8", (4, 32)),
    "weight_scale": Part("F8_E4M3", (4, 4)),
    "weight_scale_2": Part("F32", ()),
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight": Part("U8", (4, 64))}, r"weight has the shape \[4, 64\]"),
        ({"weight_scale": Part("F8_E4M3", (4, 5))}, "weight_scale has 5 groups"),
        ({"weight_scale": Part("F8_E4M3", (3, 4))}, "weight_scale has the shape"),
        ({"weight_scale": Part("U8", (4, 2))}, "weight_scale is U8"),
        ({"weight_scale_2": Part("F32", (4,))}, "weight_scale_2 has the shape"),
        ({"weight_scale_2": None}, "weight_scale_2 is missing"),
        ({"weight_scale_2": None, "weight_global_scale": Part("F32", ())}, "weight_scale_2 is missing"),
    ],
)
def test_headers_that_do_not_fit(change, words):
    parts = {name: part for name, part in (HEADER | change).items() if part is not None}
    with pytest.raises(CheckpointError, match=words):
        Nvfp4Format.detect(parts, (4, 64), {})


def test_odd_input_features():
    with pytest.raises(CheckpointError, match="odd number of input features"):
        Nvfp4Format.detect(HEADER, (4, 63), {})


@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_global_scales_that_cannot_be(divides, value):
    parts = random_parts(2, 32, 2, divides)
    name = "weight_global_scale" if divides else "weight_scale_2"
    with pytest.raises(CheckpointError, match=name):
        opened(parts | {name: torch.tensor(value)}, (2, 32))


def test_scales_that_are_not_finite():
    parts = random_parts(2, 32, 2, divides=True)
    parts["weight_scale"].view(torch.uint8)[1, 1] = 0x7F
    with pytest.raises(CheckpointError, match="weight_scale holds values that are not finite"):
        opened(parts, (2, 32))


def test_other_weights_are_not_claimed():
    assert (
        Nvfp4Format.detect({"weight": Part("F8_E4M3", (4, 4)), "weight_scale": Part("F32", ())}, (4, 4), {})
        is None
    )
    assert Nvfp4Format.detect({"weight_packed": Part("I32", (4, 1))}, (4, 4), {}) is None
