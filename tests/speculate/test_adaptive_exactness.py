"""Tokens never depend on the depths: chosen by the engine, or at random at every step, with rows that pause, rows that
are put back and prefixes that are used again."""

import random
from collections.abc import Mapping, Sequence

import pytest

from headlong import LLM, SamplingParams
from headlong.engine.engine import Engine
from headlong.speculate.depth import AdaptiveDepths, Wish
from headlong.types import Plan, Request, StepTimes, Verdict
from support import tiny
from support.tiny import random_tokens

MAX_TOKENS = 30


class RandomDepths:
    """Anything that is allowed, 0 more often than not, and drafts dropped or ended at will."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.draft_stop = self

    def judge(self, row_ids: Sequence[str], confidences: Sequence[float]) -> tuple[list[bool], list[bool]]:
        assert len(row_ids) == len(confidences) and all(0.0 <= value <= 1.0 for value in confidences)
        kept = [row == "row5" or self.rng.random() < 0.8 for row in row_ids]
        return kept, [
            stays and (row == "row5" or self.rng.random() < 0.7)
            for row, stays in zip(row_ids, kept, strict=True)
        ]

    def choose(self, wishes: Mapping[str, Wish], num_prompt_tokens: int) -> Mapping[str, int]:  # noqa: ARG002
        return {
            row: self.rng.choice([0, 0, 0, self.rng.randrange(wish.limit + 1)])
            if wish.adaptive
            else wish.limit
            for row, wish in wishes.items()
        }

    def observe(self, plan: Plan, verdict: Verdict, times: StepTimes) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("tiny"), "dense", seed=3).folder


def load(folder, **options) -> Engine:
    shared = {"dtype": "float64", "page_size": 16, "mtp": "on", "chunk_tokens": 24, "max_context": 160}
    return LLM(folder, progress=lambda *_: None, **(shared | options)).engine


def requests(engine: Engine, draft_tokens: int, *, adaptive: bool) -> list[Request]:
    """Eight rows; some begin alike, one keeps a depth of its own, one never drafts."""
    vocab, made = engine.model.config.vocab_size, []
    for number in range(8):
        prompt = random_tokens(vocab, 40, seed=number % 3)[: 5 + 5 * number]
        params = SamplingParams(
            max_tokens=MAX_TOKENS, temperature=0.8 * (number % 2), seed=number, ignore_eos=True
        )
        own = {5: (3, False), 6: (0, False)}.get(number, (draft_tokens, adaptive))
        depth, free = own if draft_tokens else (0, False)
        made.append(
            Request(f"row{number}", tuple(prompt), params, seed=number, draft_tokens=depth, adaptive=free)
        )
    return made


def run(engine: Engine, asked: list[Request], cancel_at: int | None = None) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {request.id: () for request in asked}
    for request in asked:
        engine.add(request)
    number = 0
    while engine.has_work:
        if number == cancel_at:
            engine.cancel(asked[1].id)
        for output in engine.step().rows:
            found[output.request.id] += output.token_ids
        engine.check_integrity()
        number += 1
    return found


@pytest.fixture(scope="module")
def truth(folder):
    engine = load(folder, prefix_cache=False, max_rows=1)
    return run(engine, requests(engine, 0, adaptive=False))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cache_tokens", [16 * 40, 16 * 14], ids=["roomy", "cramped"])
def test_any_depths_at_any_step(folder, truth, seed, cache_tokens):
    engine = load(folder, cache_tokens=cache_tokens, max_rows=6, max_context=None)
    engine.depths = engine.scheduler.depths = RandomDepths(seed)  # type: ignore[assignment]
    for turn in range(2):
        found = run(engine, requests(engine, engine.max_drafts, adaptive=True), cancel_at=9 if turn else None)
        for row, tokens in truth.items():
            if turn and row == "row1":
                assert found[row] == tokens[: len(found[row])]
            else:
                assert found[row] == tokens, (turn, row)


def test_depths_of_its_own_choice(folder, truth):
    engine = load(folder, cache_tokens=16 * 40, max_rows=6)
    assert isinstance(engine.depths, AdaptiveDepths)
    for _ in range(3):
        assert run(engine, requests(engine, engine.max_drafts, adaptive=True)) == truth
    assert len(engine.depths.acceptance) <= 6
