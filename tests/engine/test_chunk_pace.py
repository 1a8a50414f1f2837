"""How many tokens of prompts a step reads beside rows that decode, on simulated machines."""

import random
import statistics

import pytest

from headlong import SamplingParams
from headlong.engine.chunk_pace import ChunkPace
from headlong.types import Plan, Request, RowPlan

PAGE, MOST = 64, 2048


def row(tokens: int, *, prompt: bool) -> RowPlan:
    request = Request("row", (1,), SamplingParams(), seed=0, draft_tokens=0)
    known = tuple(range(tokens)) if prompt else ()
    return RowPlan(request, 1, 0, tokens, 0, 0, (1,), samples=not prompt, num_generated=0, known_tokens=known)


def plan_of(decoding: int, prompt: int) -> Plan:
    rows = [row(1, prompt=False) for _ in range(decoding)]
    return Plan((*rows, *([row(prompt, prompt=True)] if prompt else [])), 0)


def decoded(seconds: float, pace: ChunkPace | None = None) -> ChunkPace:
    pace = pace or ChunkPace(PAGE, MOST)
    for _ in range(20):
        pace.observe(plan_of(16, 0), seconds)
    return pace


@pytest.mark.parametrize(
    ("each", "free"), [(1e-4, 0), (4e-5, 200), (1e-6, 0), (1e-3, 0)], ids=["even", "knee", "cheap", "dear"]
)
def test_gaps_stay_below_twice_the_usual_one(each, free):
    """A machine whose steps take longer from a number of tokens on, with noise."""
    rng, usual = random.Random(0), 0.015
    pace, gaps, chunks = decoded(usual), [], []
    for _ in range(200):
        chunk = pace.budget(16)
        seconds = (usual + each * max(chunk - free, 0)) * rng.uniform(0.95, 1.05)
        pace.observe(plan_of(16, chunk), seconds)
        gaps.append(seconds)
        chunks.append(chunk)
    assert all(PAGE <= chunk <= MOST for chunk in chunks)
    late = sorted(gaps[10:])
    allowed = max(2 * usual, usual + each * PAGE)  # no fewer than a page are read
    assert late[int(0.99 * len(late))] <= allowed * 1.05
    best = min(max(free + 0.8 * usual / each, PAGE), MOST)
    assert statistics.median(chunks[10:]) >= 0.7 * best, "prompts are held up more than need be"


def test_prompts_alone_are_read_as_quickly_as_they_can_be():
    pace = decoded(0.01)
    pace.observe(plan_of(16, PAGE), 1.0)
    assert pace.budget(0) == MOST and pace.budget(1) == PAGE


def test_before_anything_is_known():
    pace = ChunkPace(PAGE, MOST)
    assert pace.budget(3) == MOST, "nobody has seen what a step without prompts takes"
    assert decoded(0.01, pace).budget(3) == PAGE, "what a prompt's tokens take is found out with few of them"


def test_a_chunk_below_a_page():
    assert ChunkPace(PAGE, 16).budget(1) == 16
    assert decoded(0.01, ChunkPace(PAGE, 16)).budget(1) == 16
