"""Every way of routing, in all backends: the definition as loops, ties, the shared expert gated, plain or absent."""

from typing import Any

import pytest
import torch
from test_triton_moe import DEVICE, Sizes, expert_of
from torch import Tensor

from headlong.ops import native
from headlong.ops.linear.native_source import Source
from headlong.ops.moe.native import NativeExperts
from headlong.ops.moe.reference import route
from headlong.ops.moe.routing import Routing
from headlong.ops.moe.triton import TritonExperts
from headlong.ops.moe.weights import MoeWeights
from headlong.ops.reference_backend import ReferenceBackend
from support.moe_truth import expected, mlp

EXPERTS = 12
SIGMOID = Routing(EXPERTS, 4, scores="sigmoid")
GROUPED = Routing(EXPERTS, 4, scores="sigmoid", scale=2.5, num_groups=4, kept_groups=2)
CASES = {
    "softmax": (Routing(EXPERTS, 4), False),
    "softmax, scaled": (Routing(EXPERTS, 4, normalise=False, scale=1.7), False),
    "softmax, biased": (Routing(EXPERTS, 4), True),
    "softmax, grouped": (Routing(EXPERTS, 3, normalise=False, num_groups=3, kept_groups=1), False),
    "sigmoid": (SIGMOID, False),
    "sigmoid, biased": (SIGMOID, True),
    "sigmoid, as they are": (Routing(EXPERTS, 5, False, "sigmoid", scale=0.5), True),
    "grouped": (GROUPED, False),
    "grouped, biased": (GROUPED, True),
    "all groups": (Routing(EXPERTS, 4, scores="sigmoid", num_groups=6, kept_groups=6), True),
}
TOKENS = 11
SIZES = Sizes(experts=EXPERTS, active=4, hidden=40, inner=24, shared=24)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def logits_of(width: int = EXPERTS, *, ties: bool = False) -> Tensor:
    logits = 2.0 * draw(TOKENS, width, seed=1)
    return logits.round() if ties else logits


def bias_of(is_biased: bool) -> Tensor | None:
    """Large enough to change choices and to make some of them negative; in steps that a float has exactly."""
    return (draw(EXPERTS, seed=2) * 8).round() / 16 if is_biased else None


def best(scores: dict[int, float], count: int) -> list[int]:
    return sorted(scores, key=lambda number: (-scores[number], number))[:count]


def slow_route(logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[list[int], list[float]]:
    """One token, number by number."""
    scores = logits.softmax(-1) if routing.scores == "softmax" else logits.sigmoid()
    choice = dict(enumerate((scores if bias is None else scores + bias).tolist()))
    size = EXPERTS // routing.num_groups
    groups = {}
    for group in range(routing.num_groups):
        inside = sorted(choice[e] for e in range(group * size, (group + 1) * size))
        groups[group] = inside[-1] + inside[-2]
    kept = best(groups, routing.kept_groups)
    experts = best({e: score for e, score in choice.items() if e // size in kept}, routing.num_active)
    weights = [float(scores[e]) for e in experts]
    total = sum(weights) if routing.normalise else 1.0
    return experts, [weight / total * routing.scale for weight in weights]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("routing", "is_biased"), CASES.values(), ids=CASES)
def test_the_definition(routing, is_biased, ties):
    logits, bias = logits_of(ties=ties).double(), bias_of(is_biased)
    experts, weights = route(logits, routing, bias)
    for token in range(TOKENS):
        wanted, shares = slow_route(logits[token], routing, bias)
        assert experts[token].tolist() == wanted
        torch.testing.assert_close(weights[token].tolist(), shares)


def weights_of(routing: Routing, is_biased: bool, shared: int | None, gated: bool) -> MoeWeights:
    experts = [expert_of("float32", SIZES.hidden, SIZES.inner, e) for e in range(EXPERTS)]
    one = None if shared is None else expert_of("float32", SIZES.hidden, shared, EXPERTS)
    bias = bias_of(is_biased)
    return MoeWeights(routing, experts.__getitem__, one, gated, None if bias is None else bias.to(DEVICE))


def experts_of(backend: str, weights: MoeWeights) -> Any:
    if backend == "native":
        return NativeExperts.load(weights, Source.of)
    if backend == "triton":
        return TritonExperts.load(weights, torch.float32)
    return ReferenceBackend(torch.float32, torch.device("cpu")).experts(weights)


BACKENDS = [
    "reference",
    pytest.param(
        "native", marks=pytest.mark.skipif(native.library() is None, reason="native kernels are off")
    ),
    "triton",
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "shared", "gated"),
    [
        ("softmax, scaled", None, False),
        ("sigmoid, biased", 24, True),
        ("grouped, biased", 24, False),
        ("grouped, biased", 32, False),
    ],
)
def test_layers(name, shared, gated, backend):
    """Against float64; and a token has the same bits alone, among others and in another order."""
    weights = weights_of(*CASES[name], shared, gated)
    experts = experts_of(backend, weights)
    device = DEVICE if backend == "triton" else torch.device("cpu")
    x, to = draw(TOKENS, SIZES.hidden, seed=3).to(device), draw(TOKENS, SIZES.hidden, seed=4).to(device)
    logits = logits_of(EXPERTS + gated).to(device)
    apart = None if experts.has_shared else weights.shared

    def run(tokens):
        own = None if apart is None else mlp(apart)(x[tokens].double()).float()
        return experts(x[tokens], logits[tokens], own, to[tokens], torch.clone)[0]

    every = torch.arange(TOKENS, device=device)
    found, wanted = run(every), expected(weights, x, logits, to)
    torch.testing.assert_close(found.double(), wanted, atol=2e-5, rtol=0.0)
    few = range(0, TOKENS, 5)
    assert torch.equal(torch.cat([run(every[i : i + 1]) for i in few]), found[::5])
    assert torch.equal(run(every.flip(0)[:7]), found.flip(0)[:7])


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("routing", "is_biased"), CASES.values(), ids=CASES)
def test_triton_chooses_alike(routing, is_biased, ties):
    """Equal logits are equal scores, whoever computes them."""
    weights, logits = weights_of(routing, is_biased, None, False), logits_of(ties=ties)
    layer = experts_of("triton", weights)
    found, shares, *_ = layer.route(logits.to(DEVICE))
    wanted, expected_shares = route(logits, routing, bias_of(is_biased))
    assert found.view(TOKENS, -1).cpu().tolist() == wanted.tolist()
    torch.testing.assert_close(shares[:, :-1].cpu(), expected_shares)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("is_biased", [False, True])
def test_triton_routes_as_deepseek_v4_does(is_biased, given):
    """By roots of softplus, or to experts that are given, which its scores weigh all the same."""
    routing = Routing(EXPERTS, 4, scores="sqrtsoftplus", scale=1.5, given=given)
    weights = weights_of(routing, is_biased and not given, None, False)
    logits = 20.0 * logits_of()
    chosen = torch.stack([torch.randperm(EXPERTS)[:4] for _ in range(TOKENS)]) if given else None
    layer = experts_of("triton", weights)
    found, shares, *_ = layer.route(logits.to(DEVICE), None if chosen is None else chosen.to(DEVICE))
    wanted, expected_shares = route(logits, routing, bias_of(is_biased and not given), chosen)
    assert found.view(TOKENS, -1).cpu().tolist() == wanted.tolist()
    torch.testing.assert_close(shares[:, :-1].cpu(), expected_shares)
    x = draw(TOKENS, SIZES.hidden, seed=3).to(DEVICE)
    own = None if chosen is None else chosen.to(DEVICE)
    whole = layer(x, logits.to(DEVICE), None, x, torch.clone, own)[0]
    alone = layer(
        x[3:4], logits[3:4].to(DEVICE), None, x[3:4], torch.clone, None if own is None else own[3:4]
    )[0]
    assert torch.equal(alone[0], whole[3])


@pytest.mark.skipif(native.library() is None, reason="native kernels are off")
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("routing", "is_biased"), CASES.values(), ids=CASES)
def test_native_chooses_alike(routing, is_biased, ties):
    """No two experts say the same, so what they say together tells who was chosen."""
    weights, logits = weights_of(routing, is_biased, None, False), logits_of(ties=ties)
    layer = experts_of("native", weights)
    x = draw(TOKENS, SIZES.hidden, seed=3)
    to = torch.zeros_like(x)
    found = layer(x, logits, None, to, torch.clone)[0]
    torch.testing.assert_close(found.double(), expected(weights, x, logits, to), atol=2e-5, rtol=0.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["sigmoid, biased", "grouped, biased"])
def test_no_number_is_above_none(name, backend):
    """A token whose logits are no numbers has as many experts as any, and the others do not notice."""
    weights = weights_of(*CASES[name], None, False)
    experts = experts_of(backend, weights)
    device = DEVICE if backend == "triton" else torch.device("cpu")
    x, logits = draw(TOKENS, SIZES.hidden, seed=3).to(device), logits_of().to(device)
    wanted = experts(x, logits, None, torch.zeros_like(x), torch.clone)[0]
    broken = logits.clone()
    broken[4] = torch.nan
    found = experts(x, broken, None, torch.zeros_like(x), torch.clone)[0]
    assert found[4].isnan().all()
    others = [token for token in range(TOKENS) if token != 4]
    assert torch.equal(found[others], wanted[others])
