"""Each processor against a plain implementation, position by position; and rows that mind their own business."""

import math
import random

import numpy as np
import pytest
import torch
from sampling_tables import entries_of, request, table_of

from headlong.params import SamplingParams
from headlong.sampling import processors
from headlong.sampling.changes import adjust
from headlong.sampling.entries import Entry
from headlong.sampling.processors import shape
from headlong.sampling.sampler import Sampler

VOCAB = 23


class Row:
    """One row with its drafts, as random as a seed makes it."""

    def __init__(self, rng: random.Random, params: SamplingParams, depth: int) -> None:
        self.params = params
        self.prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))]
        self.output = [rng.randrange(VOCAB) for _ in range(rng.randrange(6))]
        self.drafts = [rng.randrange(VOCAB) for _ in range(depth)]
        self.stops = sorted(rng.sample(range(VOCAB), 3))
        # Few levels, so that ties are common.
        self.logits = torch.tensor(
            [[rng.randrange(-12, 13) / 4 for _ in range(VOCAB)] for _ in range(depth + 1)],
            dtype=torch.float64,
        )


def plain_adjust(row: Row, offset: int) -> np.ndarray:
    """Penalties, bias, bans, early stops, one token at a time."""
    params, logits = row.params, row.logits[offset].numpy().copy()
    produced = row.output + row.drafts[:offset]
    for token in range(VOCAB):
        if token in produced or token in row.prompt:
            if logits[token] > 0:
                logits[token] /= params.repetition_penalty
            else:
                logits[token] *= params.repetition_penalty
        if token in produced:
            logits[token] -= params.presence_penalty
            logits[token] -= params.frequency_penalty * produced.count(token)
        logits[token] += np.float32(params.logit_bias.get(token, 0.0))
        if token in params.bad_token_ids:
            logits[token] = -math.inf
        if token in row.stops and len(produced) < params.min_tokens:
            logits[token] = -math.inf
    return logits


def plain_filter(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The log-probabilities of what is left, -inf for what was cut."""
    scores = logits / params.temperature
    if params.top_k and params.top_k < VOCAB:
        worst = sorted(scores, reverse=True)[params.top_k - 1]
        scores = np.array([s if s >= worst else -math.inf for s in scores])
    if params.top_p < 1:
        weights = np.exp(scores - scores.max())
        p = weights / weights.sum()
        order = sorted(range(VOCAB), key=lambda token: (-p[token], token))
        held, kept = 0.0, set()
        for token in order:
            if kept and held >= params.top_p - 1e-12:
                break
            kept.add(token)
            held += p[token]
        scores = np.array([s if token in kept else -math.inf for token, s in enumerate(scores)])
    if params.min_p:
        weights = np.exp(scores - scores.max())
        scores = np.array(
            [s if w >= params.min_p - 1e-12 else -math.inf for s, w in zip(scores, weights, strict=True)]
        )
    return scores


def processed(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """What the engine makes of them, all in one batch: adjusted logits, and filtered scores."""
    requests = [request(i, row.params, tuple(row.prompt), row.stops) for i, row in enumerate(rows)]
    table = table_of(requests, VOCAB, [row.output for row in rows])
    width = max(len(row.drafts) for row in rows)
    places, prefixes = [], []
    for number, row in enumerate(rows):
        for offset in range(len(row.drafts) + 1):
            length = len(row.prompt) + len(row.output)
            places.append(Entry(number + 1, length + offset, offset))
            # What lies beyond a row's own depth is padding and must not count.
            prefixes.append(row.drafts + [5] * (width - len(row.drafts)))
    entries = entries_of(table, places, prefixes if width else None)
    logits = torch.cat([row.logits for row in rows])
    before = logits.clone()
    adjusted = adjust(logits, entries, table)
    assert torch.equal(logits, before), "the model's logits are left as they are"
    sampled = [i for i, params in enumerate(entries.params) if not params.greedy]
    return adjusted, shape(adjusted, entries, table, sampled)


def check(rows: list[Row]) -> None:
    adjusted, scores = processed(rows)
    at = at_sampled = 0
    for row in rows:
        for offset in range(len(row.drafts) + 1):
            wanted = plain_adjust(row, offset)
            np.testing.assert_allclose(adjusted[at].numpy(), wanted, rtol=1e-12, atol=1e-12)
            at += 1
            if not row.params.greedy:
                filtered = plain_filter(wanted, row.params)
                assert np.array_equal(np.isfinite(filtered), torch.isfinite(scores[at_sampled]).numpy())
                np.testing.assert_allclose(scores[at_sampled].numpy(), filtered, rtol=1e-12, atol=1e-12)
                at_sampled += 1
    assert at == len(adjusted) and at_sampled == len(scores)


ONE_BY_ONE = {
    "nothing": {},
    "repetition": {"repetition_penalty": 1.7},
    "repetition below one": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 0.9},
    "frequency": {"frequency_penalty": -0.4},
    "bias": {"logit_bias": {3: 1.25, 7: -2.5, 0: 0.1}},
    "bans": {"bad_token_ids": (1, 2, 3)},
    "ban beats bias": {"bad_token_ids": (4,), "logit_bias": {4: 50.0}},
    "minimum length": {"min_tokens": 4},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 3.0},
    "top-k": {"temperature": 1.0, "top_k": 4},
    "top-k above the vocabulary": {"temperature": 1.0, "top_k": VOCAB + 100},
    "top-p": {"temperature": 1.0, "top_p": 0.6},
    "tiny top-p": {"temperature": 1.0, "top_p": 1e-9},
    "min-p": {"temperature": 1.0, "min_p": 0.2},
    "min-p 1": {"temperature": 1.0, "min_p": 1.0},
    "all": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": {3: 2.0, 9: -1.0},
        "bad_token_ids": (6,),
        "min_tokens": 5,
        "temperature": 0.8,
        "top_k": 9,
        "top_p": 0.85,
        "min_p": 0.05,
    },
}


@pytest.mark.parametrize("params", ONE_BY_ONE.values(), ids=ONE_BY_ONE)
@pytest.mark.parametrize("depth", [0, 1, 5])
def test_one_processor(params, depth):
    rng = random.Random(depth)
    check([Row(rng, SamplingParams(**params), depth) for _ in range(6)])


def any_params(rng: random.Random) -> SamplingParams:
    given: dict = {}
    choices = {
        "repetition_penalty": [0.7, 1.2, 2.0],
        "presence_penalty": [-1.0, 0.5],
        "frequency_penalty": [-0.3, 0.8],
        "logit_bias": [{1: 3.0}, {2: -4.0, 8: 0.5}],
        "bad_token_ids": [(3,), (0, 22)],
        "min_tokens": [1, 4, 9],
        "top_k": [1, 3, 10, 500],
        "top_p": [0.2, 0.7, 0.95],
        "min_p": [0.01, 0.3],
    }
    for name, values in choices.items():
        if rng.random() < 0.4:
            given[name] = rng.choice(values)
    return SamplingParams(temperature=rng.choice([0.0, 0.5, 1.0, 1.7]), **given)


@pytest.mark.parametrize("seed", range(40))
def test_any_mixture(seed):
    rng = random.Random(seed)
    check([Row(rng, any_params(rng), rng.randrange(5)) for _ in range(rng.randrange(1, 9))])


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_neighbours_do_not_change_a_bit(seed, dtype):
    rng = random.Random(seed)
    rows = [Row(rng, any_params(rng), rng.randrange(5)) for _ in range(8)]
    for row in rows:
        row.logits = (row.logits + torch.randn(row.logits.shape, dtype=torch.float64)).to(dtype)
    adjusted, scores = processed(rows)
    alone = [processed([row]) for row in rows]
    assert torch.equal(adjusted, torch.cat([a for a, _ in alone]))
    assert torch.equal(scores, torch.cat([s for _, s in alone]))


def test_ties_with_the_last_of_top_k_are_kept():
    row = Row(random.Random(0), SamplingParams(temperature=1.0, top_k=3), 0)
    row.logits = torch.zeros(1, VOCAB, dtype=torch.float64)
    row.logits[0, [2, 5, 8, 11]] = torch.tensor([3.0, 2.0, 2.0, 2.0], dtype=torch.float64)
    _, scores = processed([row])
    assert torch.where(torch.isfinite(scores[0]))[0].tolist() == [2, 5, 8, 11]


def test_filters_apply_in_order():
    """Top-p is of what top-k left: 0.5, 0.3 become 0.625, 0.375, so 0.6 needs only the first."""
    row = Row(random.Random(0), SamplingParams(temperature=1.0, top_k=2, top_p=0.6), 0)
    row.logits = torch.full((1, VOCAB), -50.0, dtype=torch.float64)
    row.logits[0, :3] = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    _, scores = processed([row])
    assert torch.where(torch.isfinite(scores[0]))[0].tolist() == [0]


def test_a_slot_taken_over_keeps_nothing_of_its_last_row():
    heavy = SamplingParams(
        repetition_penalty=2.0, logit_bias={3: 9.0}, bad_token_ids=(4,), min_tokens=9, temperature=1.0
    )
    table = table_of([request(0, heavy, (1, 2), (5,))], VOCAB, [[7, 7]])
    lighter = SamplingParams(presence_penalty=1.0, logit_bias={8: 1.0}, min_tokens=2)
    table.clear(1)
    table.set(1, request(1, lighter, (9,), (6,)), [10])
    entries = entries_of(table, [Entry(1, 2, 0)], None)
    out = adjust(torch.zeros(1, VOCAB), entries, table)[0]
    wanted = torch.zeros(VOCAB)
    wanted[10], wanted[8], wanted[6] = -1.0, 1.0, -torch.inf
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("counts", [(2, 20), (0, 5), (1, 64)])
def test_logprobs_do_not_depend_on_what_neighbours_ask_for(counts):
    """Logits of coarse dtypes tie often; which of the tied are shown must not depend on other rows."""
    generator = torch.Generator().manual_seed(0)
    few, many = (SamplingParams(logprobs=n) for n in counts)
    vocab = 4096
    logits = torch.randint(-8, 9, (2, vocab), generator=generator).float() / 4
    tokens = logits.argmax(-1)
    both = table_of([request(0, few), request(1, many)], vocab)
    entries = entries_of(both, [Entry(1, 1, 0), Entry(2, 1, 0)], None)
    together = Sampler(both).logprobs(logits, tokens, entries)
    alone = Sampler(both).logprobs(logits[:1], tokens[:1], entries_of(both, [Entry(1, 1, 0)], None))
    assert together[0] == alone[0]
    assert len(together[0].top) == counts[0] and len(together[1].top) == counts[1]
    for one in together.values():
        assert list(one.top) == sorted(one.top, key=lambda pair: (-pair[1], pair[0]))


def sorted_nucleus(p_MV: torch.Tensor, least: float) -> torch.Tensor:
    """What top-p keeps, by its definition."""
    ordered, order = torch.sort(p_MV, dim=-1, descending=True, stable=True)
    kept = ~(ordered.cumsum(-1) - ordered >= least)
    kept[:, 0] = True
    return torch.empty_like(kept).scatter_(1, order, kept)


@pytest.mark.parametrize("candidates", [1, 4, 128])
@pytest.mark.parametrize("least", [1e-9, 0.3, 0.95, 1 - 1e-12])
def test_top_p_sorts_no_vocabulary(least, candidates, monkeypatch):
    """Sharp, flat, full of equals, cut by top-k before, one certain, and no numbers at all: a row of each."""
    monkeypatch.setattr(processors, "CANDIDATES", candidates)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 700, generator=generator, dtype=torch.float64) * 4
    logits[8:16] *= 0.01
    logits[16:32] = logits[16:32].round()
    logits[32:40] = 1.0
    logits[40:48] = logits[40:48].masked_fill(
        logits[40:48] < logits[40:48].topk(5).values[:, -1:], -torch.inf
    )
    logits[48:52, 1:] = -torch.inf
    logits[52, 3] = torch.nan
    p, least_M1 = torch.softmax(logits, -1), torch.full((64, 1), least, dtype=torch.float64)
    assert torch.equal(processors._nucleus(p, least_M1), sorted_nucleus(p, least))
