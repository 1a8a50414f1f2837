"""Paged attention: against torch's own in float64, and bit for bit the same in any company."""

import random

import pytest
import torch
import torch.nn.functional as F

from headlong.ops.paged_attention.reference import HEAD_ALIGN, attend, prepare, write
from support.ragged import gather, plan_rows, scatter, schedule, token_by_token

SHAPES = [(1, 1, 4), (3, 1, 20), (5, 5, 12), (4, 2, 16), (6, 3, 34), (8, 1, 64)]  # heads, KV heads, head size
PAGE = 16
DTYPES = [(torch.float32, torch.float32), (torch.float64, torch.float64), (torch.float32, torch.bfloat16)]
"""Of queries and of the cache."""


def random_rows(lengths, shape, dtypes, seed=0):
    """q, k and v of each row; queries come scaled, keys and values are such as the cache can hold."""
    heads, kv, dim = shape
    generator = torch.Generator().manual_seed(seed)

    def draw(count):
        return [torch.randn(n, count, dim, generator=generator, dtype=torch.float64) for n in lengths]

    q = [(x * dim**-0.5).to(dtypes[0]) for x in draw(heads)]
    return q, *([x.to(dtypes[1]).to(dtypes[0]) for x in draw(kv)] for _ in range(2))


def run(steps, rows, shape, dtypes, page_size=PAGE, seed=0):
    """Feeds all steps over pages of NaN, handed out in random order; what a page held before is NaN too."""
    _, kv, dim = shape
    per_row = [-(-(len(q) + 8) // page_size) for q in rows[0]]
    numbers = list(range(1, sum(per_row) + 1))
    random.Random(seed).shuffle(numbers)
    tables = [[numbers.pop() for _ in range(count)] for count in per_row]
    width = dim + -dim % HEAD_ALIGN
    keys, values = (
        torch.full((sum(per_row) + 1, kv, page_size, width), torch.nan, dtype=dtypes[1]) for _ in range(2)
    )
    results = [torch.full_like(q, torch.nan) for q in rows[0]]
    generator = torch.Generator().manual_seed(3)
    for step in steps:
        pages = [tables[share.row] for share in step]
        most = max(map(len, pages))
        table = torch.tensor([[*row, *([0] * (most - len(row)))] for row in pages])
        made = prepare(plan_rows(step), table, page_size)
        q, k, v = (gather(step, sequences, generator) for sequences in rows)
        write(keys, k, made)
        write(values, v, made)
        scatter(step, attend(q, keys, values, made), results)
    return results


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("page_size", [16, 20, 64])
def test_torch(shape, dtypes, page_size):
    lengths = [1, 50, 16, 17, 33]
    rows = random_rows(lengths, shape, dtypes)
    results = run(schedule(lengths, seed=0), rows, shape, dtypes, page_size)
    tolerance = 1e-12 if dtypes[0] is torch.float64 else 2e-6
    for q, k, v, result in zip(*rows, results, strict=True):
        q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=True)
        torch.testing.assert_close(
            result, expected.transpose(0, 1).to(result.dtype), atol=tolerance, rtol=tolerance
        )


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_do_not_depend_on_company_chunks_or_drafts(shape, dtypes):
    lengths = [40, 3, 70, 17]
    rows = random_rows(lengths, shape, dtypes)
    alone = [run(token_by_token(row, n), rows, shape, dtypes)[row] for row, n in enumerate(lengths)]
    for seed in range(4):
        results = run(schedule(lengths, seed), rows, shape, dtypes, seed=seed)
        assert all(torch.equal(a, b) for a, b in zip(results, alone, strict=True))


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 9, 32, 70])
def test_bits_do_not_depend_on_the_number_of_rows(num_rows, dtypes):
    lengths, shape = [3 + i % 30 for i in range(70)], (3, 1, 20)
    rows = random_rows(lengths, shape, dtypes)
    results = run(schedule(lengths[:num_rows], num_rows), [r[:num_rows] for r in rows], shape, dtypes)
    for at in {0, num_rows // 2, num_rows - 1}:
        alone = run(token_by_token(0, lengths[at]), [[r[at]] for r in rows], shape, dtypes)[0]
        assert torch.equal(results[at], alone)


def test_long_rows_attended_in_several_groups(monkeypatch):
    """Where the gathered pages would be too large they are taken in parts; the bits stay."""
    shape, dtypes, lengths = (4, 2, 16), DTYPES[0], [90, 41]
    rows = random_rows(lengths, shape, dtypes)
    whole = run(schedule(lengths, seed=5, max_chunk=60), rows, shape, dtypes)
    monkeypatch.setattr("headlong.ops.paged_attention.reference.MAX_GATHER", 100)
    parts = run(schedule(lengths, seed=5, max_chunk=60), rows, shape, dtypes)
    assert all(torch.equal(a, b) for a, b in zip(parts, whole, strict=True))


def test_large_scores_do_not_overflow():
    shape, dtypes = (2, 1, 8), DTYPES[0]
    q, k, v = random_rows([40], shape, dtypes)
    result = run(schedule([40], seed=0), ([q[0] * 1e4], k, v), shape, dtypes)[0]
    assert result.isfinite().all()
    assert (result.abs() <= v[0].abs().amax() + 1e-6).all()
