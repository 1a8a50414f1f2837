"""MLX's affine integers from their definition, at every width."""

import numpy as np
import pytest
import torch
from torch import Tensor

from headlong.errors import CheckpointError
from headlong.quant.format import Part
from headlong.quant.mlx import MlxFormat, MlxWeight
from support.packing import header


def random_parts(rows: int, columns: int, groups: int, bits: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows * columns + bits)
    words = torch.randint(-(1 << 31), 1 << 31, (rows, columns * bits // 32), generator=generator).int()
    return {
        "weight": words.view(torch.uint32),
        "scales": (torch.rand(rows, groups, generator=generator) + 0.1).to(dtype),
        "biases": torch.randn(rows, groups, generator=generator).to(dtype),
    }


def opened(parts: dict[str, Tensor], shape: tuple[int, int]) -> MlxWeight:
    found = MlxFormat.detect(header(parts), shape, {})
    assert found is not None
    return found.pack(parts, shape)


def bit(parts: dict[str, Tensor], row: int, at: int) -> int:
    return int(parts["weight"].view(torch.int32)[row, at // 32]) >> (at % 32) & 1


def by_definition(parts: dict[str, Tensor], rows: int, columns: int, bits: int) -> np.ndarray:
    scales, biases = (parts[name].float().numpy() for name in ("scales", "biases"))
    group = columns // scales.shape[1]
    values = np.zeros((rows, columns), np.float32)
    for row in range(rows):
        for column in range(columns):
            code = sum(bit(parts, row, column * bits + place) << place for place in range(bits))
            of = (row, column // group)
            values[row, column] = np.float32(code) * scales[of] + biases[of]
    return values


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize(
    ("rows", "columns", "groups", "dtype"),
    [(1, 32, 1, torch.float32), (3, 128, 2, torch.bfloat16), (5, 96, 3, torch.float16)],
)
def test_definition(rows, columns, groups, dtype, bits):
    parts = random_parts(rows, columns, groups, bits, dtype)
    weight = opened(parts, (rows, columns))
    np.testing.assert_array_equal(
        weight.dequantize(0, rows).numpy(), by_definition(parts, rows, columns, bits)
    )
    group = columns // groups
    assert weight.format.label == f"mlx int{bits} group {group}"
    assert weight.format.bits == bits + 2 * 8 * dtype.itemsize / group


HEADER = {"weight": Part("U32", (4, 8)), "scales": Part("BF16", (4, 2)), "biases": Part("BF16", (4, 2))}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight": Part("U32", (4, 7))}, r"weight has the shape \[4, 7\]"),
        ({"weight": Part("U32", (5, 8))}, "weight has the shape"),
        ({"biases": None}, "biases are missing beside scales, which are of none of MLX's modes"),
        ({"scales": None}, "scales is missing"),
        ({"scales": Part("U8", (4, 2))}, "scales is U8"),
        ({"scales": Part("BF16", (2, 4))}, "scales have the shape"),
        ({"scales": Part("BF16", (4, 3)), "biases": Part("BF16", (4, 3))}, "scales has 3 groups"),
        ({"biases": Part("BF16", (4, 1))}, "biases has the shape"),
    ],
)
def test_headers_that_do_not_fit(change, words):
    parts = {name: part for name, part in (HEADER | change).items() if part is not None}
    with pytest.raises(CheckpointError, match=words):
        MlxFormat.detect(parts, (4, 64), {})


@pytest.mark.parametrize("name", ["scales", "biases"])
def test_values_that_are_not_finite(name):
    parts = random_parts(2, 64, 2, 4, torch.bfloat16)
    parts[name][1, 1] = torch.nan
    with pytest.raises(CheckpointError, match=f"{name} holds values that are not finite"):
        opened(parts, (2, 64))


def test_other_weights_are_not_claimed():
    assert MlxFormat.detect({"weight": Part("I32", (4, 8))}, (4, 64), {}) is None
