"""The causal convolution: against torch's own, and bit for bit the same in any company."""

import pytest
import torch
import torch.nn.functional as F

from headlong.ops.causal_conv.reference import causal_conv, prepare
from support.ragged import gather, plan_rows, scatter, schedule, token_by_token

CPU = torch.device("cpu")
MAX_DRAFTS = 8
SHAPES = [(2, 1), (2, 16), (3, 5), (3, 48), (4, 7), (4, 37), (4, 130), (7, 11)]  # kernel, channels
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def random_rows(lengths, channels, dtype):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, channels, generator=generator, dtype=torch.float64).to(dtype) for n in lengths]


def random_weight(kernel, channels, dtype):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(kernel, channels, generator=generator, dtype=torch.float64).to(dtype)


def run(steps, rows, weight):
    """Feeds all steps through windows of NaN, but for the clean past of each row."""
    kernel, channels = weight.shape
    window = kernel - 1 + MAX_DRAFTS
    windows = torch.full((len(rows) + 1, window, channels), torch.nan, dtype=weight.dtype)
    windows[1:, : kernel - 1] = 0.0
    results = [torch.full_like(row, torch.nan) for row in rows]
    generator = torch.Generator().manual_seed(2)
    for step in steps:
        flat = gather(step, rows, generator)
        scatter(
            step, causal_conv(flat, windows, weight, prepare(plan_rows(step), kernel, window, CPU)), results
        )
    assert windows[0].isnan().all(), "slot 0 belongs to nobody"
    return results


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("kernel", "channels"), SHAPES)
def test_torch(kernel, channels, dtype):
    lengths = [1, 30, 2, 17]
    rows, weight = random_rows(lengths, channels, dtype), random_weight(kernel, channels, dtype)
    for row, result in zip(rows, run(schedule(lengths, seed=0), rows, weight), strict=True):
        line = F.pad(row.double().T[None], (kernel - 1, 0))
        expected = F.silu(F.conv1d(line, weight.double().T[:, None], groups=channels))[0].T.to(dtype)
        torch.testing.assert_close(result, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("kernel", "channels"), SHAPES)
def test_bits_do_not_depend_on_company_chunks_or_drafts(kernel, channels, dtype):
    lengths = [21, 3, 40, 12, 1]
    rows, weight = random_rows(lengths, channels, dtype), random_weight(kernel, channels, dtype)
    alone = [run(token_by_token(row, n), rows, weight)[row] for row, n in enumerate(lengths)]
    for seed in range(4):
        results = run(schedule(lengths, seed), rows, weight)
        assert all(torch.equal(a, b) for a, b in zip(results, alone, strict=True))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 5, 16, 33, 70])
def test_bits_do_not_depend_on_the_number_of_rows(num_rows, dtype):
    lengths, weight = [5] * 70, random_weight(4, 21, dtype)
    rows = random_rows(lengths, 21, dtype)
    results = run(schedule(lengths[:num_rows], seed=num_rows, max_chunk=2), rows[:num_rows], weight)
    for at in (0, num_rows - 1):
        assert torch.equal(results[at], run(token_by_token(0, 5), [rows[at]], weight)[0])
