"""Counters against what the requests themselves report."""

from dataclasses import replace

import pytest

from headlong import LLM, SamplingParams
from headlong.engine import metrics as metrics_module
from headlong.engine.collect import Collector
from headlong.engine.metrics import Metrics, Totals
from headlong.types import Request, RowOutput, StepOutput

PROMPTS = ["Once upon a time", "The little fox", "A rainy day"]


def run(llm: LLM, params: list[SamplingParams]) -> tuple[Metrics, list]:
    """Steps the engine by hand, so that every step is seen."""
    seen = Metrics()
    step = llm.engine.step

    def observed():
        output = step()
        seen.observe(output)
        return output

    llm.engine.step = observed  # type: ignore[method-assign]
    try:
        return seen, llm.generate(PROMPTS, params)
    finally:
        del llm.engine.step


def test_totals_are_the_requests_sums(llm):
    params = [SamplingParams(max_tokens=30, draft_tokens=k, ignore_eos=True) for k in (0, 2, 5)]
    seen, done = run(llm, params)
    totals = seen.totals()
    stats = [completion.stats for completion in done]
    assert totals.generated_tokens == 90
    assert totals.prompt_tokens + totals.cached_tokens == sum(one.prompt_tokens for one in stats)
    assert totals.row_steps == sum(one.steps for one in stats)
    assert totals.decoded_tokens == 90 - len(PROMPTS)
    assert totals.drafted == sum(one.drafted for one in stats) > 0
    assert totals.accepted == sum(one.accepted for one in stats) > 0
    for place in range(5):
        tried = sum(one.tried_per_position[place] for one in stats if place < len(one.tried_per_position))
        assert totals.tried_per_position[place] == tried
    assert totals.accepted == sum(totals.accepted_per_position)


def test_an_end_without_tokens_is_no_step():
    """Of one row a fault put an end to while it read its prompt, of another between two tokens."""
    request = Request("row", (1, 2, 3), SamplingParams(), seed=0)
    given = RowOutput(request, (7, 8), "", 2, 1, (True, False))
    failed = RowOutput(request, (), "", 0, 0, (), (), "error", "a fault")
    totals = Totals()
    for rows in ((replace(given, is_first=True),), (given,), (failed,), (failed, given)):
        totals.add(StepOutput(rows=rows))
    assert (totals.steps, totals.row_steps) == (4, 2)
    assert (totals.decoded_tokens, totals.generated_tokens, totals.asked_tokens) == (4, 6, 3)


def test_recent_is_a_part_of_the_whole(llm, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(metrics_module.time, "monotonic", lambda: now[0])
    seen, _ = run(llm, [SamplingParams(max_tokens=10, draft_tokens=2, ignore_eos=True)] * 3)
    assert seen.rates().tokens_per_second == 0, "the bucket that is filling does not count yet"
    now[0] += metrics_module.BUCKET_SECONDS
    assert seen.rates().tokens_per_second == 30 / metrics_module.RATE_SECONDS
    assert seen.recent() == seen.totals()
    now[0] += metrics_module.RATE_SECONDS
    assert seen.rates().tokens_per_second == 0 and seen.rates().tokens_per_step is None
    assert seen.recent() == seen.totals()
    now[0] += metrics_module.POSITION_SECONDS
    assert seen.recent() == Totals()


def test_a_reading_is_a_copy(llm):
    seen, _ = run(llm, [SamplingParams(max_tokens=8, draft_tokens=2)] * 3)
    reading = seen.totals()
    reading.accepted_per_position[0] = -1
    assert seen.totals().accepted_per_position[0] >= 0


def test_refused_drafts_complete_the_accepted_ones(llm):
    """Accepted and refused drafts are what was drafted, and the target's token is never the first refused one."""
    params = SamplingParams(max_tokens=60, draft_tokens=5, temperature=1.0, seed=3, ignore_eos=True)
    refused = 0
    for chunk in llm.stream("Once upon a time", params):
        assert chunk.num_accepted + len(chunk.rejected) == chunk.num_drafted <= 5
        assert sum(chunk.from_draft) <= chunk.num_accepted
        if chunk.rejected and chunk.finish_reason is None:
            assert chunk.token_ids[-1] != chunk.rejected[0]
            refused += 1
    assert refused > 3


@pytest.mark.parametrize(
    ("adaptive", "steps", "why"),
    [
        (True, 1, "the output ended before"),
        (True, 20, "plain decoding was quicker"),
        (False, 20, "the drafter proposed nothing"),
    ],
)
def test_an_answer_without_drafts_says_why(adaptive, steps, why):
    request = Request("a", (1, 2), SamplingParams(max_tokens=40), seed=0, draft_tokens=3, adaptive=adaptive)
    collector = Collector(request, None)

    def give(**more) -> None:
        collector.take(StepOutput(), RowOutput(request, (5,), "a", 0, 0, (False,), **more))

    give(is_first=True)
    for number in range(steps):
        give(finish_reason="length" if number == steps - 1 else None)
    assert collector.completion is not None
    status = collector.completion.stats.mtp
    assert not status and status.reason is not None and why in status.reason
