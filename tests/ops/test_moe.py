"""Mixture of experts: against every expert multiplied for every token, and the same bits in any company."""

import pytest
import torch
import torch.nn.functional as F

from headlong.ops.elementwise import silu
from headlong.ops.moe.reference import moe, route
from headlong.ops.moe.routing import Routing
from headlong.ops.registry import choose_backend

CPU = torch.device("cpu")
CASES = [
    (1, 1, 5, 7),
    (6, 2, 36, 24),
    (5, 5, 20, 11),
    (17, 3, 48, 9),
]  # experts, active, hidden, intermediate
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.1}


def draw(*shape, seed, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def weights_of(case, dtype):
    experts, _, hidden, inner = case
    gate_up = draw(experts, 2 * inner, hidden, seed=0) / hidden**0.5
    down = draw(experts, hidden, inner, seed=1) / inner**0.5
    return gate_up.to(dtype), down.to(dtype)


def tokens_of(case, dtype):
    """Tokens and router logits, in the dtype that flows between layers."""
    dtype = torch.promote_types(dtype, torch.float32)
    return draw(70, case[2], seed=2, dtype=dtype), draw(70, case[0], seed=3, dtype=dtype)


def expert(ops, gate_up, down):
    first, last = ops.linear(gate_up), ops.linear(down)

    def run(x):
        gate, up = first(x).chunk(2, dim=-1)
        return last(silu(gate) * up)

    return run


def layer(case, dtype, normalise=True):
    ops = choose_backend(dtype, CPU)
    experts = [expert(ops, g, d) for g, d in zip(*weights_of(case, dtype), strict=True)]

    def run(x, logits):
        chosen, share = route(logits, Routing(case[0], case[1], normalise))
        return moe(x, chosen, share, experts)

    return run


@pytest.mark.parametrize("normalise", [True, False])
def test_route(normalise):
    logits = draw(50, 9, seed=4)
    experts, shares = route(logits, Routing(9, 3, normalise))
    probabilities = logits.exp() / logits.exp().sum(-1, keepdim=True)
    for token in range(50):
        best = sorted(range(9), key=lambda e: -float(probabilities[token, e]))[:3]
        assert experts[token].tolist() == best
        expected = probabilities[token, best]
        torch.testing.assert_close(shares[token], expected / expected.sum() if normalise else expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_experts_for_all_tokens(case, normalise, dtype):
    x, logits = tokens_of(case, dtype)
    gate_up, down = (w.double() for w in weights_of(case, dtype))
    share = torch.softmax(logits.double(), -1)
    share = share * (share >= share.topk(case[1]).values[:, -1:])
    share = share / share.sum(-1, keepdim=True) if normalise else share
    gate, up = torch.einsum("nd,eid->nei", x.double(), gate_up).chunk(2, dim=-1)
    every = torch.einsum("nei,edi->ned", F.silu(gate) * up, down)
    expected = (every * share[..., None]).sum(1)
    found = layer(case, dtype, normalise)(x, logits)
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[dtype], rtol=0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_do_not_depend_on_the_other_tokens(case, dtype):
    run = layer(case, dtype)
    x, logits = tokens_of(case, dtype)
    alone = torch.cat([run(x[i : i + 1], logits[i : i + 1]) for i in range(70)])
    for count in (1, 2, 3, 4, 5, 8, 9, 16, 21, 33, 64, 69, 70):
        assert torch.equal(run(x[:count], logits[:count]), alone[:count])
        assert torch.equal(run(x[70 - count :], logits[70 - count :]), alone[70 - count :])
    order = torch.randperm(70, generator=torch.Generator().manual_seed(5))
    assert torch.equal(run(x[order], logits[order]), alone[order])
    same = logits[:1].expand(70, -1).contiguous()  # everybody to the same experts
    assert torch.equal(run(x, same), torch.cat([run(x[i : i + 1], same[:1]) for i in range(70)]))
