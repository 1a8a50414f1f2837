"""GPTQ from its definition: widths, both versions of zero points, groups in and out of order."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headlong.errors import CheckpointError
from headlong.quant.format import Part
from headlong.quant.gptq import GptqFormat, GptqWeight
from support.packing import header
from support.packing_bits import words_of

V1, V2 = {"checkpoint_format": "gptq"}, {"checkpoint_format": "gptq_v2"}


def random_parts(
    rows: int, columns: int, groups: int, bits: int, most: int = 0
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The parts, and the codes [out, in] and stored zeros [groups, out] in them; `most` or the largest zero point that
    both versions may store is among them."""
    generator = torch.Generator().manual_seed(rows + columns + bits)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=generator)
    most = most or (1 << bits) - 2
    zeros = torch.randint(0, most + 1, (groups, rows), generator=generator)
    zeros[0, 0] = most
    parts = {
        "qweight": words_of(codes.numpy(), bits).t().contiguous(),
        "qzeros": words_of(zeros.numpy(), bits),
        "scales": (torch.rand(groups, rows, generator=generator) + 0.1).half(),
    }
    return parts, codes, zeros


def opened(parts: dict[str, Tensor], shape: tuple[int, int], hint: dict | None = None) -> GptqWeight:
    found = GptqFormat.detect(header(parts), shape, V1 | (hint or {}))
    assert found is not None
    return found.pack(parts, shape)


def by_definition(codes: Tensor, zeros: Tensor, scales: Tensor, group_of: list[int]) -> np.ndarray:
    rows, columns = codes.shape
    values = np.zeros((rows, columns), np.float32)
    for row in range(rows):
        for column in range(columns):
            group = group_of[column]
            steps = int(codes[row, column]) - int(zeros[group, row])
            values[row, column] = np.float32(steps) * np.float32(scales[group, row].item())
    return values


@settings(max_examples=30, deadline=None)
@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    rows=st.integers(1, 20),
    groups=st.integers(1, 4),
    group=st.sampled_from([8, 16, 32]),
    version=st.sampled_from([1, 2]),
    shuffled=st.booleans(),
)
def test_definition(bits, rows, groups, group, version, shuffled):
    columns = groups * group
    parts, codes, zeros = random_parts(rows, columns, groups, bits, (1 << bits) - 1 if version == 2 else 0)
    group_of = [column // group for column in range(columns)]
    if shuffled:
        group_of = [int(one) for one in torch.randint(0, groups, (columns,))]
    parts["g_idx"] = torch.tensor(group_of, dtype=torch.int32)
    weight = opened(parts, (rows, columns), {"bits": bits, **(V2 if version == 2 else {})})
    zeros = zeros + 1 if version == 1 else zeros
    wanted = by_definition(codes, zeros, parts["scales"], group_of)
    np.testing.assert_array_equal(weight.dequantize(0, rows).numpy(), wanted)
    apart = torch.randperm(rows)
    np.testing.assert_array_equal(weight.dequantize_rows(apart).numpy(), wanted[apart.numpy()])


def test_g_idx_that_only_counts_is_dropped():
    parts, _, _ = random_parts(8, 64, 4, 4)
    runs = torch.arange(64, dtype=torch.int32) // 16
    plain, counted = opened(parts, (8, 64)), opened(parts | {"g_idx": runs}, (8, 64))
    assert counted.g_idx is None and len(counted.tensors) == 3
    assert torch.equal(plain.dequantize(0, 8), counted.dequantize(0, 8))
    assert len(opened(parts | {"g_idx": runs.flip(0).contiguous()}, (8, 64)).tensors) == 4


@pytest.mark.parametrize(
    ("hint", "group"),
    [({"group_size": 48}, 48), ({}, 64), ({"group_size": 100}, 64), ({"group_size": -1}, 64)],
)
def test_a_short_last_group(hint, group):
    parts, codes, zeros = random_parts(8, 136, 3, 4)
    weight = opened(parts, (8, 136), hint)
    assert weight.group == group
    wanted = by_definition(codes, zeros + 1, parts["scales"], [column // group for column in range(136)])
    np.testing.assert_array_equal(weight.dequantize(0, 8).numpy(), wanted)


def test_a_group_that_could_be_two():
    """192 columns in two groups: 96 each, or 128 and a rest. The config decides, or the list of columns."""
    parts, codes, zeros = random_parts(8, 192, 2, 4)
    with pytest.raises(CheckpointError, match="groups of 96 or of 128: give `group_size`"):
        opened(parts, (8, 192))
    for group in (96, 128):
        group_of = [column // group for column in range(192)]
        wanted = by_definition(codes, zeros + 1, parts["scales"], group_of)
        told = opened(parts, (8, 192), {"group_size": group})
        listed = opened(parts | {"g_idx": torch.tensor(group_of, dtype=torch.int32)}, (8, 192))
        for weight in (told, listed):
            np.testing.assert_array_equal(weight.dequantize(0, 8).numpy(), wanted)


@pytest.mark.parametrize(
    ("bits", "groups", "hint", "label"),
    [
        (4, 4, {}, "gptq int4 group 32"),
        (8, 2, V2, "gptq_v2 int8 group 64"),
        (2, 1, {"group_size": -1}, "gptq int2 channel"),
    ],
)
def test_labels_and_bits(bits, groups, hint, label):
    weight = opened(random_parts(8, 128, groups, bits)[0], (8, 128), hint)
    assert (weight.format.label, weight.format.bits) == (label, bits + (16 + bits) * groups / 128)


HEADER = {"qweight": Part("I32", (8, 32)), "qzeros": Part("I32", (2, 4)), "scales": Part("F16", (2, 32))}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"qweight": Part("I32", (5, 32))}, r"qweight has the shape \[5, 32\], which is neither GPTQ's"),
        ({"qweight": Part("I32", (8, 31))}, "qweight has the shape"),
        ({"qweight": Part("I32", (8,))}, "qweight has the shape"),
        ({"qweight": Part("F16", (8, 32))}, "qweight is F16"),
        ({"qzeros": None}, "qzeros is missing"),
        ({"qzeros": Part("I32", (2, 5))}, "qzeros has the shape"),
        ({"scales": None}, "scales is missing"),
        ({"scales": Part("F16", (32, 2))}, "scales have the shape"),
        ({"scales": Part("I32", (2, 32))}, "scales is I32"),
        ({"scales": Part("F16", (0, 32)), "qzeros": Part("I32", (0, 4))}, "scales have 0 groups"),
        ({"scales": Part("F16", (50, 32)), "qzeros": Part("I32", (50, 4))}, "scales have 50 groups"),
        ({"g_idx": Part("I32", (32,))}, "g_idx has the shape"),
    ],
)
def test_headers_that_do_not_fit(change, words):
    parts = {name: part for name, part in (HEADER | change).items() if part is not None}
    with pytest.raises(CheckpointError, match=words):
        GptqFormat.detect(parts, (32, 64), {})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"g_idx": torch.full((64,), 4, dtype=torch.int32)}, "g_idx runs from 4 to 4 and must lie in 0 to 3"),
        ({"g_idx": torch.arange(64, dtype=torch.int32) // 16 - 2}, "g_idx runs from -2"),
        ({"scales": torch.full((4, 8), torch.nan).half()}, "scales holds values that are not finite"),
    ],
)
def test_values_that_cannot_be(change, words):
    with pytest.raises(CheckpointError, match=words):
        opened(random_parts(8, 64, 4, 4)[0] | change, (8, 64))
