"""Triton's sampling from logits against filters and noise in torch: rows of all kinds, each by its own filters."""

from itertools import product

import pytest
import torch

from headlong.params import SamplingParams
from headlong.sampling import noise, trials
from headlong.sampling.processors import FilterSet, shape_all
from headlong.sampling.sampler import Sampler
from headlong.sampling.table import SamplingTable
from headlong.types import Request

pytest.importorskip("triton")
from headlong.ops.draw.triton_sample import sample

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FILTERS = [
    (temperature, top_k, top_p, min_p)
    for (temperature, top_k), (top_p, min_p) in zip(
        product((0.7, 1.0, 2.5), (0, 1, 20, 50, 100_000)),
        product((1.0, 0.9999, 0.95, 0.5, 0.01), (0.0, 0.05, 0.3)),
        strict=True,
    )
] + [
    (0.8, 0, 1.0, 0.0),
    (0.8, 0, 1.0, 0.1),
    (0.8, 20, 1.0, 0.0),
    (0.7, 20, 0.95, 0.0),
    (1.0, 0, 0.95, 0.0),
    (1.0, 0, 1 - 1e-9, 0.0),
    (1.0, 0, 1e-9, 0.0),
    (2.0, 50, 0.8, 0.02),
    (60.0, 0, 0.6, 0.0),
    (60.0, 300, 0.9, 0.0),
    (0.003, 20, 0.9, 0.1),
    (1e-4, 5, 0.9, 0.0),
]


def logits_of(kind: str, rows: int, size: int) -> torch.Tensor:
    logits_MV = 3.0 * torch.randn(rows, size, generator=torch.Generator().manual_seed(size))
    if kind == "flat":
        return 0.02 * logits_MV
    if kind == "peaked":
        return logits_MV.pow(3)
    if kind == "ties":
        return logits_MV.round()
    if kind == "equal":
        return torch.full((rows, size), 0.5)
    if kind == "zeros":
        return torch.zeros(rows, size).copysign(logits_MV)
    if kind == "holes":
        logits_MV[:, ::2] = -torch.inf
        logits_MV[0] = -torch.inf
    if kind == "single":
        logits_MV[:] = -torch.inf
        logits_MV[:, size // 2] = -3.0
    return logits_MV


KINDS = ["text", "flat", "peaked", "ties", "equal", "zeros", "holes", "single"]


def keys_of(rows: int, position: int = 0) -> torch.Tensor:
    return torch.tensor([[(7 << 33) + 3, row % 3, 100 * row + position, 0] for row in range(rows)])


def wanted(logits_MV: torch.Tensor, filters: list[tuple], keys_M4: torch.Tensor) -> torch.Tensor:
    """By torch, each row on its own."""
    rows, size = logits_MV.shape
    table, found = SamplingTable(rows, size, logits_MV.device), []
    for row, (temperature, top_k, top_p, min_p) in enumerate(filters):
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        table.set(row, Request("row", (0,), params, seed=0), [])
        slot = torch.tensor([row], device=logits_MV.device)
        found.append(shape_all(logits_MV[[row]], slot, table, FilterSet.of(params)))
    seed, choice, position, stream = keys_M4.unbind(1)
    return noise.draw(torch.cat(found), (seed, choice, position, stream))


def sampled(logits_MV: torch.Tensor, filters: list[tuple], keys_M4: torch.Tensor) -> torch.Tensor:
    filters_M4 = torch.tensor(filters, dtype=torch.float64)
    return sample(logits_MV.to(DEVICE), filters_M4.to(DEVICE), keys_M4.to(DEVICE)).cpu()


SIZES = [1, 3, 255, 256, 257, 1000, 8193]
COMPANY = 3
"""Rows of a test: each of these has other filters, and all have their turn."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_it_is_filtering_then_drawing(size, kind):
    first = COMPANY * (SIZES.index(size) + len(SIZES) * KINDS.index(kind))
    filters = [FILTERS[(first + row) % len(FILTERS)] for row in range(COMPANY)]
    logits, keys = logits_of(kind, COMPANY, size), keys_of(COMPANY, size)
    assert torch.equal(sampled(logits, filters, keys), wanted(logits, filters, keys))


MANY = 45_001
"""Tokens in so many parts that the parts' best tell where a top-k of 20 ends."""
CROWDS = {
    "text": lambda logits: logits,
    "close together": lambda logits: logits[:, 100:140].add_(30.0),
    "side by side, and equal": lambda logits: logits[:, 64:96].fill_(40.0),
    "equal all over": lambda logits: logits[:, ::911].fill_(12.5),
    "far from the rest": lambda logits: logits[:, :5].add_(300.0),
    "banned but for a line": lambda logits: logits[:, 32:].fill_(-torch.inf),
    "banned but for a few lines": lambda logits: logits[:, 3 * 32 :].fill_(-torch.inf),
    "thousands that are equal": lambda logits: logits[:, 7000:20_000].fill_(30.0),
}


@pytest.mark.parametrize(
    "crowd",
    [
        pytest.param(crowd, marks=pytest.mark.slow)
        if crowd in ("close together", "thousands that are equal")
        else crowd
        for crowd in CROWDS
    ],
)
def test_a_top_k_of_fewer_than_there_are_parts(crowd):
    """Most are so hot that each of those that stay is as likely as any other."""
    logits, keys = logits_of("text", 6, MANY), keys_of(6)
    CROWDS[crowd](logits)
    filters = [(0.7, 20, 0.95, 0.0), *[(90.0, 20, 1.0, 0.0)] * 3, (90.0, 22, 0.9, 0.0), (60.0, 20, 0.6, 0.01)]
    assert torch.equal(sampled(logits, filters, keys), wanted(logits, filters, keys))


HARD = {
    "equal ones by the thousand, few of them wanted": ("equal", (1.0, 0, 0.001, 0.0)),
    "many wanted": ("zeros", (1.0, 0, 0.9, 0.0)),
    "top-k among them": ("equal", (1.0, 200, 1.0, 0.0)),
    "and top-p": ("equal", (1.0, 7000, 0.2, 0.0)),
    "hot": ("flat", (60.0, 0, 0.9, 0.0)),
    "hot, top-k of thousands": ("flat", (60.0, 6000, 0.5, 0.0)),
    "a list that is searched": ("text", (60.0, 0, 0.1, 0.0)),
    "by count, too": ("text", (60.0, 1000, 1.0, 0.0)),
    "by both": ("text", (3.0, 1500, 0.9, 0.0)),
    "ties": ("ties", (1.0, 300, 0.99, 0.0)),
}


@pytest.mark.parametrize(("kind", "filters"), HARD.values(), ids=HARD)
def test_many_tokens_at_the_cut(kind, filters):
    """None are found by comparing each with each."""
    logits, keys = logits_of(kind, 1, 8193), keys_of(1)
    assert torch.equal(sampled(logits, [filters], keys), wanted(logits, [filters], keys))


LEFT = {
    (1.0, 2, 1.0, 0.0): {0, 1, 2},
    (1.0, 3, 1.0, 0.0): {0, 1, 2},
    (1.0, 0, 0.5, 0.0): {0, 1, 2},
    (1.0, 4, 0.7, 0.0): {0, 1, 2},
    (1.0, 0, 1.0, 0.2): {0, 1, 2, 3, 4, 5},
}


@pytest.mark.parametrize("filters", LEFT)
def test_all_that_may_be_drawn_is(filters):
    """And nothing else: of a few tokens, some of them equal or nearly so."""
    logits, keys = torch.tensor([[0.5, 1.0, 0.5, -0.0, 0.495, 0.0, -torch.inf]]).repeat(30, 1), keys_of(30)
    found = sampled(logits, [filters] * 30, keys)
    assert torch.equal(found, wanted(logits, [filters] * 30, keys))
    assert set(found.tolist()) == LEFT[filters]


@pytest.mark.parametrize("filters", [(1.0, 5, 0.9, 0.1), (1.0, 0, 1.0, 0.0)])
def test_logits_that_are_none(filters):
    logits = torch.zeros(5, 5000)
    logits[0, [4000, 4500]], logits[1, [70, 80]], logits[3, 80:] = torch.nan, torch.inf, -torch.inf
    logits[2], logits[4, 30] = -torch.inf, -torch.nan
    found = sampled(logits, [filters] * 5, keys_of(5)).tolist()
    assert found[:3] == [4000, 70, 0] and found[3] < 80 and found[4] == 30


def test_alone_and_in_company():
    """Nor does it matter what lay there before, or between rows."""
    wide = torch.full((len(FILTERS), 3000), torch.nan)
    wide[:, :2500] = logits_of("text", len(FILTERS), 2500)
    logits, keys = wide[:, :2500], keys_of(len(FILTERS))
    together = sampled(logits, FILTERS, keys)
    for row in range(0, len(FILTERS), 6):
        one = slice(row, row + 1)
        assert torch.equal(sampled(logits[one].clone(), FILTERS[one], keys[one]), together[one])


@pytest.mark.parametrize(
    "factors", [(1, 1, 1, 1), (0.1, 1, 1, 1), (1, 0.05, 1, 1), (1, 1, 0.1, 1), (1, 1, 1, 15)]
)
def test_kernels_that_choose_others_are_found(factors, monkeypatch, caplog):
    """As is asked of a GPU's before they serve."""
    monkeypatch.setattr(trials, "TOKENS", 300)
    monkeypatch.setattr(trials, "ROWS", 24)
    factors = torch.tensor(factors, dtype=torch.float64, device=DEVICE)
    same = trials.samples_alike(
        lambda *given: sample(given[0], given[1] * factors, given[2]), torch.device(DEVICE)
    )
    assert same == bool((factors == 1).all())
    assert ("tokens are filtered by torch" in caplog.text) != same


def test_rows_that_want_the_best_beside_others():
    """Of equal ones the first; the others as they are drawn by themselves. A place that is nobody's is among them."""
    logits = logits_of("ties", 4, 300).to(DEVICE)
    logits[1, [20, 30, 40]] = 50.0
    table = SamplingTable(3, 300, logits.device)
    for slot, temperature in enumerate((0.9, 0.0, 0.7), 1):
        table.set(
            slot, Request("row", (0,), SamplingParams(temperature=temperature, top_k=50), seed=slot), []
        )
    sampler = Sampler(table, sample=sample)
    slots, positions = (torch.tensor(given, device=DEVICE) for given in ([1, 2, 3, 0], [5, 6, 7, 8]))
    drafts = slots.new_empty(4, 0)

    def chosen(rows, alike):
        return sampler.choose_even(logits[rows], slots[rows], positions[rows], drafts[rows], alike)

    found, both, others = (
        chosen([0, 1, 2, 3], sampler.signature([1, 2, 3])),
        sampler.signature([1, 3]),
        [0, 2],
    )
    assert both is not None and not both.greedy
    assert torch.equal(found[others], chosen(others, both))
    assert found[1] == 20 and found[3] == logits[3].argmax()


VOCAB = 248_320


def at_large(kind: str, rows: int) -> tuple[torch.Tensor, list[tuple], torch.Tensor]:
    logits = logits_of(kind, rows, VOCAB).to(DEVICE)
    return logits, [FILTERS[row % len(FILTERS)] for row in range(rows)], keys_of(rows).to(DEVICE)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_a_large_vocabulary(kind):
    logits, filters, keys = at_large(kind, len(FILTERS))
    expected = wanted(logits, filters, keys).cpu()
    for _ in range(3):
        assert torch.equal(sampled(logits, filters, keys), expected)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_it_is_recorded_and_run_again():
    """With other logits, filters and keys in the same places."""
    rows = len(FILTERS)
    logits, filters, keys = at_large("text", rows)
    filters_M4 = torch.tensor(filters, dtype=torch.float64, device=DEVICE)
    sample(logits, filters_M4, keys)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample(logits, filters_M4, keys)
    for kind in ("peaked", "ties", "text"):
        logits.copy_(logits_of(kind, rows, VOCAB))
        filters = filters[1:] + filters[:1]
        filters_M4.copy_(torch.tensor(filters, dtype=torch.float64))
        keys[:, 2] += 1000
        graph.replay()
        assert torch.equal(tokens, wanted(logits, filters, keys))
