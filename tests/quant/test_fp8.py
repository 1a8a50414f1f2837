"""FP8 by its definition: every byte, every way to share scales, ragged blocks, and what is refused."""

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headlong.errors import CheckpointError
from headlong.quant.format import Part
from headlong.quant.fp8 import Fp8Format, Fp8Weight, decode_fp8
from support.packing import header
from support.packing_bits import floats, spread

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
SCALE_DTYPES = [torch.float32, torch.bfloat16, torch.float16, E8M0]


def random_fp8(shape: tuple[int, int], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 60).clamp(-448, 448).to(E4M3)


def random_scale(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) + 0.01).to(dtype)


def opened(parts: dict[str, Tensor], hint: dict | None = None) -> Fp8Weight:
    shape = tuple(parts["weight"].shape)
    found = Fp8Format.detect(header(parts), shape, hint or {})
    assert found is not None
    return found.pack(parts, shape)


@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2, E8M0])
def test_every_byte(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256)
    wanted = floats(codes.view(dtype))
    got = decode_fp8(codes.view(dtype)).numpy()
    assert got.shape == (1, 256)
    np.testing.assert_array_equal(got, wanted)
    numbers = ~np.isnan(wanted)
    assert np.array_equal(np.signbit(got)[numbers], np.signbit(wanted)[numbers])


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    block=st.tuples(st.integers(1, 48), st.integers(1, 48)),
    dtype=st.sampled_from(SCALE_DTYPES),
    name=st.sampled_from(["weight_scale_inv", "weight_scale", "scale"]),
)
def test_blocks_of_any_shape(rows, columns, block, dtype, name):
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    parts = {"weight": random_fp8((rows, columns)), name: random_scale(grid, dtype)}
    weight = opened(parts, {"weight_block_size": list(block)})
    wanted = floats(parts["weight"]) * spread(floats(parts[name]), rows, columns, block)
    np.testing.assert_array_equal(weight.dequantize(0, rows).numpy(), wanted)


@pytest.mark.parametrize(
    ("shape", "scale", "hint", "block"),
    [
        ((300, 200), (3, 2), None, (128, 128)),
        ((300, 200), (3, 2), [100, 100], (100, 100)),
        ((300, 200), (3, 2), [64, 64], (128, 128)),
        ((300, 200), (3, 2), "nonsense", (128, 128)),
        ((64, 96), (1, 1), None, (128, 128)),
        ((256, 256), (4, 8), None, (64, 32)),
        ((256, 256), (256, 2), None, (1, 128)),
        ((300, 1), (10, 1), None, (32, 1)),
        ((1, 200), (1, 7), None, (1, 32)),
    ],
)
def test_blocks_are_deduced(shape, scale, hint, block):
    parts = {"weight": random_fp8(shape), "weight_scale_inv": random_scale(scale, torch.bfloat16)}
    weight = opened(parts, {"weight_block_size": hint} if hint else {})
    assert weight.block == block
    assert weight.format.label == f"fp8 {block[0]}x{block[1]}"
    assert weight.format.bits == 8 + 16 / (block[0] * block[1])
    wanted = floats(parts["weight"]) * spread(floats(parts["weight_scale_inv"]), shape[0], shape[1], block)
    np.testing.assert_array_equal(weight.dequantize(0, shape[0]).numpy(), wanted)


@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize(
    ("shape", "scale", "label", "bits"),
    [
        ((200, 48), (200,), "fp8 channel", 8 + 32 / 48),
        ((200, 48), (200, 1), "fp8 channel", 8 + 32 / 48),
        ((200, 48), (), "fp8 tensor", 8 + 32 / 9600),
        ((200, 48), (1,), "fp8 tensor", 8 + 32 / 9600),
        ((200, 48), (1, 1), "fp8 tensor", 8 + 32 / 9600),
        ((1, 5), (1,), "fp8 channel", 8 + 32 / 5),
    ],
)
def test_channels_and_tensors(shape, scale, label, bits, name):
    parts = {"weight": random_fp8(shape), name: random_scale(scale)}
    weight = opened(parts)
    assert (weight.format.label, weight.format.bits) == (label, pytest.approx(bits))
    factors = floats(parts[name]).reshape(-1, 1)
    np.testing.assert_array_equal(weight.dequantize(0, shape[0]).numpy(), floats(parts["weight"]) * factors)


def test_e5m2():
    parts = {"weight": torch.randn(6, 10).to(torch.float8_e5m2), "weight_scale": random_scale((6, 1))}
    weight = opened(parts)
    assert weight.format.label == "fp8 e5m2 channel"
    wanted = floats(parts["weight"]) * floats(parts["weight_scale"])
    np.testing.assert_array_equal(weight.dequantize(0, 6).numpy(), wanted)


@pytest.mark.parametrize(
    ("arguments", "scale"),
    [
        ({"strategy": "tensor"}, (1,)),
        ({"strategy": "channel"}, (300, 1)),
        ({"strategy": "block", "block_structure": [128, 128]}, (3, 2)),
    ],
)
def test_compressed_tensors_agrees(arguments, scale):
    parts = {"weight": random_fp8((300, 200)), "weight_scale": random_scale(scale)}
    args = QuantizationArgs.model_validate({"num_bits": 8, "type": "float", "symmetric": True} | arguments)
    wanted = dequantize(parts["weight"], parts["weight_scale"], args=args)
    assert torch.equal(opened(parts).dequantize(0, 300), wanted)


def test_static_activations_are_left_alone():
    parts = {"weight": random_fp8((4, 8)), "weight_scale": random_scale(()), "input_scale": torch.tensor(0.5)}
    weight = opened(parts)
    assert "input_scale" in weight.format.unused
    assert sum(tensor.nbytes for tensor in weight.tensors) == 4 * 8 + 4


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({}, "needs weight_scale, weight_scale_inv or scale"),
        (
            {"weight_scale": Part("F32", ()), "weight_scale_inv": Part("F32", ())},
            "here are weight_scale_inv and weight_scale",
        ),
        ({"scale": Part("F8_E8M0", (2, 5))}, r"scale has the shape \[2, 5\]"),
        ({"scale": Part("I8", (2, 4))}, "scale is I8"),
        ({"weight_scale": Part("F32", (3, 3))}, r"weight_scale has the shape \[3, 3\]"),
        ({"weight_scale": Part("F32", (0, 1))}, r"weight_scale has the shape \[0, 1\]"),
        ({"weight_scale": Part("F32", (256, 512, 1))}, "weight_scale has the shape"),
        ({"weight_scale_inv": Part("I32", (2, 4))}, "weight_scale_inv is I32"),
        ({"weight": Part("F8_E4M3", (512, 256))}, "weight has the shape"),
    ],
)
def test_headers_that_do_not_fit(parts, words):
    whole = {"weight": Part("F8_E4M3", (256, 512))} | parts
    with pytest.raises(CheckpointError, match=words):
        Fp8Format.detect(whole, (256, 512), {})


@pytest.mark.parametrize("dtype", SCALE_DTYPES)
def test_scales_that_are_not_finite(dtype):
    scale = (
        random_scale((2, 2))
        .index_put((torch.tensor(1), torch.tensor(0)), torch.tensor(float("nan")))
        .to(dtype)
    )
    with pytest.raises(CheckpointError, match="weight_scale_inv holds values that are not finite"):
        opened({"weight": random_fp8((200, 200)), "weight_scale_inv": scale})


@pytest.mark.parametrize("dtype", [E8M0, torch.uint8])
def test_powers_of_two(dtype):
    """Every power that a byte may stand for but NaN, as DeepSeek-V4 stores the scales of blocks."""
    codes = torch.arange(255, dtype=torch.uint8).view(1, 255)
    parts = {"weight": random_fp8((100, 255 * 128)), "scale": codes.view(dtype)}
    weight = opened(parts)
    assert (weight.format.label, weight.format.bits) == ("fp8 128x128", 8 + 8 / 128**2)
    powers = np.array([2.0 ** (code - 127) for code in range(255)], np.float32)
    with np.errstate(over="ignore"):
        wanted = floats(parts["weight"]) * np.repeat(powers, 128)
    np.testing.assert_array_equal(weight.dequantize(0, 100).numpy(), wanted)
    assert sum(tensor.nbytes for tensor in weight.tensors) == sum(part.nbytes for part in parts.values())
    with pytest.raises(CheckpointError, match="scale holds values that are not finite"):
        opened(parts | {"scale": torch.full((1, 255), 255, dtype=torch.uint8).view(dtype)})


def test_other_weights_are_not_claimed():
    assert Fp8Format.detect({"weight": Part("BF16", (4, 4))}, (4, 4), {}) is None
    assert Fp8Format.detect({"qweight": Part("I32", (4, 4))}, (4, 4), {}) is None


def test_blocks_that_could_be_of_two_sizes():
    """192 rows in two blocks: 96 each, or 128 and a rest. The config decides; without it loading is refused."""
    weight = torch.randn(192, 192).to(torch.float8_e4m3fn)
    parts = {"weight": weight, "weight_scale_inv": torch.rand(2, 3)}
    with pytest.raises(CheckpointError, match="blocks of 96 or of 128: give `weight_block_size`"):
        Fp8Format.detect(header(parts), (192, 192), {})
    for side in (96, 128):
        found = Fp8Format.detect(header(parts), (192, 192), {"weight_block_size": [side, 64]})
        assert found is not None and found.block == (side, 64)
        values = found.pack(parts, (192, 192)).dequantize(0, 192)
        each = parts["weight_scale_inv"].repeat_interleave(side, 0)[:192].repeat_interleave(64, 1)
        assert torch.equal(values, weight.float() * each)
