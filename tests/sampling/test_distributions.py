"""Each way of verifying gives the target's own law, seen on a vocabulary where every sequence can be counted."""

import numpy as np
import pytest
import torch
from sampling_tables import entries_of, request, table_of
from toy_pair import ToyPair, p_value

from headlong.params import SamplingParams
from headlong.sampling import noise
from headlong.sampling.entries import Entry
from headlong.sampling.sampler import Sampler
from headlong.speculate import verify as verify_module

MIN_P = 1e-3
SURELY_WRONG = 1e-9
ROWS = 5000


def params(verify: str, **options) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0, "verify": verify} | options))


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_coupled(depth):
    pair = ToyPair(vocab=5, distance=1.0, seed=1)
    counts, _ = pair.generate(params("coupled"), depth, length=3, rows=ROWS)
    assert p_value(counts, pair.law(3)) > MIN_P


def test_coupled_tokens_do_not_depend_on_the_drafts():
    pair, other = ToyPair(vocab=6, distance=0.5, seed=4), ToyPair(vocab=6, distance=3.0, seed=4)
    plain, _ = pair.generate(params("coupled"), 0, length=3, rows=500)
    for depth in (1, 2, 4):
        for drafter in (pair, other):
            assert np.array_equal(drafter.generate(params("coupled"), depth, length=3, rows=500)[0], plain)


@pytest.mark.parametrize("verify", ["ratio", "block"])
@pytest.mark.parametrize(("depth", "vocab"), [(1, 8), (2, 4), (3, 4)])
def test_sampled_verification(verify, depth, vocab):
    """Step after step, until three tokens stand: what one step leaves behind must not colour the next."""
    pair = ToyPair(vocab, distance=1.5, seed=1)
    length = 2 if vocab == 8 else 3
    counts, _ = pair.generate(params(verify), depth, length, rows=ROWS)
    assert p_value(counts, pair.law(length)) > MIN_P


@pytest.mark.slow
@pytest.mark.parametrize("verify", ["coupled", "ratio", "block"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_many_rows(verify, depth):
    pair = ToyPair(vocab=3, distance=1.0, seed=1)
    counts, _ = pair.generate(params(verify), depth, length=4, rows=200_000)
    assert p_value(counts, pair.law(4)) > MIN_P


def test_temperature_reaches_p_and_q():
    pair = ToyPair(vocab=4, distance=1.0, seed=8)
    counts, _ = pair.generate(params("ratio", temperature=1.6), 2, length=2, rows=ROWS)
    assert p_value(counts, pair.law(2, temperature=1.6)) > MIN_P
    assert p_value(counts, pair.law(2)) < MIN_P


def always_accept(p, q, drafts, units, depth):  # noqa: ARG001
    return depth, p[:, -1]


def no_residual(p, q, drafts, units, depth, right=verify_module._judge_ratio):
    """The right test, but a rejected token is replaced from p instead of (p − q)+."""
    count, _ = right(p, q, drafts, units, depth)
    return count, p[torch.arange(len(count)), count]


@pytest.mark.parametrize("wrong", [always_accept, no_residual])
def test_a_wrong_rule_is_noticed(monkeypatch, wrong):
    pair = ToyPair(vocab=4, distance=1.0, seed=2)
    monkeypatch.setattr(verify_module, "_judge_ratio", wrong)
    counts, _ = pair.generate(params("ratio"), 2, length=3, rows=ROWS)
    assert p_value(counts, pair.law(3)) < SURELY_WRONG


def test_more_is_accepted_from_coupled_to_ratio_to_block():
    """With slack for chance: the accepted length of a row has a standard deviation of at most depth / 2."""
    depth, rows = 3, 3000
    slack = 2 * (depth / 2) / rows**0.5
    pair = ToyPair(vocab=4, distance=1.0, seed=11)
    coupled, ratio, block = (
        pair.generate(params(verify), depth, 1, rows)[1] for verify in ("coupled", "ratio", "block")
    )
    assert coupled < ratio + slack and ratio < block + slack
    assert coupled < block


@pytest.mark.parametrize("verify", ["coupled", "ratio", "block"])
def test_a_perfect_drafter_is_always_right(verify):
    pair = ToyPair(vocab=7, distance=0.0, seed=3)
    for depth in (1, 3):
        _, accepted = pair.generate(params(verify), depth, length=1, rows=200)
        assert accepted == depth


@pytest.mark.parametrize("verify", ["coupled", "ratio", "block"])
def test_greedy_rows_ignore_the_rule(verify):
    pair = ToyPair(vocab=6, distance=1.0, seed=6)
    counts, _ = pair.generate(params(verify, temperature=0.0), 3, length=3, rows=30)
    history, code = [0], 0
    for _ in range(3):
        history.append(int(pair.look_up(pair.target, [history])[0].argmax()))
        code = code * pair.vocab + history[-1]
    assert counts[code] == 30


def test_a_position_drafted_again_sees_new_numbers():
    """The block rule decides on a draft by what later drafts drew. When it rejects, the next step drafts
    those positions again, at smaller offsets: with the same numbers its law would be bent."""
    table = table_of([request(0, params("block"))], vocab=9)
    sampler, index, scores = Sampler(table), torch.tensor([0]), torch.zeros(1, 9)

    def numbers(offset: int, stream: int) -> tuple[float, int]:
        entries = entries_of(table, [Entry(1, 40, offset)], None)
        return float(sampler.uniform(entries, index, stream)), int(
            sampler.draw(scores, entries, index, stream)
        )

    for stream in (noise.DRAFT, noise.ACCEPT):
        assert len({numbers(offset, stream)[0] for offset in range(9)}) == 9
        assert len({numbers(offset, stream)[1] for offset in range(9)}) > 1
    # The target's own choice is the same whether it verifies, at whatever offset, or decodes plainly.
    for stream in (noise.TARGET, noise.RESIDUAL):
        assert len({numbers(offset, stream) for offset in range(9)}) == 1
