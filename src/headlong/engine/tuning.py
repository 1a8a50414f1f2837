"""Measures what steps cost on this machine: the target's pass and the drafting, by rows and depth.

Takes an idle engine for a moment and leaves it idle. Prints nothing and stores nothing.
"""

import random
from collections.abc import Iterable, Mapping
from statistics import median

from headlong.engine.engine import Engine
from headlong.params import SamplingParams
from headlong.progress import ProgressFn, silent
from headlong.speculate.depth import Wish
from headlong.speculate.profile import Cost
from headlong.types import Plan, Request, StepTimes, Verdict

PROMPT_TOKENS = 32
SKIPPED = 2
"""Decoding steps before those that are measured: the first ones of a kind pay for what later ones find ready."""


class _Meter:
    """Makes every row draft to one depth, and keeps the times."""

    draft_stop = None

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.times: list[StepTimes] = []

    def choose(self, wishes: Mapping[str, Wish], num_prompt_tokens: int) -> Mapping[str, int]:  # noqa: ARG002
        return dict.fromkeys(wishes, self.depth)

    def again(self, wishes: Mapping[str, Wish]) -> Mapping[str, int]:
        return self.choose(wishes, 0)

    def observe(self, plan: Plan, verdict: Verdict, times: StepTimes) -> None:  # noqa: ARG002
        if not any(row.known_tokens for row in plan.rows):
            self.times.append(times)


def measure(
    engine: Engine, rows: Iterable[int], depths: Iterable[int], num_steps: int, progress: ProgressFn = silent
) -> list[Cost]:
    """Medians over `num_steps` steps for each of the `rows` and `depths`."""
    assert not engine.has_work
    cells = [(count, depth) for count in rows for depth in depths]
    usual, costs = engine.depths, []
    try:
        for done, (count, depth) in enumerate(cells):
            progress("tune", done, len(cells))
            costs.append(_cost(engine, count, depth, num_steps))
    finally:
        engine.depths = engine.scheduler.depths = usual
        progress("tune", len(cells), len(cells))
    return costs


def _cost(engine: Engine, rows: int, depth: int, num_steps: int) -> Cost:
    meter = _Meter(depth)
    engine.depths = engine.scheduler.depths = meter
    requests = [_request(engine, number, depth, num_steps) for number in range(rows)]
    for request in requests:
        engine.add(request)
    try:
        while len(meter.times) < SKIPPED + num_steps:
            engine.step()
    finally:
        for request in requests:
            engine.cancel(request.id)
    times = meter.times[SKIPPED:]
    verify, draft = (median(getattr(time, part) for time in times) for part in ("verify", "draft"))
    # A plain step drafts nothing; what little it spends there is part of what it costs.
    return Cost(rows, depth, verify, draft) if depth else Cost(rows, 0, verify + draft, 0.0)


def _request(engine: Engine, number: int, depth: int, num_steps: int) -> Request:
    """A request that does not end while it is measured, whatever is accepted. Which tokens it has does not matter."""
    rng = random.Random(number)
    vocab = engine.model.config.vocab_size
    return Request(
        id=f"tune {number}",
        prompt=tuple(rng.randrange(vocab) for _ in range(PROMPT_TOKENS)),
        params=SamplingParams(max_tokens=(SKIPPED + num_steps + 1) * (depth + 1), ignore_eos=True),
        seed=number,
        draft_tokens=engine.max_drafts,
        adaptive=True,
    )
