"""AWQ from its definition: the order of its nibbles, groups, rows that lie anywhere in a word."""

import numpy as np
import pytest
import torch
from torch import Tensor

from headlong.errors import CheckpointError
from headlong.quant.awq import AwqFormat, AwqWeight
from headlong.quant.format import Part
from support.packing import header

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The feature in each nibble, from the lowest bits up."""


def nibble(words: Tensor, row: int, feature: int) -> int:
    word = int(words[row, feature // 8]) & 0xFFFFFFFF
    return word >> (4 * ORDER.index(feature % 8)) & 15


def random_parts(
    rows: int, columns: int, groups: int, dtype: torch.dtype = torch.float16
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows * columns)
    low, high = -(1 << 31), 1 << 31
    return {
        "qweight": torch.randint(low, high, (columns, rows // 8), generator=generator).int(),
        "qzeros": torch.randint(low, high, (groups, rows // 8), generator=generator).int(),
        "scales": (torch.rand(groups, rows, generator=generator) + 0.1).to(dtype),
    }


def opened(parts: dict[str, Tensor], shape: tuple[int, int]) -> AwqWeight:
    found = AwqFormat.detect(header(parts), shape, {})
    assert found is not None
    return found.pack(parts, shape)


def by_definition(parts: dict[str, Tensor], rows: int, columns: int) -> np.ndarray:
    group = columns // parts["scales"].shape[0]
    values = np.zeros((rows, columns), np.float32)
    for row in range(rows):
        for column in range(columns):
            steps = nibble(parts["qweight"], column, row) - nibble(parts["qzeros"], column // group, row)
            values[row, column] = np.float32(steps) * np.float32(parts["scales"][column // group, row].item())
    return values


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "columns", "groups"), [(8, 32, 1), (24, 48, 3), (40, 7, 7), (8, 1, 1)])
def test_definition(rows, columns, groups, dtype):
    parts = random_parts(rows, columns, groups, dtype)
    weight, wanted = opened(parts, (rows, columns)), by_definition(parts, rows, columns)
    for first in range(rows):
        for last in range(first + 1, rows + 1):
            np.testing.assert_array_equal(weight.dequantize(first, last).numpy(), wanted[first:last])
    apart = torch.tensor([rows - 1, 0, rows // 2, rows // 2])
    np.testing.assert_array_equal(weight.dequantize_rows(apart).numpy(), wanted[apart.numpy()])


def test_labels_and_bits():
    assert (AwqFormat(128).label, AwqFormat(128).bits) == ("awq int4 group 128", 4 + 20 / 128)
    channel = opened(random_parts(8, 64, 1, torch.float32), (8, 64)).format
    assert (channel.label, channel.bits) == ("awq int4 channel", 4 + 36 / 64)


HEADER = {"qweight": Part("I32", (64, 4)), "qzeros": Part("I32", (2, 4)), "scales": Part("F16", (2, 32))}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"qweight": Part("I8", (64, 4))}, "qweight is I8"),
        ({"qzeros": None}, "qzeros is missing"),
        ({"qzeros": Part("I32", (2, 32))}, "qzeros has the shape"),
        ({"scales": None}, "scales is missing"),
        ({"scales": Part("F16", (2, 31))}, "scales have the shape"),
        ({"scales": Part("F16", (3, 32)), "qzeros": Part("I32", (3, 4))}, "scales has 3 groups"),
    ],
)
def test_headers_that_do_not_fit(change, words):
    parts = {name: part for name, part in (HEADER | change).items() if part is not None}
    with pytest.raises(CheckpointError, match=words):
        AwqFormat.detect(parts, (32, 64), {})


def test_scales_that_are_not_finite():
    parts = random_parts(8, 32, 2)
    parts["scales"][1, 3] = torch.inf
    with pytest.raises(CheckpointError, match="scales holds values that are not finite"):
        opened(parts, (8, 32))


def test_gptq_is_not_claimed():
    parts = {"qweight": Part("I32", (8, 32)), "qzeros": Part("I32", (2, 4)), "scales": Part("F16", (2, 32))}
    assert AwqFormat.detect(parts, (32, 64), {}) is None
    assert AwqFormat.detect({"weight": Part("F16", (32, 64))}, (32, 64), {}) is None
