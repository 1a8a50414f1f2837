"""Both ends of a model in native code: rows of an embedding of every kind, and the best token of each row of logits."""

import pytest
import torch
from test_native_linear import CASES, KINDS, dense, draw, linear, source, weight_of

from headlong.ops import native
from headlong.ops.argmax import native as native_argmax
from headlong.ops.argmax import reference as reference_argmax
from headlong.ops.embedding.native import NativeEmbedding
from headlong.ops.embedding.reference import ReferenceEmbedding
from headlong.ops.linear import native_source as kinds
from headlong.ops.linear.native import NativeLinear
from headlong.ops.linear.native_source import Source
from headlong.ops.registry import choose_backend

pytestmark = pytest.mark.skipif(native.library() is None, reason="native kernels are not built or turned off")
SIZES = (1, 2, 63, 64, 65, 127, 128, 1000, 4097)
EXACT = (kinds.F32, kinds.F16, kinds.BF16, kinds.BF16_ROUNDED, kinds.I8)
"""Kinds of which nothing is rounded twice."""


@pytest.fixture(params=[1, 2, 3], ids="{} threads".format)
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_rows_are_those_of_the_weight(kind, shape):
    expected = dense(weight_of(kind, shape))
    tokens = torch.randint(shape[0], (29,), generator=torch.Generator().manual_seed(1))
    tokens[:2] = torch.tensor([shape[0] - 1, 0])
    found = NativeEmbedding(linear(kind, shape))(tokens)
    assert found.dtype == torch.float32
    if KINDS[kind][2] in EXACT:
        assert torch.equal(found, expected[tokens])
    else:
        torch.testing.assert_close(found, expected[tokens], rtol=0.0, atol=2e-7 * expected.abs().max().item())


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_embedded_is_what_is_multiplied(kind):
    """A tied lm_head reads the same memory."""
    shape = (65, KINDS[kind][1][-1])
    embedding = NativeEmbedding(linear(kind, shape))
    rows = embedding(torch.arange(65))
    few, many = (
        torch.cat([embedding.linear(part) for part in torch.eye(shape[1]).split(count)]).T
        for count in (4, 40)
    )
    assert torch.equal(few, many)
    torch.testing.assert_close(few, rows, rtol=0.0, atol=2e-7 * rows.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_narrow_float(dtype):
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    weight = every[every.isfinite()].view(-1, 256)
    embedding = NativeEmbedding(NativeLinear([Source(weight, kinds.PanelLayout(kinds.FLOATS[dtype], 256))]))
    assert torch.equal(embedding(torch.arange(len(weight))), weight.float())


def test_tokens_that_lie_apart_and_none():
    embedding, expected = NativeEmbedding(linear("Q4_0", (65, 96))), dense(source("Q4_0", (65, 96)).weight)
    torch.testing.assert_close(embedding(torch.arange(65)[::3]), expected[::3], rtol=1e-6, atol=1e-7)
    assert embedding(torch.arange(0)).shape == (0, 96)


def test_who_serves_an_embedding():
    """Whoever it is, the registry finds them by the weight alone."""
    tokens = torch.tensor([2, 0, 2])
    for dtype, weight, kind in (
        (torch.float32, draw(5, 32), NativeEmbedding),
        (torch.float32, draw(5, 31).bfloat16(), NativeEmbedding),
        (torch.float64, draw(5, 32), ReferenceEmbedding),
    ):
        embedding = choose_backend(dtype, torch.device("cpu")).embedding(weight)
        assert isinstance(embedding, kind)
        assert torch.equal(embedding(tokens), weight[tokens].float())


def found(logits):
    """By the kernel, which must agree with itself on rows that begin at odd places."""
    tokens = native_argmax.argmax(logits)
    moved = torch.empty(logits.numel() + 3)[3:].view(logits.shape).copy_(logits)
    assert torch.equal(native_argmax.argmax(moved), tokens)
    return tokens.tolist()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rows", [1, 3, 8, 70])
@pytest.mark.parametrize("size", SIZES)
def test_the_best(size, rows):
    logits = draw(rows, size, seed=rows)
    low = -1e30 * logits.abs()
    assert found(logits) == reference_argmax.argmax(logits).tolist()
    assert found(low) == reference_argmax.argmax(low).tolist()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("size", SIZES)
def test_of_equal_ones_the_first(size):
    assert found(torch.zeros(9, size)) == [0] * 9
    assert found(torch.full((9, size), -torch.inf)) == [0] * 9
    logits = torch.full((size, size), -3.0) if size < 200 else torch.full((9, size), -3.0)
    for row, line in enumerate(logits):
        line[row:] = 2.0
    assert found(logits) == list(range(len(logits)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("special", [torch.inf, torch.nan, -torch.nan])
def test_what_is_infinite_or_no_number_wins(special, size):
    """Wherever it stands, and the first of several; a row beside it is as ever."""
    places = range(size) if size < 200 else (0, 1, 63, 64, size // 2, size - 2, size - 1)
    logits = draw(len(places) + 1, size, seed=size)
    for row, place in enumerate(places):
        logits[row, place] = special
        logits[row, (place + size) // 2 + 1 :] = special
    assert found(logits) == [*places, reference_argmax.argmax(logits[-1:]).item()]


def test_no_number_wins_over_the_infinite():
    logits = draw(2, 130)
    logits[:, 3] = torch.inf
    logits[0, 100] = logits[0, 129] = torch.nan
    assert found(logits) == [100, 3]
    assert native_argmax.argmax(torch.empty(0, 130)).shape == (0,)
