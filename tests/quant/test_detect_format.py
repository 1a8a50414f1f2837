"""Which family is found for which parts, what every family promises, and what is refused."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headlong.errors import CheckpointError
from headlong.quant.awq import AwqFormat
from headlong.quant.awq_gemv import AwqGemvFormat
from headlong.quant.bitsandbytes import Bnb4Format, Bnb8Format
from headlong.quant.compressed import CompressedInts
from headlong.quant.detect import PART_NAMES, detect
from headlong.quant.format import Format, PackedWeight, Part
from headlong.quant.fp8 import Fp8Format
from headlong.quant.gguf import GgufBlocks
from headlong.quant.gptq import GptqFormat
from headlong.quant.mlx import MlxFormat
from headlong.quant.modelopt_ints import ModeloptInts
from headlong.quant.mx import MxFormat
from headlong.quant.nvfp4 import Nvfp4Format
from headlong.quant.quark_ints import QuarkInts
from headlong.quant.scaled_inputs import ScaledInputs
from headlong.quant.torchao import TorchaoFormat
from headlong.quant.unrounded import Unrounded
from support.packing import FORMATS, header, hint_of, pack, takes, unpacked

FAMILY = {
    "fp8": Fp8Format,
    "nvfp4": Nvfp4Format,
    "int4": CompressedInts,
    "int8": CompressedInts,
    "awq": AwqFormat,
    "gptq": GptqFormat,
    "mlx4": MlxFormat,
    "mlx8": MlxFormat,
    "gptq3": GptqFormat,
    "mxfp4": MxFormat,
    "mxfp8": MxFormat,
    "quark": QuarkInts,
    "nf4": Bnb4Format,
    "fp4": Bnb4Format,
    "bnb8": Bnb8Format,
    "modelopt": ModeloptInts,
    "torchao": TorchaoFormat,
    "unrounded": Unrounded,
}


def family_of(how: str) -> type[Format]:
    others = {"awq_gemv": AwqGemvFormat, "nvfp4_mlx": MxFormat, "modelopt_int4_smooth": ScaledInputs}
    return others.get(how) or FAMILY[how.split("_")[0]]


SHAPE = (72, 96)


def packed(how: str, shape: tuple[int, int] = SHAPE) -> tuple[dict[str, Tensor], PackedWeight]:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    parts = pack(weight, how)
    return parts, detect(header(parts), shape, hint_of(how)).pack(parts, shape)


SHAPES = (SHAPE, (8, 16), (8, 64), (136, 160))


@pytest.mark.parametrize(
    ("how", "shape"), [(how, shape) for how in FORMATS for shape in SHAPES if takes(how, shape)]
)
def test_every_format_is_found_and_read(how, shape):
    parts, weight = packed(how, shape)
    found = detect(header(parts), shape, hint_of(how))
    assert type(found) is family_of(how) and found.bits > 0
    assert found.whole_numbers or weight.grouping() is None
    assert (weight.out_features, weight.in_features) == shape
    assert torch.equal(weight.dequantize(0, shape[0]), unpacked(how, parts, shape))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_floats(dtype):
    stored = torch.randn(SHAPE).to(dtype)
    found = detect(header({"weight": stored}), SHAPE, {})
    weight = found.pack({"weight": stored}, SHAPE)
    assert weight.tensors == (stored,) and weight.nbytes == stored.nbytes
    assert found.bits == 8 * dtype.itemsize
    assert found.label == {8: "f64", 4: "f32", 2: "f16" if dtype == torch.float16 else "bf16"}[dtype.itemsize]
    got = weight.dequantize(3, 50)
    assert got.dtype == torch.float32 and torch.equal(got, stored[3:50].float())
    assert torch.equal(weight.dequantize_rows(torch.tensor([9, 9, 0])), stored[[9, 9, 0]].float())
    got.zero_()
    assert stored[3:50].ne(0).any()


@pytest.mark.parametrize("how", FORMATS)
def test_rows_are_the_same_in_any_tiles(how):
    _, weight = packed(how)
    whole = weight.dequantize(0, SHAPE[0])
    assert whole.dtype == torch.float32 and whole.is_contiguous()
    for size in (1, 7, 8, 33):
        tiles = [weight.dequantize(first, min(first + size, SHAPE[0])) for first in range(0, SHAPE[0], size)]
        assert torch.equal(torch.cat(tiles), whole)
    rows = torch.tensor([71, 0, 8, 8, 35])
    assert torch.equal(weight.dequantize_rows(rows), whole[rows])


@pytest.mark.parametrize("how", FORMATS)
def test_what_is_given_out_is_new(how):
    _, weight = packed(how)
    first = weight.dequantize(2, 9)
    kept = first.clone()
    first.fill_(torch.nan)
    assert torch.equal(weight.dequantize(2, 9), kept)


@pytest.mark.parametrize("how", FORMATS)
def test_parts_are_taken_as_they_are(how):
    parts, weight = packed(how)
    if how.startswith("unrounded"):
        assert sum(part.nbytes for part in parts.values()) > weight.nbytes
        return
    places = {part.data_ptr() for part in parts.values()}
    assert {tensor.data_ptr() for tensor in weight.tensors if tensor.numel() > 1} <= places
    left_out = sum(
        part.nbytes
        for name, part in parts.items()
        if name in ("weight_shape", "input_scale", "g_idx", "weight_format", "weight.quant_map")
        or "quant_state" in name
    )
    assert sum(part.nbytes for part in parts.values()) - left_out <= weight.nbytes


class Allocations(TorchDispatchMode):
    """The bytes of every new tensor that operations make inside."""

    def __init__(self):
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in before:
            self.sizes.append(result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("how", FORMATS)
def test_only_the_rows_asked_for_are_touched(how):
    shape, rows = (1024, 256), 16
    _, weight = packed(how, shape)
    weight.dequantize(0, rows)
    tile = rows * shape[1] * 4
    for read in (
        lambda: weight.dequantize(32, 32 + rows),
        lambda: weight.dequantize_rows(torch.arange(rows) * 9),
    ):
        with Allocations() as made:
            read()
        assert max(made.sizes) <= tile, "no temporary is larger than the result"
        assert sum(made.sizes) <= 4 * tile


def test_every_part_has_a_known_name():
    assert {name for how in FORMATS for name in pack(torch.randn(8, 64), how)} <= PART_NAMES
    known = {"input_scale", "input_global_scale", "input_zero_point", "weight_scale_inv", "biases", "g_idx"}
    assert known <= PART_NAMES and "bias" not in PART_NAMES


@pytest.mark.parametrize(
    "how", ["fp8_block", "nvfp4_modelopt", "nvfp4_compressed", "int4_g32", "int8_channel"]
)
def test_scales_of_activations_are_left_alone(how):
    parts = header(pack(torch.randn(8, 64), how))
    for name in ("input_scale", "input_global_scale", "input_zero_point"):
        found = detect(parts | {name: Part("F32", (1,))}, (8, 64), {})
        assert found == detect(parts, (8, 64), {})
        assert "activations" in found.unused[name]


def test_gguf_blocks():
    assert detect({"weight": Part("Q4_0", (8, 64))}, (8, 64), {}) == GgufBlocks("Q4_0")


@pytest.mark.parametrize("how", FORMATS)
def test_a_part_nobody_reads(how):
    parts = header(pack(torch.randn(8, 64), how))
    for extra in sorted(
        PART_NAMES - parts.keys() - {"input_scale", "input_global_scale", "input_zero_point"}
    ):
        if extra in ("weight_zero_point", "weight_g_idx") and family_of(how) in (CompressedInts, Unrounded):
            continue
        if extra == "g_idx" and how.startswith("gptq"):
            continue
        if extra == "_weight_zero_point" and how == "torchao_int8":
            continue
        with pytest.raises(CheckpointError) as caught:
            detect(parts | {extra: Part("F32", (3, 5))}, (8, 64), {})
        message = str(caught.value)
        for name, part in (parts | {extra: Part("F32", (3, 5))}).items():
            assert f"{name} {part.dtype} {list(part.shape)}" in message


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({}, "no format is known"),
        ({"weight": Part("I64", (8, 64))}, "no format is known that stores a .* as weight I64"),
        ({"weight": Part("U8", (8, 32))}, "no format is known"),
        ({"scales": Part("F16", (1, 8))}, "no format is known"),
        (
            {"weight": Part("BF16", (64, 8))},
            r"weight has the shape \[64, 8\], which must be \[8, 64\]; stored are",
        ),
        ({"weight": Part("BF16", (512,))}, "weight has the shape"),
        (
            {"weight": Part("BF16", (8, 64)), "weight_scale": Part("F32", ())},
            "weight_scale cannot be part of a bf16",
        ),
        ({"weight": Part("Q4_0", (8, 64)), "scales": Part("F16", (8, 2))}, "no format is known"),
    ],
)
def test_parts_that_are_nothing(parts, words):
    with pytest.raises(CheckpointError, match=words):
        detect(parts, (8, 64), {})
