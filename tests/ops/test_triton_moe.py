"""Experts in Triton's kernels: against the reference in float64, bit for bit the same for a token in any company, and
whatever is not routed to does not matter."""

from functools import cache
from typing import NamedTuple

import pytest
import torch
from test_triton_attention import true_bfloat16  # noqa: F401
from torch import Tensor

from headlong.ops.moe import stacked_weight as op
from headlong.ops.moe.routing import Routing
from headlong.ops.moe.triton import TritonExperts
from headlong.ops.moe.weights import ExpertWeights, MoeWeights
from headlong.ops.norm.normed import PartialNorm
from headlong.ops.norm.reference import RmsNorm
from headlong.ops.norm.triton import TritonRmsNorm
from headlong.ops.registry import choose_backend
from headlong.quant.detect import detect
from headlong.quant.format import Weight
from support import packing
from support.moe_truth import expected, mlp, with_biases

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PACKED = ("fp8_block", "fp8_channel", "int8_channel", "int4_g32", "int4_asym", "nvfp4_modelopt")
EXACT, ROUNDED = 1e-6, 2.0**-6
"""Errors relative to the largest output: of float32, and where weights or activations are rounded on the way."""


class Sizes(NamedTuple):
    experts: int = 6
    active: int = 2
    hidden: int = 96
    inner: int = 40
    shared: int = 40


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(count: int, size: int, seed: int = 7) -> Tensor:
    """That every dtype holds exactly."""
    return draw(count, size, seed=seed).bfloat16().half().float().to(DEVICE)


def logits_of(count: int, s: Sizes, seed: int = 8) -> Tensor:
    return 2.0 * draw(count, s.experts + 1, seed=seed).to(DEVICE)


def weight_of(kind: str, outs: int, ins: int, seed: int) -> Weight:
    whole = draw(outs, ins, seed=seed) / ins**0.5
    if kind in FLOATS:
        return whole.to(DEVICE, FLOATS[kind])
    parts = packing.pack(whole, kind)
    format = detect(packing.header(parts), (outs, ins), {})
    return format.pack(
        {name: part if name == "weight_shape" else part.to(DEVICE) for name, part in parts.items()},
        (outs, ins),
    )


def expert_of(kind: str, hidden: int, inner: int, seed: int, *, apart: bool = False) -> ExpertWeights:
    sizes = [inner, inner] if apart else [2 * inner]
    gate_up = [weight_of(kind, size, hidden, 10 * seed + i) for i, size in enumerate(sizes)]
    return ExpertWeights(gate_up, weight_of(kind, hidden, inner, 10 * seed + 5))


@cache
def weights_of(kind: str, s: Sizes, *, normalise: bool = True, apart: bool = False) -> MoeWeights:
    experts = [expert_of(kind, s.hidden, s.inner, e, apart=apart) for e in range(s.experts)]
    shared = expert_of(kind, s.hidden, s.shared, s.experts, apart=apart)
    return MoeWeights(Routing(s.experts, s.active, normalise), experts.__getitem__, shared)


class Layer:
    """The op, and the shared expert where it is not part of it."""

    def __init__(self, weights: MoeWeights, dtype: torch.dtype = torch.bfloat16) -> None:
        found = TritonExperts.load(weights, dtype)
        assert isinstance(found, TritonExperts), found
        self.experts, self.weights = found, weights

    def __call__(self, x: Tensor, logits: Tensor, to: Tensor | None = None) -> Tensor:
        to = torch.zeros_like(x) if to is None else to
        apart = None if self.experts.has_shared else mlp(self.weights.shared, self.weights.activation)
        shared = None if apart is None else apart(x.double()).float()
        return self.experts(x, logits, shared, to, torch.clone)[0]


def assert_near(found: Tensor, wanted: Tensor, error: float) -> None:
    assert found.dtype == torch.float32
    assert (found - wanted).abs().max() < error * wanted.abs().max()


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(),
        Sizes(shared=56),
        Sizes(experts=1, active=1, hidden=20, inner=7, shared=7),
        Sizes(experts=33, active=5, hidden=130, inner=33, shared=33),
        Sizes(experts=5, active=5),
        Sizes(experts=300, active=3, hidden=16, inner=8, shared=8),
    ],
    ids=str,
)
@pytest.mark.parametrize("normalise", [True, False])
def test_against_the_reference(sizes, normalise):
    weights = weights_of("float32", sizes, normalise=normalise)
    layer = Layer(weights, torch.float32)
    assert layer.experts.has_shared == (sizes.inner == sizes.shared)
    x, logits = tokens(4, sizes.hidden), logits_of(4, sizes)
    to = draw(4, sizes.hidden, seed=3).to(DEVICE)
    assert_near(layer(x, logits, to), expected(weights, x, logits, to), EXACT)
    assert layer(x[:0], logits[:0]).shape == (0, sizes.hidden)


@pytest.mark.parametrize("kind", [*FLOATS, *PACKED])
def test_every_kind_of_weight(kind):
    sizes = Sizes(hidden=192, inner=64, shared=64)
    x, logits = tokens(3, sizes.hidden), logits_of(3, sizes)
    weights = weights_of(kind, sizes)
    wanted = expected(weights, x, logits, torch.zeros_like(x))
    found = Layer(weights)(x, logits)
    assert_near(found, wanted, EXACT if kind == "float32" else ROUNDED)
    if kind in PACKED:
        assert_near(Layer(weights, torch.float32)(x, logits), wanted, EXACT)


@pytest.mark.parametrize("kind", ["float32", "mxfp4_blocks"])
@pytest.mark.parametrize("shared", [64, 32], ids=["joined", "apart"])
def test_biases_and_another_activation(kind, shared):
    sizes = Sizes(hidden=192, inner=64, shared=shared)
    weights = with_biases(weights_of(kind, sizes), DEVICE)
    layer, x, logits = Layer(weights, torch.float32), tokens(20, sizes.hidden), logits_of(20, sizes)
    assert layer.experts.has_shared == (shared == 64)
    found = layer(x, logits)
    assert_near(found, expected(weights, x, logits, torch.zeros_like(x)), EXACT)
    assert torch.equal(torch.cat([layer(x[[i]], logits[[i]]) for i in range(3)]), found[:3])


@pytest.mark.parametrize("kind", ["float32", "fp8_block", "int4_asym"])
def test_gate_and_up_apart(kind):
    sizes = Sizes()
    x, logits = tokens(3, sizes.hidden), logits_of(3, sizes)
    weights = weights_of(kind, sizes, apart=True)
    found = Layer(weights, torch.float32)(x, logits)
    assert_near(found, expected(weights, x, logits, torch.zeros_like(x)), EXACT)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "fp8_block", "nvfp4_modelopt"])
@pytest.mark.parametrize(
    "sizes", [Sizes(hidden=64), Sizes(experts=100, active=3, hidden=70, shared=56)], ids=str
)
def test_bits_depend_on_nothing_beside(kind, sizes):
    """Not on who else is routed to an expert, nor on how many: alone, few (blocks by pair), many (blocks by expert,
    several of one expert)."""
    layer = Layer(weights_of(kind, sizes))
    x, logits = tokens(30, sizes.hidden), logits_of(30, sizes)
    alone = torch.cat([layer(x[i : i + 1], logits[i : i + 1]) for i in range(4)])
    assert torch.equal(layer(x[:4], logits[:4]), alone)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(5))
    x[25] = torch.nan
    found = layer(x[order], logits[order])[order.argsort()]
    assert torch.equal(found[:4], alone)
    assert found[25].isnan().all() and found.isfinite().all(1).sum() == 29


@pytest.mark.parametrize("kind", ["fp8_block", "int8_channel"])
@pytest.mark.parametrize("count", [1, op.FEW_BLOCK_M])
def test_few_pairs_at_once(kind, count):
    """On a GPU with the bits of more; the interpreter's products are numpy's, so there it does not serve."""
    sizes = Sizes(hidden=192, inner=64, shared=64)
    experts = Layer(weights_of(kind, sizes)).experts
    _, _, blocks, pairs = experts.route(logits_of(count, sizes))
    given = {experts.gate_up: tokens(count, sizes.hidden), experts.down: tokens(len(pairs), sizes.inner)}
    for stack, sharing in ((experts.gate_up, experts.ranks), (experts.down, 1)):
        x = given[stack].bfloat16()
        few, more = (
            stack.grouped_gemm(x, blocks, pairs, sharing, torch.float32, block_m=block_m)
            for block_m in (op.FEW_BLOCK_M, op.BLOCK_M)
        )
        torch.testing.assert_close(few, more, rtol=1e-5, atol=1e-5)
        assert DEVICE == "cpu" or torch.equal(few, more)
        assert op.block_m_for(count, stack) == (op.BLOCK_M if DEVICE == "cpu" else op.FEW_BLOCK_M)
        assert op.block_m_for(op.FEW_BLOCK_M + 1, stack) == op.BLOCK_M


def test_only_bytes_are_narrow():
    assert op.block_m_for(1, Layer(weights_of("bfloat16", Sizes())).experts.gate_up) == op.BLOCK_M


@pytest.mark.parametrize("sizes", [Sizes(), Sizes(hidden=512, inner=256, shared=256)], ids=str)
def test_halves_of_norms(sizes):
    """What is given is still to be divided by its length; what comes out has the first half of the next norm beside."""
    experts, size = Layer(weights_of("fp8_block", sizes)).experts, sizes.hidden
    x, logits, to = tokens(5, size), logits_of(5, sizes), draw(5, size, seed=3).to(DEVICE)
    norm = TritonRmsNorm(RmsNorm(torch.ones(size, device=DEVICE), 1e-6), torch.bfloat16, lambda: True)
    squares = x.square().unflatten(1, (-1, 32)).sum(2)
    given = PartialNorm((x * norm.weight).bfloat16(), squares, norm.eps)
    found, half = experts(given, logits, None, to, norm)
    assert_near(found, experts(norm(x), logits, None, to, norm)[0], ROUNDED)
    assert isinstance(half, PartialNorm) and torch.equal(half.x_ND, (found * norm.weight).bfloat16())
    torch.testing.assert_close(half.squares_NP.sum(1), found.square().sum(1))
    alone, own = experts(given.some(slice(3, 4)), logits[3:4], None, to[3:4], norm)
    assert torch.equal(alone, found[3:4]) and torch.equal(own.squares_NP, half.squares_NP[3:4])


def test_everybody_at_the_same_experts():
    """Several blocks of one expert, the last not full."""
    sizes = Sizes()
    weights = weights_of("float32", sizes)
    layer, x = Layer(weights), tokens(37, sizes.hidden)
    logits = logits_of(1, sizes).expand(37, -1).contiguous()
    found = layer(x, logits)
    assert_near(found, expected(weights, x, logits, torch.zeros_like(x)), EXACT)
    assert torch.equal(
        found[[0, 15, 16, 36]], torch.cat([layer(x[[i]], logits[:1]) for i in (0, 15, 16, 36)])
    )


@pytest.mark.parametrize("count", [2, 16])
def test_experts_nobody_is_routed_to_are_not_read(count):
    sizes = Sizes(experts=40, active=3)
    weights = weights_of("float32", sizes)
    layer, x, logits = Layer(weights), tokens(count, sizes.hidden), logits_of(count, sizes)
    logits[:, 20:40] -= 100.0
    wanted = layer(x, logits)
    for stack in (layer.experts.gate_up, layer.experts.down):
        stack.codes[20:40] = torch.nan
    assert torch.equal(layer(x, logits), wanted) and wanted.isfinite().all()


def test_many_tokens_in_several_launches(monkeypatch):
    sizes = Sizes(shared=56)
    layer, x, logits = Layer(weights_of("float32", sizes)), tokens(24, sizes.hidden), logits_of(24, sizes)
    wanted = layer(x, logits, x)
    monkeypatch.setattr(layer.experts, "_tokens_at_once", 10)
    assert torch.equal(layer(x, logits, x), wanted)


@pytest.mark.parametrize(("experts", "active"), [(9, 3), (256, 8), (300, 10)])
@pytest.mark.parametrize("joined", [True, False])
def test_routing(experts, active, joined):
    """Ties go to the lowest number; no number is above or below another, and experts stay apart even then."""
    sizes = Sizes(experts, active, 8, 4, 4 if joined else 5)
    layer = Layer(weights_of("float32", sizes)).experts
    logits = logits_of(20, sizes).round()
    logits[-1] = torch.nan
    chosen, shares, *_ = layer.route(logits)
    chosen = chosen.view(20, -1)
    assert chosen.shape[1] == active + joined and shares.shape == (20, active + 1)
    probabilities = torch.softmax(logits[:-1, :-1], -1)
    for token in range(19):
        best = sorted(range(experts), key=lambda e: -float(logits[token, e]))[:active]
        assert chosen[token].tolist() == best + [experts] * joined
        share = probabilities[token, best]
        torch.testing.assert_close(shares[token, :active], share / share.sum())
    torch.testing.assert_close(shares[:-1, -1], torch.sigmoid(logits[:-1, -1]))
    assert (
        len(set(chosen[-1].tolist())) == active + joined
        and 0 <= chosen[-1].min() <= chosen[-1].max() <= experts
    )


def check_blocks(of_pair: Tensor, blocks: Tensor, pairs: Tensor, experts: int) -> None:
    """Every pair is in one place, that of its expert, and those of a place are in their order."""
    assert len(blocks) <= min(len(of_pair), len(of_pair) // op.BLOCK_M + experts + 1)
    seen = []
    for expert, first, size in blocks.tolist():
        own = pairs[first : first + size].tolist()
        assert size <= op.BLOCK_M and own == sorted(own)
        assert all(of_pair[pair] == expert for pair in own)
        seen += own
    assert sorted(seen) == list(range(len(of_pair)))
    full = sum(-(-int(number) // op.BLOCK_M) for number in of_pair.bincount())
    assert sum(size > 0 for *_, size in blocks.tolist()) == full, "no more blocks than it takes"


@pytest.mark.parametrize("count", [1, 5, 16, 17, 130, 1100])
@pytest.mark.parametrize("experts", [1, 7, 100])
def test_grouping(count, experts):
    layer = Layer(weights_of("float32", Sizes(experts, 1, 8, 4, 5))).experts
    generator = torch.Generator().manual_seed(count)
    of_pair = torch.randint(experts, (count,), generator=generator, dtype=torch.int32).to(DEVICE)
    check_blocks(of_pair, *layer.group(of_pair), experts)


@pytest.mark.parametrize("count", [1, 3, 4, 5])
@pytest.mark.parametrize(
    "sizes", [Sizes(100, 3, 8, 4, 4), Sizes(20, 4, 8, 4, 5), Sizes(4, 4, 8, 4, 4)], ids=str
)
def test_grouping_of_few_tokens(count, sizes):
    """By the kernel that routes them, or by the next."""
    layer = Layer(weights_of("float32", sizes)).experts
    of_pair, _, blocks, pairs = layer.route(logits_of(count, sizes))
    check_blocks(of_pair, blocks, pairs, sizes.experts)


def test_experts_that_differ_are_left_to_others(caplog, monkeypatch):
    """And so is what Triton cannot multiply; nothing is recorded then."""
    monkeypatch.setenv("HEADLONG_TRITON", "interpret")
    sizes = Sizes(experts=3)
    weights = weights_of("float32", sizes)
    others = weights_of("bfloat16", sizes)
    mixed = MoeWeights(Routing(3, 2), lambda e: (others if e == 2 else weights).load(e), weights.shared)
    gates = ExpertWeights([*weights.load(0).gate_up, *others.load(0).gate_up], weights.load(0).down)
    for found, reason in (
        (mixed, "experts of one layer are stored differently"),
        (MoeWeights(Routing(3, 2), lambda _: gates, weights.shared), "gate and up of an expert"),
        (MoeWeights(Routing(3, 2), lambda _: ExpertWeights([draw(8, 8, seed=0).double()], draw(8, 4, seed=0)),
                    weights.shared), "float64"),
    ):  # fmt: skip
        ops = choose_backend(torch.float32, torch.device("cpu"))
        assert ops.experts(found).name == "reference" and ops.asks_host
        assert "experts: not triton: " in caplog.text and reason in caplog.text


def test_a_shared_expert_of_another_kind_stays_apart():
    sizes = Sizes(hidden=192, inner=64, shared=64)
    routed, shared = weights_of("nvfp4_modelopt", sizes), weights_of("bfloat16", sizes).shared
    weights = MoeWeights(Routing(sizes.experts, sizes.active), routed.load, shared)
    layer, x, logits = Layer(weights), tokens(4, sizes.hidden), logits_of(4, sizes)
    assert not layer.experts.has_shared
    assert_near(layer(x, logits), expected(weights, x, logits, torch.zeros_like(x)), ROUNDED)
