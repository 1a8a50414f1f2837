"""Triton's product with every kind of weight: against the dequantised weight in float64, and bit for bit the same for a
token in any company."""

from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from headlong.errors import CheckpointError
from headlong.ops.argmax.triton import argmax
from headlong.ops.linear import triton_block_m, triton_split_k, triton_weight
from headlong.ops.linear.triton import TritonLinear
from headlong.ops.linear.triton_block_m import BLOCK_MS, REFERENCE_BLOCK_M, block_m_for, product
from headlong.ops.linear.triton_repack import layout_of
from headlong.ops.linear.triton_weight import BYTE_SPLITS_EACH, SPLITS_EACH, WeightLayout, gemm_config
from headlong.ops.registry import choose_backend
from headlong.ops.silu_mul.triton import silu_mul
from headlong.quant.compressed import CompressedInts
from headlong.quant.detect import detect
from headlong.quant.format import PackedWeight, Weight
from headlong.quant.fp8 import Fp8Format
from headlong.quant.gguf import BLOCK_SIZES, GgufBlocks
from headlong.quant.plain import PlainFormat
from support import packing, packing_bits
from support.packing_floats import with_float_scales

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = ((70, 96), (65, 320))
FLOAT, SCALED, ROUNDED = 3e-7, 3e-7, 2.0**-7
"""Errors relative to a row's size and the largest weight: of products of what is stored, of sums that are scaled, and
of weights that are rounded once scaled, because their groups are short."""


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(count: int, size: int, seed: int = 7) -> Tensor:
    """That every dtype holds exactly, so that it does not matter how they are rounded."""
    return draw(count, size, seed=seed).bfloat16().half().float().to(DEVICE)


def moved(parts: packing_bits.Parts) -> packing_bits.Parts:
    return {name: part if name == "weight_shape" else part.to(DEVICE) for name, part in parts.items()}


def floats(dtype: torch.dtype, outs: int, size: int) -> Weight:
    return draw(outs, size, seed=outs).to(DEVICE, dtype)


def plain(outs: int, size: int) -> Weight:
    return PlainFormat("BF16").pack({"weight": draw(outs, size).to(DEVICE, torch.bfloat16)}, (outs, size))


def stored(how: str, outs: int, size: int) -> Weight:
    parts = packing.pack(draw(outs, size, seed=outs), how)
    return detect(packing.header(parts), (outs, size), packing.hint_of(how)).pack(moved(parts), (outs, size))


def blocks(type_name: str, outs: int, size: int) -> Weight:
    """Random codes of a GGUF type, with scales that are numbers."""
    elements, nbytes = BLOCK_SIZES[type_name]
    generator = torch.Generator().manual_seed(outs)
    data = torch.randint(0, 256, (outs, size // elements, nbytes), generator=generator, dtype=torch.uint8)
    data[..., :2] = torch.tensor([0.01]).half().view(torch.uint8)
    rows = data.flatten(1).to(DEVICE)
    return GgufBlocks(type_name).pack({"weight": rows}, (outs, size))


def eight_bits(group: int, outs: int, size: int) -> Weight:
    """Any byte is a code, and a zero point."""
    group = packing_bits.fitting_group(size, group)
    random_bytes = partial(
        torch.randint, -128, 128, generator=torch.Generator().manual_seed(outs), dtype=torch.int8
    )
    parts = {"weight": random_bytes((outs, size)), "weight_scale": draw(outs, size // group, seed=1) / 64}
    parts["weight_zero_point"] = random_bytes((outs, size // group))
    format = CompressedInts(8, group, "group", packed=False, zero_point="I8")
    return format.pack(moved(parts), (outs, size))


KINDS: dict[str, tuple[Callable[[int, int], Weight], float]] = {
    "float32": (partial(floats, torch.float32), FLOAT),
    "bfloat16": (partial(floats, torch.bfloat16), FLOAT),
    "float16": (partial(floats, torch.float16), FLOAT),
    "plain": (plain, FLOAT),
    "fp8_block": (partial(stored, "fp8_block"), SCALED),
    "fp8_channel": (partial(stored, "fp8_channel"), SCALED),
    "fp8_tensor": (partial(stored, "fp8_tensor"), SCALED),
    "int8_channel": (partial(stored, "int8_channel"), SCALED),
    "int8 zero points": (partial(eight_bits, 64), ROUNDED),
    "int4_g32": (partial(stored, "int4_g32"), ROUNDED),
    "int4_g64": (partial(stored, "int4_g64"), ROUNDED),
    "int4_asym": (partial(stored, "int4_asym"), ROUNDED),
    "gptq": (partial(stored, "gptq_v1"), ROUNDED),
    "mlx4": (partial(stored, "mlx4"), ROUNDED),
    "mxfp4": (partial(stored, "mxfp4_compressed"), SCALED),
    "nvfp4_modelopt": (partial(stored, "nvfp4_modelopt"), SCALED),
    "nvfp4_compressed": (partial(stored, "nvfp4_compressed"), SCALED),
    "Q8_0": (partial(blocks, "Q8_0"), ROUNDED),
}
ONE_OF_EACH = ("float32", "bfloat16", "fp8_block", "int8 zero points", "int4_asym", "nvfp4_modelopt")
"""Kinds that kernels read in another way; others are the same with other scales."""
EXACT = {"int4_g64 256": ("int4_g64", (65, 256)), "int8 256": ("int8 zero points", (65, 256))}


@cache
def weight_of(kind: str, shape: tuple[int, int]) -> Weight:
    return KINDS[kind][0](*shape)


@cache
def linear(kind: str, shape: tuple[int, int], *, cut: bool = False) -> TritonLinear:
    """`cut`: in pieces."""
    assert TritonLinear.supports(weight_of(kind, shape)) is None
    made = TritonLinear([weight_of(kind, shape)])
    return split_up(made) if cut and not made.weights[0].is_split else made


def split_up(multiply: TritonLinear) -> TritonLinear:
    """The same, cut inside its tiles as those of more columns are."""
    for weight in multiply.weights:
        assert not weight.is_split and weight.steps_per_tile > 1
        weight.__dict__["config"] = weight.config._replace(steps_per_split=weight.steps_per_tile - 1)
        del weight.__dict__["num_partials"]
        assert weight.is_split
    return multiply


def dense(weight: Weight) -> Tensor:
    return weight.dequantize(0, weight.out_features) if isinstance(weight, PackedWeight) else weight.float()


def distance(found: Tensor, x: Tensor, weight: Tensor) -> float:
    x, weight = x.double(), weight.double()
    size = x.abs().sum(1, keepdim=True) * weight.abs().max()
    return ((found - x @ weight.T).abs() / size).max().item()


WHOLE_OR_CUT = pytest.mark.parametrize("cut", [False, True], ids=["whole", "in pieces"])


@pytest.mark.parametrize(("shape", "cut"), [(SHAPES[0], False), (SHAPES[1], False), (SHAPES[1], True)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_product(kind, shape, cut):
    x = tokens(5, shape[1])
    found = linear(kind, shape, cut=cut)(x)
    assert found.shape == (5, shape[0]) and found.dtype == torch.float32
    assert distance(found, x, dense(weight_of(kind, shape))) < KINDS[kind][1]


@pytest.mark.parametrize(("kind", "shape"), EXACT.values(), ids=EXACT)
def test_groups_as_long_as_a_step_are_scaled_once_summed(kind, shape):
    x = tokens(3, shape[1])
    assert distance(linear(kind, shape)(x), x, dense(weight_of(kind, shape))) < SCALED


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "fp8_block", "int4_asym", "nvfp4_modelopt"])
def test_packed_weights_in_float32(kind):
    shape = SHAPES[0]
    x = draw(3, shape[1]).to(DEVICE)
    found = TritonLinear([weight_of(kind, shape)], dtype=torch.float32)(x)
    x = x.bfloat16() if kind == "bfloat16" else x
    error = distance(found, x, dense(weight_of(kind, shape)))
    # The interpreter rounds towards zero.
    assert error < (3e-7 if kind != "bfloat16" or DEVICE == "cuda" else 2.0**-7)


@WHOLE_OR_CUT
@pytest.mark.parametrize(
    "kind",
    [kind if kind in ONE_OF_EACH else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS],
)
def test_bits_depend_on_nothing_beside(kind, cut):
    """Not on the number of tokens, nor on a token's place among them; nor does poison leave its row."""
    multiply, x = linear(kind, SHAPES[1], cut=cut), tokens(7, SHAPES[1][1], seed=8)
    alone = torch.cat([multiply(token[None]) for token in x])
    for count in (2, 7):
        assert torch.equal(multiply(x[:count]), alone[:count])
        assert torch.equal(multiply(x[-count:].flip(0)).flip(0), alone[-count:])
    poisoned = x.clone()
    poisoned[3] = torch.nan
    found = multiply(poisoned)
    assert found[3].isnan().all() and torch.equal(found[[0, 1, 2, 4, 5, 6]], alone[[0, 1, 2, 4, 5, 6]])


@WHOLE_OR_CUT
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "fp8_block"])
def test_many_tokens(kind, cut, monkeypatch):
    """More than a program takes, in one launch or several."""
    multiply, x = linear(kind, SHAPES[1], cut=cut), tokens(150, SHAPES[1][1])
    alone = torch.cat([multiply(x[i : i + 1]) for i in (0, 63, 64, 149)])
    found = multiply(x)
    assert torch.equal(found[[0, 63, 64, 149]], alone)
    monkeypatch.setattr(multiply, "_tokens_at_once", lambda _: 64)
    assert torch.equal(multiply(x), found)
    assert multiply(x[:0]).shape == (0, SHAPES[1][0])


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "fp8_block", "int4_asym"])
def test_widths(kind):
    """A product is one however many tokens are multiplied at once; that its bits are the same is the device's doing."""
    multiply, x = linear(kind, SHAPES[1]), tokens(70, SHAPES[1][1])
    weight = multiply.weights[0]
    expected = product(weight, x.to(weight.dtype), REFERENCE_BLOCK_M)
    assert torch.equal(expected, multiply(x))
    for width in BLOCK_MS:
        torch.testing.assert_close(product(weight, x.to(weight.dtype), width), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_widths_give_the_same_bits(kind):
    weight, x = linear(kind, (1024, 4096)).weights[0], tokens(300, 4096)
    sure = product(weight, x.to(weight.dtype), REFERENCE_BLOCK_M)
    least, most = {8: (8, 128), 16: (16, 256)}.get(weight.layout.bits, (16, 128))
    for width in BLOCK_MS:
        served = min(max(width, least), most)
        assert block_m_for(width, weight) == served
        assert torch.equal(product(weight, x.to(weight.dtype), served), sure)


@pytest.mark.parametrize("agree", [True, False])
def test_widths_differ_only_where_bits_do_not(agree, monkeypatch):
    tried = []
    monkeypatch.setattr(triton_block_m, "_interpreted", lambda: False)
    monkeypatch.setattr(triton_block_m, "_gives_same_bits", lambda *at: tried.append(at) or agree)
    for kind, least, most in (("bfloat16", 16, 256), ("fp8_block", 8, 128), ("int4_asym", 16, 128)):
        weight = linear(kind, SHAPES[0]).weights[0]
        found = [block_m_for(count, weight) for count in (1, 8, 9, 16, 17, 64, 65, 129, 5000)]
        assert found == ([least, least, 16, 16, 64, 64, 128, most, most] if agree else [64] * 9)
    assert {width for *_, width in tried} == {8, 16, 128, 256}


@pytest.mark.parametrize("kind", KINDS)
def test_what_widths_are_tried_on(kind, monkeypatch):
    """Numbers all of them, and a difference in the last bit of one is found."""
    monkeypatch.setattr(triton_block_m, "NUM_OUTS", 70)
    monkeypatch.setattr(triton_block_m, "NUM_INS", 512)
    found, generator = layout_of(weight_of(kind, SHAPES[1])), torch.Generator(DEVICE).manual_seed(0)
    assert isinstance(found, WeightLayout)
    weight = linear(kind, SHAPES[1]).weights[0]
    some = triton_block_m.random_weight(found, weight.dtype, generator)
    out = product(some, torch.ones(2, 512, dtype=some.dtype, device=DEVICE), REFERENCE_BLOCK_M)
    assert out.isfinite().all() and (out.std(1) > 0).all()
    off = iter([torch.zeros(1), torch.zeros(1).nextafter(torch.ones(1))])
    monkeypatch.setattr(triton_block_m, "product", lambda *_: next(off))
    assert not triton_block_m._gives_same_bits.__wrapped__(found, weight.dtype, torch.device(DEVICE), 16)


def test_what_lies_beside_the_input_does_not_matter():
    size = SHAPES[1][1]
    multiply, x = linear("bfloat16", SHAPES[1]), tokens(3, size)
    room = torch.full((3 * size + 2 * size,), torch.nan, device=DEVICE)
    inside = room[size : 4 * size].view(3, size).copy_(x)
    assert torch.equal(multiply(inside), multiply(x))
    assert torch.equal(multiply(x.bfloat16()), multiply(x)), "activations may come in the weights' dtype"


@WHOLE_OR_CUT
def test_what_is_added(cut):
    shape = SHAPES[1]
    bias, before = draw(shape[0], seed=2).to(DEVICE), draw(3, shape[0], seed=3).to(DEVICE)
    x, weight = tokens(3, shape[1]), weight_of("bfloat16", shape)
    plain = linear("bfloat16", shape, cut=cut)(x)
    biased = TritonLinear([weight], None, bias)
    biased = split_up(biased) if cut else biased
    assert torch.equal(biased(x), plain + bias)
    assert torch.equal(biased(x, add_to=before), before + (plain + bias))
    assert torch.equal(linear("bfloat16", shape, cut=cut)(x, before), before + plain)


@pytest.mark.parametrize("kinds", [["bfloat16"] * 2, ["int4_asym"] * 2, ["bfloat16", "fp8_block"]], ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@WHOLE_OR_CUT
def test_gate_in_one_go(kinds, biased, cut, monkeypatch):
    """The same bits as one after the other, also where gates and what they gate are of two kinds."""
    size = SHAPES[1][0]
    bias = draw(2 * size, seed=2).to(DEVICE) if biased else None
    multiply = TritonLinear([weight_of(kind, SHAPES[1]) for kind in kinds], None, bias)
    multiply = split_up(multiply) if cut else multiply
    x = tokens(5, SHAPES[1][1])
    found = multiply.gated(x, partial(silu_mul, dtype=torch.float16), torch.float16)
    assert torch.equal(found, silu_mul(multiply(x), torch.float16)) and found.shape == (5, size)
    monkeypatch.setattr(multiply, "_tokens_at_once", lambda _: 3)
    assert torch.equal(multiply.gated(x, partial(silu_mul, dtype=torch.float16), torch.float16), found)


@pytest.mark.parametrize("kinds", [["bfloat16"], ["fp8_block"], ["bfloat16", "fp8_block"]], ids=str)
def test_best_output_without_the_others(kinds, monkeypatch):
    """What the best of all outputs would be: also of equal ones, and of those that are no numbers."""
    monkeypatch.setattr(triton_split_k, "ARGMAX_BLOCK", 16)
    size = SHAPES[1][0] * len(kinds)
    bias = torch.zeros(size, device=DEVICE)
    bias[[20, 50]] = torch.inf
    weights, x = [weight_of(kind, SHAPES[1]) for kind in kinds], tokens(6, SHAPES[1][1])
    x[3] = torch.nan
    x[4, 7] = -torch.inf
    for offsets in (None, bias):
        multiply = TritonLinear(weights, None, offsets)
        found = multiply.argmax(x, argmax)
        assert found.dtype == torch.long and torch.equal(found, multiply(x).argmax(1))
        assert torch.equal(torch.cat([multiply.argmax(row[None], argmax) for row in x]), found)
    assert found[0] == 20 and found[3] == 0
    monkeypatch.setattr(multiply, "_tokens_at_once", lambda _: 4)
    assert torch.equal(multiply.argmax(x, argmax), found)


STACKS = {
    "one kind": ["bfloat16", "bfloat16"],
    "scaled blocks": ["fp8_block", "fp8_block"],
    "whole numbers": ["int4_asym", "int4_asym"],
    "several kinds": ["bfloat16", "fp8_channel", "bfloat16", "nvfp4_modelopt"],
}


@pytest.mark.parametrize("kinds", STACKS.values(), ids=STACKS)
@pytest.mark.parametrize("reordered", [False, True], ids=["in order", "reordered"])
def test_stacked_weights_are_the_parts(kinds, reordered):
    """Sums are cut by the shape of all, so their last bits may differ from those of the parts."""
    outs = [60 + 8 * i for i in range(len(kinds))]
    weights = [weight_of(kind, (out, 96)) for kind, out in zip(kinds, outs, strict=True)]
    order = torch.randperm(sum(outs), generator=torch.Generator().manual_seed(1)) if reordered else None
    bias, x = draw(sum(outs), seed=3).to(DEVICE), tokens(3, 96)
    apart = torch.cat([TritonLinear([weight])(x) for weight in weights], 1)
    apart = apart if order is None else apart[:, order.to(DEVICE)]
    found = TritonLinear(weights, order, bias)(x)
    assert torch.allclose(found, apart + bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("swapped", [True, False], ids=["whole blocks", "parts of blocks"])
def test_blocks_of_scales_that_move(swapped):
    """Where all outputs of a block move together its scale stays one number."""
    weight = weight_of("fp8_block", (256, 130))
    order = torch.arange(256).roll(128 if swapped else 100)
    multiply, x = TritonLinear([weight], order), tokens(2, 130)
    assert multiply.weights[0].layout.scale_rows == (128 if swapped else 1)
    expected = TritonLinear([weight])(x)[:, order.to(DEVICE)]
    assert torch.allclose(multiply(x), expected, rtol=1e-5, atol=1e-5)


def test_powers_of_two_multiply_as_the_same_floats_do():
    """Bit for bit: DeepSeek-V4's scales of blocks are a byte each, and kernels read them as float32."""
    shape = (200, 320)
    parts = packing.pack(draw(*shape) * torch.logspace(-3, 3, shape[1]), "fp8_powers")
    both = [
        TritonLinear([detect(packing.header(own), shape, {}).pack(moved(own), shape)])
        for own in (parts, with_float_scales(parts))
    ]
    powers, floats = (multiply.weights[0] for multiply in both)
    assert powers.layout == floats.layout and powers.layout.scale_rows == 128
    assert torch.equal(powers.scales, floats.scales) and torch.equal(powers.codes, floats.codes)
    x = tokens(2, shape[1])
    assert torch.equal(both[0](x), both[1](x))


def test_every_eight_bit_float_is_itself():
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[127, 255]] = 0  # no numbers
    weight = codes.view(torch.float8_e4m3fn).view(4, 64)
    parts = {"weight": weight.to(DEVICE), "weight_scale": torch.ones(4, 1, device=DEVICE)}
    multiply = TritonLinear([detect(packing.header(parts), (4, 64), {}).pack(parts, (4, 64))])
    assert torch.equal(multiply(torch.eye(64, device=DEVICE)).T.cpu(), weight.float())


def test_eight_bit_floats_that_are_no_numbers_are_refused():
    codes = torch.zeros(4, 64, dtype=torch.uint8)
    codes[2, 5], codes[0, 0] = 255, 128  # NaN; minus zero, which e4m3fnuz lacks
    parts = {"weight": codes.view(torch.float8_e4m3fn), "weight_scale": torch.ones(4, 1)}
    weight = detect(packing.header(parts), (4, 64), {}).pack(moved(parts), (4, 64))
    with pytest.raises(CheckpointError, match="no numbers"):
        TritonLinear([weight])


def test_what_it_does_not_know_is_left_to_others():
    for weight, reason in (
        (draw(8, 32).double(), "float64"),
        (stored("int4_actorder", 8, 64), "even groups"),
        (torch.empty(8, 64, device="meta"), "not there"),
        (eight_bits(96, 8, 192), "groups of 96"),
    ):
        assert reason in (TritonLinear.supports(weight) or "")


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize(
    "shape",
    [(34816, 5120), (5120, 17408), (14336, 5120), (5120, 6144), (248320, 5120), (2048, 2048), (1024, 2048)],
    ids=str,
)
@pytest.mark.parametrize("multiprocessors", [132, 128, 82])
def test_plans_share_the_work_evenly(shape, bits, multiprocessors):
    """Every program but the last has as much to do, and one wave of them does all of it: on an H200, and on GPUs that
    people have at home."""
    plan = gemm_config(*shape, bits=bits, multiprocessors=multiprocessors)
    columns = plan.block_k * triton_weight.codes_per_word(bits)
    assert all(size & (size - 1) == 0 for size in plan[:2]) and shape[1] % columns == 0
    steps = -(-shape[0] // plan.block_n) * (shape[1] // columns)
    programs = -(-steps // plan.steps_per_split)
    wave = multiprocessors * (BYTE_SPLITS_EACH if bits == 8 else SPLITS_EACH)
    assert multiprocessors * SPLITS_EACH / 5 < programs <= wave
    if steps > wave * 16:
        assert steps / (wave * plan.steps_per_split) > 0.93


def test_plans_depend_on_the_shape_alone():
    """And a weight of twice the outputs is cut into about the same number of splits."""
    sizes = [gemm_config(outs, 4096).steps_per_split for outs in (8192, 16384, 32768)]
    assert all(abs(second - 2 * first) <= 1 for first, second in pairwise(sizes))


@pytest.mark.parametrize("outs", [[0], [64], [0, 3, 31, 33, 63, 64], list(range(0, 65, 2))])
@pytest.mark.parametrize("kind", KINDS)
def test_picked_outputs(kind, outs):
    """Close to the whole's own: the work is cut otherwise."""
    whole, at = linear(kind, SHAPES[1]), torch.tensor(outs)
    part, x = whole.picked(at), tokens(3, SHAPES[1][1])
    assert part is not None and part(x).shape == (3, len(outs)) and part.out_features == len(outs)
    expected = whole(x)[:, at.to(DEVICE)]
    torch.testing.assert_close(part(x), expected, rtol=1e-5, atol=1e-5 * whole(x).abs().max().item())
    assert torch.equal(part.argmax(x, argmax), part(x).argmax(1))


def test_of_several_weights_none_are_picked():
    mixed = TritonLinear([weight_of("float32", SHAPES[1]), weight_of("int8_channel", SHAPES[1])])
    assert mixed.picked(torch.tensor([0])) is None


def test_what_is_said_of_a_gpu():
    """Asked without one: `inspect` tells of machines that are not here."""
    ops = choose_backend(torch.bfloat16, torch.device("cuda"))
    assert ops.explain_linear(torch.bfloat16, None)[0] == "triton"
    fp8 = Fp8Format("block", (128, 128), "F8_E4M3", "weight_scale_inv")
    assert ops.explain_linear(torch.bfloat16, fp8) == ("triton", "as narrow as it is stored")
    assert not ops.asks_host and choose_backend(torch.float64, torch.device("cuda")).asks_host


def test_a_weight_for_somebody_else_is_told_and_forbids_recording(caplog, monkeypatch):
    monkeypatch.setenv("HEADLONG_TRITON", "interpret")
    ops = choose_backend(torch.float32, torch.device("cpu"))
    monkeypatch.setattr(TritonLinear, "supports", staticmethod(lambda _weight: "is too odd"))
    assert ops.linear(torch.randn(8, 16)).name != "triton"
    assert "not triton: is too odd; drafting may decide a near-tie differently" in caplog.text
    assert ops.asks_host
