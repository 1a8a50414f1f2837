"""GGUF block types: bit for bit what the `gguf` package unpacks, by tiles, by rows and reordered."""

import gguf
import numpy as np
import pytest
import torch

from headlong.errors import CheckpointError
from headlong.quant.format import Part
from headlong.quant.gguf import BLOCK_SIZES, GgufBlocks, GgufWeight

FLOAT16_FIELDS = {
    "Q4_1": [0, 2],
    "Q5_1": [0, 2],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q2_K": [80, 82],
    "Q3_K": [108],
}
FLOAT16_FIELDS |= {"Q6_K": [208], "TQ1_0": [52], "TQ2_0": [64], "IQ1_M": [], "MXFP4": []}
"""Where the layouts of ggml put the float16 fields of a block; the others begin with their only one."""


LEAST_VALUES = {"TQ1_0": 300, "TQ2_0": 500, "MXFP4": 500}
"""How many values a few hundred random blocks have at least, where that is not thousands."""


def random_rows(type_name: str, num_rows: int, num_blocks: int, seed: int = 0) -> torch.Tensor:
    """Bytes of every pattern, the float16 fields finite: zeros, subnormals and the largest among them."""
    generator = np.random.default_rng(seed)
    size = BLOCK_SIZES[type_name][1]
    blocks = generator.integers(0, 256, (num_rows, num_blocks, size), dtype=np.uint8)
    for at in FLOAT16_FIELDS.get(type_name, [0]):
        # Exponent 31 is infinity and NaN; clearing its lowest bit leaves 30 and below.
        high = blocks[..., at + 1]
        blocks[..., at + 1] = np.where(high & 0x7C == 0x7C, high & ~np.uint8(0x04), high)
    if type_name == "IQ1_M":
        blocks[..., -1] &= 0xBF  # of the float16 that is spread over the last bytes
    if type_name == "MXFP4":
        blocks[..., 0] = np.minimum(blocks[..., 0], 252)
    return torch.from_numpy(blocks.reshape(num_rows, num_blocks * size))


def oracle(rows: torch.Tensor, type_name: str) -> torch.Tensor:
    values = gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[type_name])
    return torch.from_numpy(values).view(len(rows), -1)


def packed(type_name: str, rows: torch.Tensor) -> GgufWeight:
    elements, size = BLOCK_SIZES[type_name]
    shape = (rows.shape[0], rows.shape[1] // size * elements)
    format = GgufBlocks.detect({"weight": Part(type_name, shape)}, shape, {})
    assert format is not None and format == GgufBlocks(type_name)
    return format.pack({"weight": rows}, shape)


def test_sizes_are_those_of_ggml():
    for type_name, sizes in BLOCK_SIZES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]] == sizes
        assert GgufBlocks(type_name).bits == sizes[1] * 8 / sizes[0]


@pytest.mark.parametrize("type_name", BLOCK_SIZES)
def test_equals_the_gguf_package_exactly(type_name):
    rows = random_rows(type_name, 67, 3)
    weight, expected = packed(type_name, rows), oracle(rows, type_name)
    assert expected.isfinite().all() and expected.unique().numel() > LEAST_VALUES.get(type_name, 1000)
    assert torch.equal(weight.dequantize(0, 67), expected)


@pytest.mark.parametrize("type_name", BLOCK_SIZES)
def test_tiles_rows_and_reordering(type_name):
    rows = random_rows(type_name, 9, 2, seed=1)
    weight, expected = packed(type_name, rows), oracle(rows, type_name)
    for first, last in [(0, 1), (8, 9), (3, 8), (4, 4)]:
        tile = weight.dequantize(first, last)
        assert tile.dtype == torch.float32 and torch.equal(tile, expected[first:last])
    index = torch.tensor([5, 0, 5, 8])
    assert torch.equal(weight.dequantize_rows(index), expected[index])
    assert weight.dequantize_rows(index[:0]).shape == (0, weight.in_features)
    order = torch.randperm(9)
    moved = weight.permuted(order)
    assert torch.equal(moved.dequantize(0, 9), expected[order]) and moved.data.dtype == torch.uint8
    assert torch.equal(weight.dequantize(0, 9), expected), "the original is left alone"


@pytest.mark.parametrize("type_name", BLOCK_SIZES)
def test_single_block_at_an_odd_place(type_name):
    """One block alone, at a byte offset that no wider type divides."""
    rows = random_rows(type_name, 5, 1, seed=2)
    stack = torch.cat((torch.zeros(2, dtype=torch.uint8), rows.view(-1)))[2:].view(rows.shape)
    weight = packed(type_name, stack)
    for row in range(5):
        assert torch.equal(weight.dequantize(row, row + 1), oracle(rows, type_name)[row : row + 1])


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_what_the_gguf_package_quantises_comes_back(type_name):
    values = torch.randn(8, 128)
    rows = torch.from_numpy(gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType[type_name]))
    got = packed(type_name, rows).dequantize(0, 8)
    steps = {"Q4_0": 8, "Q4_1": 15, "Q5_0": 16, "Q5_1": 31, "Q8_0": 127}[type_name]
    # Half a step of the widest block, doubled where the other end of the range is one step short.
    assert (got - values).abs().max() <= 2.1 * values.abs().max() / steps


def test_holds_the_bytes_of_the_file_only():
    rows = random_rows("Q4_K", 4, 2)
    weight = packed("Q4_K", rows)
    assert weight.tensors == (rows,) and weight.data.data_ptr() == rows.data_ptr()
    assert weight.nbytes == 4 * 2 * 144 and (weight.out_features, weight.in_features) == (4, 512)
    assert weight.format.label == "Q4_K" and weight.format.bits == 4.5


@pytest.mark.parametrize("type_name", BLOCK_SIZES)
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E01])
def test_scales_that_are_not_finite(type_name, bits):
    for at in FLOAT16_FIELDS.get(type_name, [0]):
        rows = random_rows(type_name, 4, 3)
        start = 2 * BLOCK_SIZES[type_name][1] + at
        rows[1, start : start + 2] = torch.tensor([bits & 255, bits >> 8], dtype=torch.uint8)
        with pytest.raises(CheckpointError, match=r"block 2 in row 1 is (-?inf|nan)"):
            packed(type_name, rows)


def test_detect_leaves_other_families_alone():
    shape = (4, 256)
    assert GgufBlocks.detect({"weight": Part("BF16", shape)}, shape, {}) is None
    assert GgufBlocks.detect({"weight": Part("Q8_1", shape)}, shape, {}) is None
    scaled = {"weight": Part("Q4_0", shape), "weight_scale": Part("F32", (4,))}
    assert GgufBlocks.detect(scaled, shape, {}) is None


@pytest.mark.parametrize(
    ("type_name", "stored", "wanted", "message"),
    [
        ("Q4_0", (4, 48), (4, 48), "multiple of 32"),
        ("Q6_K", (4, 128), (4, 128), "multiple of 256"),
        ("Q8_0", (64,), (64,), r"\[64\] cannot be Q8_0"),
        ("Q8_0", (4, 64), (4, 32), r"stored as \[4, 64\], but the model needs \[4, 32\]"),
    ],
)
def test_detect_refuses_what_does_not_fit(type_name, stored, wanted, message):
    with pytest.raises(CheckpointError, match=message):
        GgufBlocks.detect({"weight": Part(type_name, stored)}, wanted, {})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("type_name", BLOCK_SIZES)
def test_cuda_equals_cpu(type_name):
    rows = random_rows(type_name, 33, 3)
    weight = packed(type_name, rows.cuda())
    assert torch.equal(weight.dequantize(0, 33).cpu(), oracle(rows, type_name))
    assert torch.equal(
        weight.dequantize_rows(torch.tensor([7, 2]).cuda()).cpu(), oracle(rows, type_name)[[7, 2]]
    )


@pytest.mark.parametrize("type_name", ["IQ1_M", "MXFP4"])
def test_scales_beyond_numbers_where_they_lie_elsewhere(type_name):
    """A float16 that is spread over four words, and a power of two whose multiples leave float32."""
    rows = random_rows(type_name, 3, 2, seed=4)
    rows = rows.view(3, 2, -1)
    if type_name == "IQ1_M":
        rows[1, 1, 55] |= 0x70
        rows[1, 1, 53] |= 0xF0
    else:
        rows[1, 1, 0] = 253
    with pytest.raises(CheckpointError, match="a scale of block 1 in row 1 is"):
        packed(type_name, rows.view(3, -1))
