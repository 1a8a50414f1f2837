"""Experts in one native call: against the reference in float64 with every kind of weight, bit for bit the same for a
token in any company, on any number of threads and whatever is in memory; what is not routed to does not matter."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from test_native_linear import ALIKE, KINDS
from torch import Tensor

from headlong.ops import native
from headlong.ops.linear.native_source import Source
from headlong.ops.moe.native import NativeExperts
from headlong.ops.moe.routing import Routing
from headlong.ops.moe.weights import ExpertWeights, MoeWeights
from headlong.ops.registry import choose_backend
from headlong.quant.detect import detect
from support import packing
from support.moe_truth import expected, with_biases

pytestmark = pytest.mark.skipif(native.library() is None, reason="native kernels are not built or turned off")
EXPERTS, ACTIVE, TOKENS = 7, 3, 140
"""More tokens than the kernel takes at a time."""
COUNTS = (1, 2, 3, 6, 7, 13, 33, 128, 129, TOKENS)
MIXED = "mixed"
EVERY = [*(kind for kind in KINDS if not kind.startswith(ALIKE)), MIXED]
MIXED_DOWN = ("Q4_0", "float32", "Q4_1", "bfloat16", "Q8_0", "int4 group", "Q5_1", "float16")
EXACT, ROUNDED = 2e-6, 2.0**-6
"""Errors relative to the largest output: of float32, and where activations are rounded on the way."""


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sizes_of(kind: str) -> tuple[int, tuple[int, ...]]:
    """The hidden size, and inner sizes that experts have in turn: odd ones where weights of this kind can have them."""
    fitting = KINDS["Q8_0" if kind == MIXED else kind][1]
    return (31, (513, 32, 96)) if 31 in fitting else (fitting[1], fitting[1:4])


def expert_of(kind: str, number: int) -> ExpertWeights:
    """No two are alike: random weights differ with their shape, and gate and up are cut at another place in each."""
    hidden, inners = sizes_of(kind)
    inner, cut = inners[number % len(inners)], number + 1
    first, second, last = ("Q8_0", "float16", MIXED_DOWN[number]) if kind == MIXED else (kind,) * 3
    made = (
        KINDS[first][0](cut, hidden),
        KINDS[second][0](2 * inner - cut, hidden),
        KINDS[last][0](hidden, inner),
    )
    gate, up, down = (w / w.shape[1] ** 0.5 if isinstance(w, Tensor) else w for w in made)
    return ExpertWeights([gate, up], down)


@cache
def weights_of(kind: str, normalise: bool = True) -> MoeWeights:
    experts = [expert_of(kind, number) for number in range(EXPERTS + 1)]
    return MoeWeights(Routing(EXPERTS, ACTIVE, normalise), experts.__getitem__, experts[-1])


def load(kind: str, weights: MoeWeights) -> NativeExperts:
    found = NativeExperts.load(weights, partial(Source.of, rounding=kind.endswith("rounded")))
    assert found is not None
    return found


@cache
def experts_of(kind: str) -> NativeExperts:
    return load(kind, weights_of(kind))


@cache
def inputs_of(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, logits and what is added to."""
    hidden = sizes_of(kind)[0]
    return (
        draw(TOKENS, hidden, seed=1),
        2.0 * draw(TOKENS, EXPERTS + 1, seed=2),
        draw(TOKENS, hidden, seed=3),
    )


@pytest.fixture
def threads():
    """Sets their number; afterwards it is what it was."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("kind", EVERY)
def test_the_reference(kind, normalise):
    weights, (x, logits, to) = weights_of(kind, normalise), inputs_of(kind)
    wanted = expected(weights, x, logits, to)
    error = (load(kind, weights)(x, logits, None, to, torch.clone)[0] - wanted).abs().max() / (
        wanted - to
    ).abs().max()
    assert error < (ROUNDED if kind.endswith("rounded") else EXACT)


@pytest.mark.parametrize("kind", EVERY)
def test_bits_depend_on_nothing_beside(kind, threads):
    """Not on other tokens, their number, who shares an expert, threads, or what was left in memory."""
    experts, (x, logits, to) = experts_of(kind), inputs_of(kind)
    threads(1)
    singly = [slice(i, i + 1) for i in range(TOKENS)]
    alone = torch.cat([experts(x[i], logits[i], None, to[i], torch.clone)[0] for i in singly])
    same = logits[:1].expand(TOKENS, -1).contiguous()
    together = torch.cat([experts(x[i], same[i], None, to[i], torch.clone)[0] for i in singly])
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(5))
    for count in (1, 2, 3):
        threads(count)
        assert experts(torch.full_like(x, torch.nan), logits, None, to, torch.clone)[0].isnan().all()
        for tokens in COUNTS:
            for part in (slice(0, tokens), slice(TOKENS - tokens, TOKENS)):
                assert torch.equal(
                    experts(x[part], logits[part], None, to[part], torch.clone)[0], alone[part]
                )
        assert torch.equal(experts(x[order], logits[order], None, to[order], torch.clone)[0], alone[order])
        assert torch.equal(experts(x, same, None, to, torch.clone)[0], together)


def test_biases_and_another_activation():
    kind = "Q8_0"
    weights, (x, logits, to) = with_biases(weights_of(kind)), inputs_of(kind)
    experts, wanted = load(kind, weights), expected(weights, 4.0 * x, logits, to)
    found = experts(4.0 * x, logits, None, to, torch.clone)[0]
    assert (found - wanted).abs().max() < EXACT * (wanted - to).abs().max()
    alone = [experts(4.0 * x[[i]], logits[[i]], None, to[[i]], torch.clone)[0] for i in range(9)]
    assert torch.equal(torch.cat(alone), found[:9])


def test_the_first_of_equal_experts_are_chosen():
    """And no logit that is no number keeps a token from having as many as it must."""
    experts, (x, _, to) = experts_of("float32"), inputs_of("float32")
    equal, first = torch.zeros(4, EXPERTS + 1), torch.zeros(4, EXPERTS + 1)
    first[:, ACTIVE:EXPERTS] = -80.0
    found = experts(x[:4], equal, None, to[:4], torch.clone)[0]
    torch.testing.assert_close(
        found, experts(x[:4], first, None, to[:4], torch.clone)[0], rtol=0.0, atol=1e-5
    )
    equal[1] = torch.nan
    broken = experts(x[:4], equal, None, to[:4], torch.clone)[0]
    assert broken[1].isnan().all() and torch.equal(broken[[0, 2, 3]], found[[0, 2, 3]])


def test_what_is_not_routed_to_does_not_matter():
    weights, (x, logits, to) = weights_of("float32"), inputs_of("float32")
    broken = ExpertWeights(
        [torch.full_like(part, torch.nan) for part in weights.load(4).gate_up if isinstance(part, Tensor)],
        weights.load(4).down,
    )
    avoided = replace(weights, load=lambda e: broken if e == 4 else weights.load(e))
    logits = logits.clone()
    logits[:, 4] = -90.0
    wanted = experts_of("float32")(x, logits, None, to, torch.clone)[0]
    assert wanted.isfinite().all() and torch.equal(
        load("float32", avoided)(x, logits, None, to, torch.clone)[0], wanted
    )


@pytest.mark.parametrize("where", range(EXPERTS + 1))
def test_weights_it_cannot_take_are_left_to_others(where):
    weights = weights_of("int8 channel")
    hidden = sizes_of("int8 channel")[0]
    parts = packing.pack(draw(hidden, hidden, seed=0), "fp8_channel")
    parts["weight"].view(torch.uint8)[0, :2] = torch.tensor(
        [0x7F, 0x80], dtype=torch.uint8
    )  # NaN, minus zero
    foreign = detect(packing.header(parts), (hidden, hidden), {}).pack(parts, (hidden, hidden))
    experts = [*(weights.load(e) for e in range(EXPERTS)), weights.shared]
    experts[where] = ExpertWeights([foreign] * 2, foreign)
    given = replace(weights, load=experts.__getitem__, shared=experts[-1])
    ops = choose_backend(torch.float32, torch.device("cpu"))
    assert (ops.experts(given).name, ops.experts(weights).name) == ("reference", "native")
