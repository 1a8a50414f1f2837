"""pack-quantized and int-quantized against compressed-tensors itself, act-order by its definition."""

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.naive_quantized import IntQuantizationCompressor
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor, pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from headlong.errors import CheckpointError
from headlong.quant.compressed import CompressedInts, CompressedIntsWeight
from headlong.quant.format import Part
from headlong.quant.ints import pick_fields, unpack_fields
from support.packing import header
from support.packing_bits import fields_of, floats, words_of

SHARED = {
    "group": lambda rows, groups: (rows, groups),
    "channel": lambda rows, _: (rows, 1),
    "tensor": lambda *_: (1,),
}


def random_ints(shape: tuple[int, ...], bits: int, seed: int) -> Tensor:
    half = 1 << (bits - 1)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-half, half, shape, generator=generator).to(torch.int8)


def scheme_of(bits: int, shared: str, group: int, symmetric: bool) -> QuantizationScheme:
    fields = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": shared}
    fields |= {"group_size": group} if shared == "group" else {}
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs.model_validate(fields))


def opened(
    parts: dict[str, Tensor], shape: tuple[int, int], hint: dict | None = None
) -> CompressedIntsWeight:
    found = CompressedInts.detect(header(parts), shape, hint or {})
    assert found is not None
    return found.pack(parts, shape)


def random_packed(
    rows: int, groups: int, group: int, bits: int, shared: str, symmetric: bool
) -> dict[str, Tensor]:
    columns = groups * group
    scale_shape = SHARED[shared](rows, groups)
    parts = {
        "weight_packed": pack_to_int32(random_ints((rows, columns), bits, 1), bits),
        "weight_scale": torch.rand(scale_shape, generator=torch.Generator().manual_seed(2)),
        "weight_shape": torch.tensor([rows, columns]),
    }
    if not symmetric:
        zero = random_ints(scale_shape, bits, 3)
        parts["weight_zero_point"] = zero if shared == "tensor" else pack_to_int32(zero, bits, packed_dim=0)
    return parts


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 20),
    groups=st.integers(2, 5),
    group=st.sampled_from([1, 3, 8, 16, 32]),
    bits=st.sampled_from([4, 8]),
    shared=st.sampled_from(["group", "channel", "tensor"]),
    symmetric=st.booleans(),
)
def test_packed_as_compressed_tensors_reads_it(rows, groups, group, bits, shared, symmetric):
    # compressed-tensors cannot unpack a single word of zero points for several groups.
    assume(symmetric or shared != "group" or rows * bits > 32)
    parts = random_packed(rows, groups, group, bits, shared, symmetric)
    scheme = scheme_of(bits, shared, group, symmetric)
    wanted = PackedQuantizationCompressor.decompress(dict(parts), scheme)["weight"]
    weight = opened(parts, (rows, groups * group), {"bits": bits})
    assert torch.equal(weight.dequantize(0, rows), wanted)


@pytest.mark.parametrize("shared", SHARED)
# compressed-tensors reckons in the scale's dtype, and bfloat16 cannot hold every code less a zero.
@pytest.mark.parametrize(
    ("symmetric", "dtype"), [(True, torch.float32), (True, torch.bfloat16), (False, torch.float32)]
)
def test_bytes_as_compressed_tensors_reads_them(shared, symmetric, dtype):
    scale_shape = SHARED[shared](7, 3)
    parts = {"weight": random_ints((7, 24), 8, 1), "weight_scale": torch.rand(scale_shape).to(dtype)}
    if not symmetric:
        parts["weight_zero_point"] = random_ints(scale_shape, 8, 3)
    wanted = IntQuantizationCompressor.decompress(dict(parts), scheme_of(8, shared, 8, symmetric))["weight"]
    assert torch.equal(opened(parts, (7, 24)).dequantize(0, 7).to(dtype), wanted)


def test_one_dimensional_channel_scales():
    parts = {"weight": random_ints((3, 8), 8, 1), "weight_scale": torch.rand(3)}
    wanted = parts["weight"].float() * parts["weight_scale"][:, None]
    assert torch.equal(opened(parts, (3, 8)).dequantize(0, 3), wanted)


@pytest.mark.parametrize("asymmetric", [False, True])
def test_act_order(asymmetric):
    rows, columns, groups = 9, 32, 4
    parts = random_packed(rows, groups, 8, 4, "group", symmetric=not asymmetric)
    g_idx = torch.randint(0, groups, (columns,), dtype=torch.int32)
    weight = opened(parts | {"weight_g_idx": g_idx}, (rows, columns))
    codes, scale = fields_of(parts["weight_packed"], 4, columns), floats(parts["weight_scale"])
    zero = fields_of(parts["weight_zero_point"].t(), 4, rows).T if asymmetric else np.full((rows, groups), 8)
    for row in range(rows):
        for column in range(columns):
            group = int(g_idx[column])
            value = np.float32(codes[row, column] - zero[row, group]) * scale[row, group]
            assert weight.dequantize(row, row + 1)[0, column].item() == value
    assert weight.format.label == ("int4 group 8 asym act-order" if asymmetric else "int4 group 8 act-order")


@pytest.mark.parametrize("g_idx", [torch.full((32,), -1, dtype=torch.int32), torch.arange(32).int() // 8])
def test_act_order_that_changes_nothing(g_idx):
    parts = random_packed(5, 4, 8, 4, "group", symmetric=False)
    plain, ordered = opened(parts, (5, 32)), opened(parts | {"weight_g_idx": g_idx}, (5, 32))
    assert ordered.g_idx is None
    assert torch.equal(plain.dequantize(0, 5), ordered.dequantize(0, 5))


def test_zero_points_that_are_not_packed():
    parts = random_packed(5, 4, 8, 4, "group", symmetric=False)
    plain = opened(parts, (5, 32)).dequantize(0, 5)
    zero = fields_of(parts["weight_zero_point"].t(), 4, 5).T - 8
    parts["weight_zero_point"] = torch.from_numpy(zero).to(torch.int8)
    assert torch.equal(opened(parts, (5, 32)).dequantize(0, 5), plain)
    parts["weight_zero_point"][2, 1] = 8
    with pytest.raises(CheckpointError, match="weight_zero_point runs from"):
        opened(parts, (5, 32))


@pytest.mark.parametrize(
    ("found", "label", "bits"),
    [
        (CompressedInts(4, 128, "group", packed=True), "int4 group 128", 4.125),
        (CompressedInts(4, 32, "group", True, "I32", scale_bits=32), "int4 group 32 asym", 4 + 36 / 32),
        (CompressedInts(8, 1024, "channel", packed=False), "int8 channel", 8 + 16 / 1024),
        (CompressedInts(8, 64, "group", False, "I8"), "int8 group 64 asym", 8 + 24 / 64),
        (CompressedInts(8, 1024, "tensor", packed=False), "int8 tensor", 8),
    ],
)
def test_labels_and_bits(found, label, bits):
    assert (found.label, found.bits) == (label, bits)


HEADER = {
    "weight_packed": Part("I32", (6, 8)),
    "weight_scale": Part("BF16", (6, 4)),
    "weight_shape": Part("I64", (2,)),
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight_packed": Part("I32", (6, 7))}, r"weight_packed has the shape \[6, 7\]"),
        ({"weight_packed": Part("I32", (5, 8))}, "weight_packed has the shape"),
        ({"weight_packed": Part("I32", (48,))}, "weight_packed has the shape"),
        ({"weight_shape": None}, "weight_shape is missing"),
        ({"weight_shape": Part("I64", (3,))}, "weight_shape has the shape"),
        ({"weight_scale": None}, "weight_scale is missing"),
        ({"weight_scale": Part("I8", (6, 4))}, "weight_scale is I8"),
        ({"weight_scale": Part("BF16", (6, 5))}, "weight_scale has 5 groups"),
        ({"weight_scale": Part("BF16", (6, 0))}, "weight_scale has 0 groups"),
        ({"weight_scale": Part("BF16", (4, 6))}, "weight_scale has the shape"),
        ({"weight_zero_point": Part("I32", (6, 4))}, "weight_zero_point has the shape"),
        ({"weight_zero_point": Part("I8", (6, 3))}, "weight_zero_point has the shape"),
        ({"weight_zero_point": Part("BF16", (6, 4))}, "weight_zero_point is BF16"),
        ({"weight_g_idx": Part("I32", (63,))}, "weight_g_idx has the shape"),
    ],
)
def test_headers_that_do_not_fit(change, words):
    parts = {name: part for name, part in (HEADER | change).items() if part is not None}
    with pytest.raises(CheckpointError, match=words):
        CompressedInts.detect(parts, (6, 64), {})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"weight_shape": torch.tensor([32, 5])},
            r"weight_shape says \[32, 5\] where the model has \[5, 32\]",
        ),
        ({"weight_scale": torch.full((5, 4), torch.inf)}, "weight_scale holds values that are not finite"),
        (
            {"weight_g_idx": torch.arange(32).int() // 4},
            "weight_g_idx runs from 0 to 7 and must lie in 0 to 3",
        ),
        ({"weight_g_idx": torch.arange(32).int() // 8 - 1}, "weight_g_idx runs from -1"),
    ],
)
def test_values_that_cannot_be(change, words):
    with pytest.raises(CheckpointError, match=words):
        opened(random_packed(5, 4, 8, 4, "group", symmetric=True) | change, (5, 32))


@settings(max_examples=40, deadline=None)
@given(
    bits=st.integers(1, 8), words=st.integers(1, 3), rows=st.integers(1, 4), lowest=st.sampled_from([0, -8])
)
def test_fields_of_every_width(bits, words, rows, lowest):
    count = words * 32
    codes = torch.randint(0, 1 << bits, (rows, count))
    packed = words_of(codes.numpy(), bits).view(torch.uint8)
    assert torch.equal(unpack_fields(packed, bits, count, lowest), codes.float() + lowest)
    assert torch.equal(unpack_fields(packed, bits, count - 5, lowest), codes[:, :-5].float() + lowest)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_single_fields(bits):
    codes = torch.randint(0, 1 << bits, (3, 50))
    index = torch.randint(0, 50, (20,))
    assert torch.equal(pick_fields(words_of(codes.numpy(), bits), index, bits), codes[:, index].t().float())


def test_other_weights_are_not_claimed():
    assert CompressedInts.detect({"weight_packed": Part("U8", (4, 2))}, (4, 4), {}) is None
    assert CompressedInts.detect({"weight": Part("BF16", (4, 4))}, (4, 4), {}) is None
