"""The native product with every kind of weight: against the dequantised weight in float64, and bit for bit the same in
any company, on any number of threads, wherever its memory lies and whatever is in it."""

import ctypes
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from torch import Tensor

from headlong.ops import native
from headlong.ops.linear import native_source as kinds
from headlong.ops.linear.native import NativeLinear, Panels
from headlong.ops.linear.native_source import Source
from headlong.ops.native_backend import NativeBackend
from headlong.quant import rtn
from headlong.quant.compressed import CompressedInts
from headlong.quant.detect import detect
from headlong.quant.format import Weight
from headlong.quant.gguf import BLOCK_SIZES, GgufBlocks
from headlong.quant.gptq import GptqWeight
from support import packing, packing_bits
from support.gguf_models import SCALES
from support.packing_bits import rounded_ints, words_of
from support.packing_floats import with_float_scales

pytestmark = pytest.mark.skipif(native.library() is None, reason="native kernels are not built or turned off")
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 33)
OUTS = (1, 63, 64, 65, 200)
EVEN = (2, 32, 96, 256, 520, 1100)
FLOAT = (*EVEN, 31, 513)
BLOCK = (32, 96, 256, 544, 1120)
LARGE_BLOCK = (256, 512, 1280)
FIFTIES = (50, 600, 1100)
"""Sizes that weights may have. The kernel goes through them 512 at a time."""


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def floats(dtype: torch.dtype, outs: int, size: int) -> Weight:
    return draw(outs, size, seed=outs).to(dtype)


def blocks(type_name: str, outs: int, size: int) -> Weight:
    """Random codes of a GGUF type; scales differ from block to block, in sign too."""
    elements, nbytes = BLOCK_SIZES[type_name]
    generator = np.random.default_rng(outs)
    shape = (outs, size // elements)
    data = generator.integers(0, 256, (*shape, nbytes), dtype=np.uint8)
    for at in SCALES.get(type_name, (0, 2) if type_name in ("Q4_1", "Q5_1") else (0,)):
        scale = generator.uniform(0.5, 1.5, shape) * generator.choice([-0.01, 0.01], shape)
        data[..., at : at + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
    rows = torch.from_numpy(data.reshape(outs, -1))
    return GgufBlocks(type_name).pack({"weight": rows}, (outs, size))


def rounded(kind: rtn.RtnFormat, outs: int, size: int, group: int = 32) -> Weight:
    format, parts = rtn.quantize(draw(outs, size, seed=outs), kind, group_size=group)
    return format.pack(parts, (outs, size))


def stored(how: str, outs: int, size: int) -> Weight:
    parts = packing.pack(draw(outs, size, seed=outs), how)
    return detect(packing.header(parts), (outs, size), packing.hint_of(how)).pack(parts, (outs, size))


def eight_bits(group: int, zero_points: bool, outs: int, size: int) -> Weight:
    """Any byte is a code; a group is cut to what divides the size."""
    group = packing_bits.fitting_group(size, group)
    generator = torch.Generator().manual_seed(outs)
    random_bytes = partial(torch.randint, -128, 128, generator=generator, dtype=torch.int8)
    parts = {"weight": random_bytes((outs, size)), "weight_scale": draw(outs, size // group, seed=1) / 64}
    if zero_points:
        parts["weight_zero_point"] = random_bytes((outs, size // group))
    zeros = "I8" if zero_points else None
    return CompressedInts(8, group, "group", packed=False, zero_point=zeros).pack(parts, (outs, size))


def eight_bit_floats(dtype: torch.dtype, outs: int, size: int) -> Weight:
    """Any byte that is finite is a code, subnormal floats among them."""
    every = torch.arange(256, dtype=torch.uint8)
    finite = every[every.view(dtype).float().isfinite()]
    codes = finite[torch.randint(len(finite), (outs, size), generator=torch.Generator().manual_seed(outs))]
    scale = draw(outs, 1, seed=1) * (torch.finfo(torch.float8_e4m3fn).max / torch.finfo(dtype).max)
    parts = {"weight": codes.view(dtype), "weight_scale": scale}
    return detect(packing.header(parts), (outs, size), {}).pack(parts, (outs, size))


e4m3, e5m2 = partial(eight_bit_floats, torch.float8_e4m3fn), partial(eight_bit_floats, torch.float8_e5m2)


def inputs_scaled(how: str, outs: int, size: int) -> Weight:
    parts = packing.pack(draw(outs, size, seed=outs), how)
    parts["pre_quant_scale"] = draw(size, seed=3).exp()
    return detect(packing.header(parts), (outs, size), {}).pack(parts, (outs, size))


def nvfp4_cut_short(outs: int, size: int) -> Weight:
    """The last group has lost columns."""
    missing = -size % 16
    parts = packing.pack(draw(outs, size + missing, seed=outs), "nvfp4_modelopt")
    parts["weight"] = parts["weight"][:, : size // 2].contiguous()
    return detect(packing.header(parts), (outs, size), {}).pack(parts, (outs, size))


def gptq_cut_short(outs: int, size: int) -> Weight:
    """The last of several groups has 8 columns."""
    codes, scale, zero = rounded_ints(
        draw(outs, size, seed=outs), 4, torch.arange(size) // 32, True, torch.float16, first_zero=1
    )
    parts = {
        "qweight": words_of(codes.numpy(), 4).t().contiguous(),
        "qzeros": words_of(zero.t().numpy(), 4),
        "scales": scale.t().contiguous(),
    }
    hint = {"checkpoint_format": "gptq_v2", "group_size": 32}
    return detect(packing.header(parts), (outs, size), hint).pack(parts, (outs, size))


def every_order(outs: int, size: int) -> Weight:
    """Groups of very different sizes, one of them empty."""
    weight = stored("gptq_actorder", outs, size)
    assert isinstance(weight, GptqWeight)
    groups = len(weight.scales_GO)
    drawn = torch.rand(size, generator=torch.Generator().manual_seed(size)) ** 3 * groups
    return replace(weight, g_idx=drawn.int().clamp(max=max(groups - 2, 0)))


Make = Callable[[int, int], Weight]
KINDS: dict[str, tuple[Make, tuple[int, ...], int]] = {
    "float32": (partial(floats, torch.float32), FLOAT, kinds.F32),
    "float16": (partial(floats, torch.float16), FLOAT, kinds.F16),
    "bfloat16": (partial(floats, torch.bfloat16), EVEN, kinds.BF16),
    "bfloat16 rounded": (partial(floats, torch.bfloat16), EVEN, kinds.BF16_ROUNDED),
    "Q4_0": (partial(blocks, "Q4_0"), BLOCK, kinds.U4),
    "Q4_1": (partial(blocks, "Q4_1"), BLOCK, kinds.U4_OFFSET),
    "Q5_0": (partial(blocks, "Q5_0"), BLOCK, kinds.I8),
    "Q5_1": (partial(blocks, "Q5_1"), BLOCK, kinds.I8_OFFSET),
    "Q8_0": (partial(blocks, "Q8_0"), BLOCK, kinds.I8),
    "IQ4_NL": (partial(blocks, "IQ4_NL"), BLOCK, kinds.I8),
    "Q2_K": (partial(blocks, "Q2_K"), LARGE_BLOCK, kinds.U4_OFFSET),
    "Q3_K": (partial(blocks, "Q3_K"), LARGE_BLOCK, kinds.U4),
    "Q4_K": (partial(blocks, "Q4_K"), LARGE_BLOCK, kinds.U4_OFFSET),
    "Q5_K": (partial(blocks, "Q5_K"), LARGE_BLOCK, kinds.I8_OFFSET),
    "Q6_K": (partial(blocks, "Q6_K"), LARGE_BLOCK, kinds.I8),
    "IQ4_XS": (partial(blocks, "IQ4_XS"), LARGE_BLOCK, kinds.I8),
    "IQ2_XS": (partial(blocks, "IQ2_XS"), LARGE_BLOCK, kinds.U4_TABLE),
    "IQ3_XXS": (partial(blocks, "IQ3_XXS"), LARGE_BLOCK, kinds.U4_TABLE),
    "TQ2_0": (partial(blocks, "TQ2_0"), LARGE_BLOCK, kinds.U4),
    "mxfp4": (partial(stored, "mxfp4_compressed"), BLOCK, kinds.U4_TABLE),
    "nf4": (partial(stored, "nf4_nested"), (64, 256, 576), kinds.U4_TABLE),
    "int8 channel": (partial(rounded, "int8"), EVEN, kinds.I8),
    "int8 group": (partial(eight_bits, 64, False), EVEN, kinds.I8),
    "int8 zero points": (partial(eight_bits, 32, True), EVEN, kinds.I8_OFFSET),
    "int8 group of 50": (partial(eight_bits, 50, False), FIFTIES, kinds.I8),
    "int4 group": (partial(rounded, "int4"), EVEN, kinds.U4),
    "int4 group of 50": (partial(rounded, "int4", group=50), FIFTIES, kinds.U4),
    "int4 zero points": (partial(stored, "int4_asym"), EVEN[1:], kinds.U4_OFFSET),
    "gptq": (partial(stored, "gptq_v1"), EVEN[1:], kinds.U4_OFFSET),
    "fp8 block": (partial(stored, "fp8_block"), EVEN, kinds.E4M3),
    "fp8 channel": (partial(stored, "fp8_channel"), EVEN, kinds.E4M3),
    "fp8 codes": (e4m3, EVEN, kinds.E4M3),
    "fp8 e5m2": (e5m2, (2, 520), kinds.E5M2),
    "bfloat16 of odd length": (partial(floats, torch.bfloat16), (31, 513), kinds.F32),
    "int8 channel of odd length": (partial(rounded, "int8"), (31, 513), kinds.I8),
    "fp8 of odd length": (e4m3, (31, 513), kinds.E4M3),
    "gptq act-order": (partial(stored, "gptq_actorder"), (96, 544), kinds.U4_OFFSET),
    "gptq in any order": (every_order, (96, 544), kinds.U4_OFFSET),
    "gptq cut short": (gptq_cut_short, (40, 520), kinds.U4_OFFSET),
    "int4 act-order": (partial(stored, "int4_actorder"), (96, 544), kinds.U4),
    "int4 inputs scaled": (partial(inputs_scaled, "int4_g32"), (96, 544), kinds.U4),
    "int4 act-order inputs scaled": (partial(inputs_scaled, "int4_actorder"), (96, 544), kinds.U4),
    "nf4 over ends of rows": (partial(stored, "nf4"), (96, 544), kinds.U4_TABLE),
    "nvfp4 cut short": (nvfp4_cut_short, (38, 518), kinds.U4_TABLE),
    "nvfp4": (partial(stored, "nvfp4_modelopt"), BLOCK, kinds.U4_TABLE),
    "nvfp4 divided": (partial(stored, "nvfp4_compressed"), BLOCK, kinds.U4_TABLE),
    "mlx 4 bit": (partial(stored, "mlx4"), BLOCK, kinds.U4_OFFSET),
    "mlx 8 bit": (partial(stored, "mlx8"), BLOCK, kinds.I8_OFFSET),
}
"""How a weight is made, of which sizes, and as what the kernel knows it."""
ALIKE = (
    "bfloat16 of",
    "int8 channel of",
    "fp8 of",
    "gptq in",
    "gptq cut",
    "int4 act",
    "int4 inputs",
    "nf4 over",
    "nvfp4 cut",
)
"""Kinds that differ from others in the order of their columns or in their sizes alone."""
CASES = [
    pytest.param(kind, (outs, size), id=f"{kind}-{outs}x{size}")
    for kind, (_, sizes, _) in KINDS.items()
    for outs in OUTS
    for size in sizes
]


@cache
def weight_of(kind: str, shape: tuple[int, int]) -> Weight:
    return KINDS[kind][0](*shape)


@cache
def source(kind: str, shape: tuple[int, int]) -> Source:
    found = Source.of(weight_of(kind, shape), rounding=kind.endswith("rounded"))
    assert found is not None and found.layout.type == KINDS[kind][2], f"{kind} is laid out as {found}"
    return found


@cache
def linear(kind: str, shape: tuple[int, int]) -> NativeLinear:
    return NativeLinear([source(kind, shape)])


def dense(weight: Weight) -> Tensor:
    return weight.float() if isinstance(weight, Tensor) else weight.dequantize(0, weight.out_features)


@pytest.fixture
def threads():
    """Sets their number; afterwards it is what it was."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def distance(found: Tensor, x: Tensor, weight: Tensor) -> float:
    """From the product in float64, relative to a row's size and the largest weight: where an offset takes most of a
    code away, small weights are as far off as large ones."""
    x, weight = x.double(), weight.double()
    size = x.abs().sum(1, keepdim=True) * weight.abs().max()
    return ((found - x @ weight.T).abs() / size).max().item()


@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_the_product(kind, shape):
    x = draw(max(ROWS), shape[1], seed=7)
    weight = dense(weight_of(kind, shape))
    found = linear(kind, shape)(x)
    assert found.shape == (len(x), shape[0]) and found.dtype == torch.float32
    error = distance(found, x, weight)
    if kind.endswith("rounded"):  # where the CPU multiplies bfloat16
        error = min(error, distance(found, x.bfloat16(), weight))
    assert error < 3e-7


@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_bits_depend_on_nothing_beside(kind, shape, threads):
    """Not on the number of rows, a row's place among them, or threads."""
    multiply, x = linear(kind, shape), draw(max(ROWS), shape[1], seed=8)
    threads(1)
    alone = torch.cat([multiply(row[None]) for row in x])
    for count in (1, 2, 3):
        threads(count)
        for rows in ROWS:
            assert torch.equal(multiply(x[:rows]), alone[:rows]), f"{rows} rows on {count} threads"
            assert torch.equal(multiply(x[-rows:].flip(0)).flip(0), alone[-rows:]), f"the last {rows} rows"


LONGEST = torch.tensor([0x7EFEFD, 0x7EFEFE, 0x7EFEFF, 0x7EFF00, 0x7F7F7F, 0x7F8000, 0x7FFFFF, 0, 1])
"""Mantissas at which three digits of 8 bits, signed, are used up, and those at both ends."""


@pytest.mark.parametrize("kind", [kind for kind, (*_, type) in KINDS.items() if type >= kinds.I8])
def test_activations_of_any_size(kind):
    """Alone in their row, and beside smaller ones, from nearly the smallest float to nearly the largest."""
    shape = (65, KINDS[kind][1][-1])
    multiply, weight = linear(kind, shape), dense(weight_of(kind, shape))
    for exponent in (27, 100, 127, 150, 240):
        size_N = (LONGEST | exponent << 23).to(torch.int32).view(torch.float32)
        size_N = torch.cat([size_N, -size_N])
        alone = torch.zeros(len(size_N), shape[1])
        alone[torch.arange(len(size_N)), torch.arange(len(size_N)) * 37 % shape[1]] = size_N
        beside = draw(len(size_N), shape[1], seed=12).clamp(-1.0, 1.0) * size_N[:, None]
        x = torch.cat([alone, torch.where(alone == 0.0, beside, alone)])
        assert distance(multiply(x), x, weight) < 3e-7
    assert not multiply(torch.zeros(5, shape[1])).any()
    smallest = torch.full((1, shape[1]), 2.0**-149)
    assert multiply(smallest).abs().max() <= 2.0**-120 * (1 + weight.abs().max())


@pytest.mark.parametrize("rows", [6, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_narrow_float(dtype, rows):
    """All finite patterns, zeros and the smallest among them, by few rows at a time and by many."""
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    weight = every[every.isfinite()].view(-1, 256)
    multiply = NativeLinear([Source(weight, kinds.PanelLayout(kinds.FLOATS[dtype], 256))])
    found = torch.cat([multiply(part) for part in torch.eye(256).split(rows)])
    assert torch.equal(found, weight.float().T)


STACKS = {
    "one kind": [("float32", (65, 96)), ("float32", (65, 96))],
    "floats": [("float32", (65, 96)), ("bfloat16", (64, 96)), ("bfloat16 rounded", (64, 96))],
    "codes": [("Q8_0", (63, 96)), ("int4 group", (64, 96)), ("mlx 4 bit", (63, 96)), ("Q5_1", (63, 96))],
    "whole blocks": [("Q8_0", (150, 96)), ("Q4_0", (150, 96)), ("Q4_1", (150, 96)), ("Q4_1", (150, 96))],
    "orders of columns": [
        ("int4 act-order", (65, 96)),
        ("int4 inputs scaled", (63, 96)),
        ("int4 group", (65, 96)),
        ("nf4 over ends of rows", (63, 96)),
        ("int4 act-order", (64, 96)),
    ],
    "large blocks": [("Q4_K", (65, 512)), ("Q6_K", (65, 512)), ("Q4_K", (65, 512))],
}


@pytest.mark.parametrize("parts", STACKS.values(), ids=STACKS)
@pytest.mark.parametrize("run", [0, 1, 16], ids=["in order", "one by one", "in runs"])
def test_stacked_weights_are_the_parts(parts, run, threads):
    """Outputs in another order, moved one by one or some together, plus a bias."""
    total = sum(shape[0] for _, shape in parts)
    order = None
    if run:
        runs = torch.arange(total).split(run)
        moved = torch.randperm(len(runs), generator=torch.Generator().manual_seed(run)).tolist()
        order = torch.cat([runs[i] for i in moved])
    bias, x = draw(total, seed=3), draw(13, parts[0][1][1], seed=9)
    apart = torch.cat([linear(*part)(x) for part in parts], 1)
    apart = apart if order is None else apart[:, order]
    sources = [source(*part) for part in parts]
    for count in (1, 3):
        threads(count)
        assert torch.equal(NativeLinear(sources, order)(x), apart)
        assert torch.equal(NativeLinear(sources, order, bias)(x), apart + bias)


@pytest.mark.parametrize("rows", [5, 12, 33])
@pytest.mark.parametrize("kind", KINDS)
def test_poison_stays_in_its_row(kind, rows):
    shape = (65, KINDS[kind][1][-1])
    multiply, x = linear(kind, shape), draw(rows, shape[1], seed=10)
    expected = multiply(x)
    poisoned = x.clone()
    poisoned[rows // 2, shape[1] // 2] = torch.nan
    found = multiply(poisoned)
    assert found[rows // 2].isnan().all()
    others = [i for i in range(rows) if i != rows // 2]
    assert torch.equal(found[others], expected[others])
    assert multiply(torch.full_like(x, torch.nan)).isnan().all()
    poisoned[rows // 2, shape[1] // 2] = -torch.inf
    found = multiply(poisoned)
    assert not found[rows // 2].isfinite().any()
    assert torch.equal(found[others], expected[others])
    assert torch.equal(multiply(x), expected), "what a call leaves behind is not read by the next"


def padding_lanes(panels: Panels) -> list[Tensor]:
    """Of the last block, where nobody's weights are."""
    used = panels.struct.num_outs % kinds.WIDTH
    in_pairs = panels.struct.type in (kinds.BF16, kinds.BF16_ROUNDED)
    whole = [part.view(len(part), -1, kinds.WIDTH, 1 + in_pairs)[-1] for part in panels.tensors]
    return [part[:, used:] for part in whole]


@pytest.mark.parametrize("kind", KINDS)
def test_memory_of_any_kind(kind):
    """Rows and results that begin anywhere, results that lie apart in memory full of NaN, noise beside the weights."""
    outs, size = 65, KINDS[kind][1][-1]
    multiply = NativeLinear([source(kind, (outs, size))])
    (panels,) = multiply.panels
    x = draw(33, size, seed=11)
    expected = multiply(x)
    for lanes in padding_lanes(panels):
        lanes.fill_(torch.nan if lanes.is_floating_point() else 0x7F)
    for rows in (1, 4, 33):
        for offset in (1, 3, 5, 8):
            moved = torch.empty(x[:rows].numel() + offset)[offset:].view(rows, size).copy_(x[:rows])
            stride = outs + offset
            room = torch.full((offset + rows * stride,), torch.nan)
            out = room[offset:].view(rows, stride)
            assert moved.data_ptr() % 64 and out.data_ptr() % 64
            native.kernel("headlong_matmul")(
                ctypes.addressof(panels.struct), moved.data_ptr(), rows, out.data_ptr(), stride, 1
            )
            assert torch.equal(out[:, :outs], expected[:rows])
            assert room[:offset].isnan().all() and out[:, outs:].isnan().all(), "beside the result"


def test_several_callers_at_once(threads):
    """One of them has the threads; the others work alone."""
    threads(3)
    shape = (200, 544)
    work = [(linear(kind, shape), draw(20, 544, seed=i)) for i, kind in enumerate(("Q4_0", "Q4_1", "Q8_0"))]
    expected = [multiply(x) for multiply, x in work]

    def repeat(number: int) -> bool:
        multiply, x = work[number]
        return all(torch.equal(multiply(x), expected[number]) for _ in range(50))

    with ThreadPoolExecutor(len(work)) as pool:
        assert all(pool.map(repeat, range(len(work))))


def test_a_child_process_has_threads_of_its_own(threads):
    threads(3)
    multiply, x = linear("float32", (200, 520)), draw(20, 520)
    expected = multiply(x)
    child = os.fork()
    if not child:
        signal.alarm(30)  # which ends it, should it wait for threads it does not have
        os._exit(0 if torch.equal(multiply(x), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(multiply(x), expected)


@pytest.mark.parametrize("how", packing.FORMATS)
def test_every_format_is_native(how):
    """And is said to be: what torch multiplies spins on cores that others use."""
    weight = stored(how, 64, 128)
    backend = NativeBackend(torch.float32, torch.device("cpu"))
    assert isinstance(backend.linear(weight), NativeLinear)
    assert backend.explain_linear(torch.float32, weight.format)[0] == "native"


@pytest.mark.parametrize("how", ["fp8_powers", "fp8_bytes"])
def test_powers_of_two_multiply_as_the_same_floats_do(how):
    """Bit for bit: DeepSeek-V4's scales of blocks are a byte each."""
    shape = (200, 320)
    parts = packing.pack(draw(*shape) * torch.logspace(-3, 3, shape[1]), how)
    sources = [
        Source.of(detect(packing.header(own), shape, {}).pack(own, shape))
        for own in (parts, with_float_scales(parts))
    ]
    powers, floats = (NativeLinear([source]) for source in sources if source is not None)
    x = draw(5, shape[1])
    assert torch.equal(powers(x), floats(x))


def test_what_it_does_not_know_is_left_to_others():
    not_a_number = e4m3(8, 64)
    not_a_number.tensors[0].view(torch.uint8)[3, 5] = 0xFF
    infinite = e5m2(8, 64)
    infinite.tensors[0].view(torch.uint8)[3, 5] = 0x7C
    # As new weights: what these were when they were packed is known.
    for weight in (draw(8, 32).double(), replace(not_a_number), replace(infinite)):
        assert Source.of(weight) is None
