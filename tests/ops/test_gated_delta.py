"""The gated delta rule: against the formula, and bit for bit the same in any company."""

import pytest
import torch

from headlong.ops.gated_delta.reference import gated_delta, prepare
from support import delta_states
from support.ragged import gather, plan_rows, scatter, schedule, token_by_token

CPU = torch.device("cpu")
MAX_DRAFTS = 8
SIZES = [(1, 4, 4), (3, 5, 7), (4, 16, 16), (2, 33, 20), (5, 8, 64)]  # heads, key size, value size
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def random_rows(lengths, sizes, dtype, seed=0):
    """Per input, one sequence for each row: q, k, v, decay, beta."""
    heads, keys, values = sizes
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return [torch.randn(n, *shape, generator=generator, dtype=torch.float64) for n in lengths]

    q, k, v = draw(heads, keys), draw(heads, keys), draw(heads, values)
    k = [x / x.norm(dim=-1, keepdim=True) for x in k]
    decay, beta = ([x.sigmoid() for x in draw(heads)] for _ in range(2))
    return [[x.to(dtype) for x in rows] for rows in (q, k, v, decay, beta)]


def run(steps, inputs, sizes):
    """Feeds all steps through a state of NaN; outputs per row, and the state."""
    num_rows, dtype = len(inputs[0]), inputs[0][0].dtype
    state = delta_states.zeros(num_rows + 1, *sizes, MAX_DRAFTS, dtype=dtype, device=CPU)
    for tensor in vars(state).values():
        tensor.fill_(torch.nan)
    state.committed_SHDE[1:] = 0.0
    results = [torch.full_like(rows, torch.nan) for rows in inputs[2]]
    generator = torch.Generator().manual_seed(0)
    for step in steps:
        flat = [gather(step, rows, generator) for rows in inputs]
        scatter(step, gated_delta(*flat, state, prepare(plan_rows(step), CPU)), results)
    return results, state


def formula(q, k, v, decay, beta):
    """One row, in float64, head by head and token by token."""
    q, k, v, decay, beta = (x.double() for x in (q, k, v, decay, beta))
    out = torch.empty_like(v)
    for head in range(q.shape[1]):
        memory = torch.zeros(k.shape[-1], v.shape[-1], dtype=torch.float64)
        for t in range(len(q)):
            memory = decay[t, head] * memory
            error = beta[t, head] * (v[t, head] - memory.T @ k[t, head])
            memory = memory + torch.outer(k[t, head], error)
            out[t, head] = memory.T @ q[t, head]
    return out


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_formula(sizes, dtype):
    lengths = [23, 1, 40, 9]
    inputs = random_rows(lengths, sizes, dtype)
    results, _ = run(schedule(lengths, seed=1), inputs, sizes)
    for row, result in enumerate(results):
        expected = formula(*(rows[row] for rows in inputs)).to(dtype)
        torch.testing.assert_close(result, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_bits_do_not_depend_on_company_chunks_or_drafts(sizes, dtype):
    lengths = [31, 2, 26, 13, 40]
    inputs = random_rows(lengths, sizes, dtype)
    alone = [run(token_by_token(row, n), inputs, sizes)[0][row] for row, n in enumerate(lengths)]
    for seed in range(4):
        steps = list(schedule(lengths, seed))
        results, state = run(steps, inputs, sizes)
        assert all(torch.equal(a, b) for a, b in zip(results, alone, strict=True))
        assert state.committed_SHDE[0].isnan().all(), "slot 0 is touched by padding alone"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 17, 40, 70])
def test_bits_do_not_depend_on_the_number_of_rows(num_rows, dtype):
    sizes, lengths = (3, 12, 20), [4] * 70
    inputs = random_rows(lengths, sizes, dtype)
    few = [rows[:num_rows] for rows in inputs]
    expected = [
        run(token_by_token(0, 4), [[rows[i]] for rows in inputs], sizes)[0][0] for i in (0, num_rows - 1)
    ]
    results, _ = run(schedule(lengths[:num_rows], seed=num_rows, max_chunk=2), few, sizes)
    assert torch.equal(results[0], expected[0]) and torch.equal(results[-1], expected[1])


def test_committed_memory_is_that_of_the_certain_tokens():
    """Drafts leave the memory alone; what was accepted enters with the next step, whatever it drafts."""
    sizes, lengths = (2, 6, 5), [12]
    inputs = random_rows(lengths, sizes, torch.float32)
    steps = list(schedule(lengths, seed=3, max_chunk=3))
    for upto in range(1, len(steps) + 1):
        last = steps[upto - 1][0]
        _, state = run(steps[:upto], inputs, sizes)
        _, plain = run(token_by_token(0, last.start + last.certain), inputs, sizes)
        assert torch.equal(state.committed_SHDE[1], plain.committed_SHDE[1])
