"""Round to nearest: what compressed-tensors reads from it, and how near it is."""

import pytest
import torch
from compressed_tensors.compressors.naive_quantized import (
    FloatQuantizationCompressor,
    IntQuantizationCompressor,
)
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor

from headlong.errors import ConfigError
from headlong.quant import rtn
from headlong.quant.compressed import CompressedInts
from headlong.quant.detect import detect
from headlong.quant.format import Format
from headlong.quant.fp8 import Fp8Format
from headlong.quant.rtn import quantize
from support.packing import header

SHAPES = [(1, 16), (5, 48), (130, 200), (256, 384)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_weight(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(shape[0])
    spread = torch.rand(shape[0], 1, generator=generator) + 0.05
    return (torch.randn(shape, generator=generator) * spread * 0.1).to(dtype)


def oracle(kind: str, found: Format) -> tuple[QuantizationScheme, type]:
    """The scheme compressed-tensors needs to read this kind, and who reads it."""
    if isinstance(found, CompressedInts):
        args = {"type": "int", "num_bits": found.width, "strategy": found.shared}
        args |= {"group_size": found.group} if found.shared == "group" else {}
        reader = PackedQuantizationCompressor if found.packed else IntQuantizationCompressor
    else:
        args = {"type": "float", "num_bits": 8, "strategy": "channel"}
        if kind == "fp8_block":
            args |= {"strategy": "block", "block_structure": [128, 128]}
        reader = FloatQuantizationCompressor
    weights = QuantizationArgs.model_validate({"symmetric": True} | args)
    return QuantizationScheme(targets=["Linear"], weights=weights), reader


def read_by_oracle(kind: str, found: Format, parts: dict[str, Tensor]) -> Tensor:
    scheme, reader = oracle(kind, found)
    renamed = {name.replace("weight_scale_inv", "weight_scale"): part for name, part in parts.items()}
    return reader.decompress(renamed, scheme)["weight"]


@pytest.mark.parametrize("kind", ["fp8", "fp8_block", "int8", "int4"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_compressed_tensors_reads_it(kind, shape, dtype):
    weight = random_weight(shape, dtype)
    found, parts = quantize(weight, kind)
    assert found == detect(header(parts), shape, {})
    ours, theirs = found.pack(parts, shape).dequantize(0, shape[0]), read_by_oracle(kind, found, parts)
    assert theirs.dtype == dtype
    assert torch.equal(ours.to(dtype), theirs)


@pytest.mark.parametrize("kind", ["fp8", "fp8_block", "int8", "int4"])
def test_float32_is_rounded_as_compressed_tensors_rounds(kind):
    weight = random_weight((256, 384))
    found, parts = quantize(weight, kind)
    scheme, writer = oracle(kind, found)
    group = {"fp8_block": (128, 128), "int4": (1, 128)}.get(kind, (1, 384))
    tiles = weight.view(256 // group[0], group[0], 384 // group[1], group[1])
    assert scheme.weights is not None
    scale, _ = calculate_qparams(tiles.amin((1, 3)), tiles.amax((1, 3)), scheme.weights)
    theirs = writer.compress({"weight": weight, "weight_scale": scale}, scheme)
    name = "weight_packed" if kind == "int4" else "weight"
    assert torch.equal(parts[name].view(torch.uint8), theirs[name].view(torch.uint8))


@pytest.mark.parametrize(
    ("kind", "half_step"), [("fp8", 2.0**-4), ("fp8_block", 2.0**-4), ("int8", 1 / 255), ("int4", 1 / 15)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_weight_moves_further_than_half_a_step(kind, half_step, dtype):
    weight = random_weight((130, 200), dtype).float()
    found, parts = quantize(weight.to(dtype), kind)
    moved = (found.pack(parts, (130, 200)).dequantize(0, 130) - weight).abs()
    # A step of integers is relative to a row's or group's largest weight, one of floats to the weight itself.
    scale_error = 1 + torch.finfo(dtype).eps
    if kind.startswith("fp8"):
        smallest = 2.0**-10 * weight.abs().max() / 448
        assert (moved <= weight.abs() * half_step * scale_error + smallest * 1.1).all()
    else:
        assert (moved <= weight.abs().amax(1, keepdim=True) * (half_step + torch.finfo(dtype).eps)).all()


@pytest.mark.parametrize(
    ("columns", "wanted", "label"),
    [
        (256, 128, "int4 group 128"),
        (256, 64, "int4 group 64"),
        (256, 32, "int4 group 32"),
        (192, 128, "int4 group 64"),
        (96, 128, "int4 group 32"),
        (48, 128, "int4 group 16"),
        (50, 128, "int4 channel"),
        (128, 128, "int4 channel"),
        (7, 32, "int4 channel"),
    ],
)
def test_groups_that_divide(columns, wanted, label):
    found, parts = quantize(random_weight((3, columns)), "int4", wanted)
    assert found.label == label
    assert parts["weight_packed"].shape == (3, -(-columns // 8))
    assert torch.equal(found.pack(parts, (3, columns)).dequantize(0, 3), read_by_oracle("int4", found, parts))


@pytest.mark.parametrize("kind", ["fp8", "fp8_block", "int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_and_almost_nothing(kind, dtype):
    weight = torch.zeros(3, 32, dtype=dtype)
    weight[1] = torch.finfo(dtype).smallest_normal
    weight[2, 5] = 1
    found, parts = quantize(weight, kind)
    got = found.pack(parts, (3, 32)).dequantize(0, 3)
    assert got[0].eq(0).all() and got.isfinite().all()
    assert (got - weight.float()).abs().max() < 0.07


@pytest.mark.parametrize("kind", ["fp8", "fp8_block", "int8", "int4"])
def test_rows_are_rounded_alike_however_many_there_are(kind, monkeypatch):
    weight = random_weight((300, 64), torch.bfloat16)
    _, whole = quantize(weight, kind)
    monkeypatch.setattr(rtn, "ROWS_AT_A_TIME", 128)
    _, pieces = quantize(weight, kind)
    assert whole.keys() == pieces.keys()
    for name, part in whole.items():
        assert torch.equal(part.view(torch.uint8), pieces[name].view(torch.uint8))


def test_float64_gets_float32_scales():
    found, parts = quantize(random_weight((4, 32)).double(), "fp8")
    assert found == Fp8Format("channel", (1, 32), scale_bits=32)
    assert parts["weight_scale"].dtype == torch.float32


def test_kinds_that_are_not_known():
    with pytest.raises(ConfigError, match="'int3' is not known"):
        quantize(torch.zeros(2, 2), "int3")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="group_size is 0"):
        quantize(torch.zeros(2, 2), "int4", 0)
