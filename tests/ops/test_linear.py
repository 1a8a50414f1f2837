"""Linears: close to a float64 product, and a row's bits never depend on the other rows."""

import pytest
import torch

from headlong.ops.linear.invariance import RowLinear, find_tile
from headlong.ops.linear.reference import ReferenceLinear
from headlong.ops.ordered_sum import sum_in_order
from headlong.ops.reference_backend import LINEARS
from headlong.ops.registry import choose_backend

CPU = torch.device("cpu")
SHAPES = [(1, 48), (3, 1), (7, 5), (36, 48), (97, 36), (64, 64), (130, 96), (31, 257), (48, 1100), (600, 70)]
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def draw(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(weight):
    """Seventy rows in the dtype that flows between layers: float32 at least."""
    return draw(70, weight.shape[1], dtype=torch.promote_types(weight.dtype, torch.float32), seed=1)


def serving():
    """Every linear with every dtype this machine runs it in."""
    for dtype in DTYPES:
        yield RowLinear, dtype
        yield from ((kind, dtype) for kind in LINEARS if kind.supports(dtype, CPU) is None)


def make(kind, weight):
    """The linear of a kind, with the tile it is proven at; row by row if there is none, as the registry does."""
    if kind is RowLinear:
        return RowLinear(weight)
    outs, ins = weight.shape
    tile = find_tile(kind, outs, ins, weight.dtype)
    return RowLinear(weight) if tile is None else kind(weight, tile)


def assert_invariant(linear, x):
    alone = torch.cat([linear(x[i : i + 1]) for i in range(len(x))])
    for count in range(1, len(x) + 1):
        assert torch.equal(linear(x[:count]), alone[:count]), f"{linear.name}: {count} rows"
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(2))
    assert torch.equal(linear(x[order]), alone[order]), f"{linear.name}: in another order"
    for first, last in ((1, 2), (3, 8), (29, 61), (69, 70)):
        assert torch.equal(linear(x[first:last]), alone[first:last]), f"{linear.name}: rows {first} to {last}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_chosen_linear(shape, dtype):
    weight = draw(*shape, dtype=dtype)
    linear, x = choose_backend(dtype, CPU).linear(weight), inputs(weight)
    assert (linear.out_features, linear.in_features) == shape
    found = linear(x)
    assert found.dtype == x.dtype
    expected = x.to(dtype).double() @ weight.double().T
    tolerance = {torch.float32: 2e-6, torch.float64: 1e-14, torch.bfloat16: 8e-3}[dtype] * shape[1] ** 0.5
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
    assert_invariant(linear, x)


@pytest.mark.parametrize("shape", SHAPES[3:8], ids=str)
@pytest.mark.parametrize(("kind", "dtype"), list(serving()), ids=str)
def test_every_kind(kind, shape, dtype):
    weight = draw(*shape, dtype=dtype)
    assert_invariant(make(kind, weight), inputs(weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_poison_in_another_row_stays_there(dtype):
    weight = draw(40, 36, dtype=dtype)
    linear, x = choose_backend(dtype, CPU).linear(weight), inputs(weight)
    expected = linear(x)
    x[5] = torch.nan
    found = linear(x)
    assert found[5].isnan().all()
    others = [i for i in range(70) if i != 5]
    assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("shape", [(1, 48), (97, 36), (130, 96), (31, 257)], ids=str)
@pytest.mark.parametrize(("kind", "dtype"), list(serving()), ids=str)
def test_where_rows_lie_in_memory_does_not_matter(kind, shape, dtype):
    weight = draw(*shape, dtype=dtype)
    linear, x = make(kind, weight), inputs(weight)
    expected = linear(x)
    for offset in (1, 2, 3, 5, 8):
        moved = torch.empty(x.numel() + offset, dtype=x.dtype)[offset:].view(x.shape).copy_(x)
        assert torch.equal(linear(moved), expected)
        assert torch.equal(linear(moved[:5]), expected[:5])


class Unsteady(ReferenceLinear):
    """Adds up in float32 or wider, the other way round where there are many rows."""

    def __call__(self, x_ND):
        wide = torch.promote_types(x_ND.dtype, torch.float32)
        terms = x_ND.to(wide)[:, None] * self.weight.to(wide)[None, :, : x_ND.shape[1]]
        return sum_in_order(terms.flip(-1) if len(x_ND) > 64 else terms, -1).to(x_ND.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 16), (16, 24), (20, 33)], ids=str)
def test_another_order_of_a_sum_is_never_taken_for_the_same(shape, dtype):
    """16-bit results round nearly all of it away, but not all."""
    outs, ins = shape
    assert find_tile(Unsteady, outs, ins, dtype) is None


def test_a_linear_that_is_never_invariant_is_refused(monkeypatch, caplog):
    """One that adds the number of rows: nobody may choose it, and the log says why."""

    class Crooked(ReferenceLinear):
        name = "crooked"

        def __call__(self, x_ND):
            return super().__call__(x_ND) + len(x_ND)

    monkeypatch.setattr("headlong.ops.native.library", lambda: None)
    monkeypatch.setattr("headlong.ops.reference_backend.LINEARS", (Crooked,))
    with caplog.at_level("INFO"):
        linear = choose_backend(torch.float32, CPU).linear(draw(8, 16, dtype=torch.float32))
    assert isinstance(linear, RowLinear)
    assert "not crooked: a row's bits depend on its neighbours" in caplog.text
