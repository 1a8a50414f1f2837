"""Norms in two halves: whoever makes a row writes the first, products that take it see to the second. Against the norm
in one, and bit for bit the same for a token in any company."""

import pytest
import torch
from test_triton_attention import true_bfloat16  # noqa: F401
from test_triton_linear import DEVICE, draw, linear, split_up, tokens, weight_of
from torch.nn.functional import silu

from headlong.ops.linear.triton import TritonLinear
from headlong.ops.linear.triton_split_k import BLOCK, epilogue_kernel
from headlong.ops.norm.normed import PartialNorm
from headlong.ops.norm.reference import RmsNorm
from headlong.ops.norm.triton import PART, TritonRmsNorm, partial_norm_args
from headlong.ops.registry import choose_backend
from headlong.ops.silu_mul.triton import silu_mul

SIZES = [320, 2 * BLOCK, 2048]
"""Of hidden states: more than one block each, the first not in whole blocks."""


def norm_of(size: int, *, halved: bool = True, dtype: torch.dtype = torch.bfloat16) -> TritonRmsNorm:
    norm = RmsNorm(1.0 + 0.1 * draw(size, seed=5).to(DEVICE), 1e-6)
    return TritonRmsNorm(norm, dtype, lambda: halved)


def producer(size: int) -> TritonLinear:
    """Gives hidden states, in pieces."""
    made = TritonLinear([weight_of("bfloat16", (size, 320))])
    return made if made.weights[0].is_split else split_up(made)


@pytest.mark.parametrize("size", SIZES)
def test_the_first_half(size):
    x, to, norm = tokens(3, 320), draw(3, size, seed=1).to(DEVICE), norm_of(size)
    found, half = producer(size).add_to(x, to, norm)
    assert torch.equal(found, producer(size)(x, to))
    assert isinstance(half, PartialNorm) and half.x_ND.dtype == torch.bfloat16
    assert torch.equal(half.x_ND, (found * norm.weight).bfloat16())
    parts = found.double().square().split(PART, 1)
    sums = torch.stack([part.sum(1) for part in parts], 1)
    torch.testing.assert_close(half.squares_NP.double(), sums, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "pieces"])
@pytest.mark.parametrize("kind", ["bfloat16", "fp8_block", "int4_asym"])
def test_products_see_to_the_second(kind, cut):
    """What is rounded differs: x · weight here, what is divided as well there."""
    norm, made = norm_of(320), linear(kind, (70, 320), cut=cut)
    hidden, half = producer(320).add_to(tokens(3, 320), draw(3, 320).to(DEVICE), norm)
    wanted = made(norm(hidden))
    found = made(half)
    assert (found - wanted).abs().max() < 2**-6 * wanted.abs().max()
    torch.testing.assert_close(added(made, half), found, rtol=1e-6, atol=1e-6)
    gate, up = found.chunk(2, 1)
    torch.testing.assert_close(
        made.gated(half, silu_mul, torch.float32), silu(gate) * up, rtol=1e-5, atol=1e-5
    )


def added(made: TritonLinear, half: PartialNorm) -> torch.Tensor:
    """Partial sums that somebody else adds."""
    sums = made.partial_sums(half)
    out = torch.empty(len(half.x_ND), made.out_features, device=DEVICE)
    epilogue_kernel[-(-made.out_features // BLOCK), len(out)](
        sums.partials_PNO,
        None,
        None,
        None,
        out,
        out.shape[1],
        *partial_norm_args(None, None),
        **sums.args,
        BLOCK=BLOCK,
    )
    return out


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "pieces"])
def test_company_does_not_matter(cut):
    make, take, norm = producer(320), linear("bfloat16", (70, 320), cut=cut), norm_of(320)
    x, to = tokens(70, 320), draw(70, 320, seed=1).to(DEVICE)
    hidden, half = make.add_to(x, to, norm)
    whole, gated = take(half), take.gated(half, silu_mul, torch.float32)
    for part in (slice(0, 1), slice(3, 5), slice(17, 34)):
        alone, own = make.add_to(x[part], to[part], norm)
        assert torch.equal(alone, hidden[part]) and torch.equal(own.squares_NP, half.squares_NP[part])
        assert torch.equal(take(own), whole[part]) and torch.equal(
            take.gated(own, silu_mul, torch.float32), gated[part]
        )


def test_launches_of_few_tokens(monkeypatch):
    make, take, norm = producer(320), linear("bfloat16", (70, 320), cut=True), norm_of(320)
    x, to = tokens(7, 320), draw(7, 320, seed=1).to(DEVICE)
    hidden, half = make.add_to(x, to, norm)
    wanted = take(half)
    monkeypatch.setattr(make, "_tokens_at_once", lambda _: 3)
    monkeypatch.setattr(take, "_tokens_at_once", lambda _: 2)
    found, other = make.add_to(x, to, norm)
    assert torch.equal(found, hidden) and torch.equal(take(other), wanted)


@pytest.mark.parametrize(
    "norm",
    [norm_of(320, halved=False), TritonRmsNorm(RmsNorm(torch.ones(320), 1e-6))],
    ids=["others take it", "not inside a layer"],
)
def test_norms_that_stay_whole(norm):
    norm.weight = norm.weight.to(DEVICE)
    x, to, make = tokens(2, 320), draw(2, 320).to(DEVICE), producer(320)
    hidden, normed = make.add_to(x, to, norm)
    assert torch.equal(hidden, make(x, to)) and torch.equal(normed, norm(hidden))


def test_a_gemm_that_is_not_split_leaves_the_norm_to_its_kernel():
    make, norm = TritonLinear([weight_of("bfloat16", (70, 96))]), norm_of(70)
    assert not make.weights[0].is_split
    hidden, normed = make.add_to(tokens(2, 96), draw(2, 70).to(DEVICE), norm)
    assert torch.equal(normed, norm(hidden))


def test_what_is_no_number_stays_in_its_row():
    make, take, norm = producer(320), linear("fp8_block", (65, 320), cut=True), norm_of(320)
    to = draw(3, 320).to(DEVICE)
    clean = take(make.add_to(tokens(3, 320), to, norm)[1])
    to[1, 5] = torch.nan
    found = take(make.add_to(tokens(3, 320), to, norm)[1])
    assert found[1].isnan().all() and torch.equal(found[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize(
    ("weights", "halved"),
    [(["bfloat16", "fp8_block"], True), (["bfloat16", "float16"], False), (["bfloat16", "float64"], False)],
    ids=["known to all", "too large for one", "foreign to one"],
)
def test_who_may_leave_a_half_to_products(monkeypatch, weights, halved):
    """All products of an engine must be able to take it: one that multiplies in float16 would overflow."""
    monkeypatch.setenv("HEADLONG_TRITON", "1" if DEVICE == "cuda" else "interpret")
    ops = choose_backend(torch.bfloat16, torch.device(DEVICE))
    norm = ops.norm(torch.ones(320, device=DEVICE), 1e-6, inside=True)
    assert isinstance(norm, TritonRmsNorm) and norm.may_be_partial
    for kind in weights:
        ops.linear(draw(65, 320).double().to(DEVICE) if kind == "float64" else weight_of(kind, (65, 320)))
    assert norm.may_be_partial == halved
    assert not ops.norm(torch.ones(320, device=DEVICE), 1e-6).may_be_partial
