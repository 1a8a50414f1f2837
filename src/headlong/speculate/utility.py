"""Which depths promise most tokens per second. Pure arithmetic over costs and acceptance; remembers nothing."""

from collections.abc import Sequence
from typing import NamedTuple

from headlong.speculate.acceptance import Curve
from headlong.speculate.costs import Costs

MARGIN, GOING_ON = 1.02, 1.01
"""Times plain decoding's rate that drafting must promise to begin, and to go on: what is not modelled, such as a head
that has to catch up after a pause, is on plain's side."""
OWN_MARGIN = 1.03
"""Times the rate of one depth for all that depths of their own must promise: what is known of one row is little, and
the best of many guesses looks better than it is."""


class Candidate(NamedTuple):
    """A decoding row: what its drafts are worth and how many it may have. One that is not `free` takes them all."""

    row_id: str
    curve: Curve
    limit: int
    free: bool


class Step(NamedTuple):
    """A way to take the next step, one depth per candidate, and what is expected of it."""

    depths: tuple[int, ...]
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def expect(rows: Sequence[Candidate], depths: Sequence[int], costs: Costs) -> Step:
    tokens = len(rows) + sum(row.curve.gains[depth] for row, depth in zip(rows, depths, strict=True))
    drafting = sum(depth > 0 for depth in depths)
    seconds = costs.seconds(len(rows), sum(depths), drafting, max(depths))
    return Step(tuple(depths), tokens, seconds)


def best(rows: Sequence[Candidate], costs: Costs, margin: float = MARGIN) -> Step:
    """Looks at every common depth limit; under it a row stops where a further draft would earn less than its own time
    is worth. What time is worth is the best rate itself, so with several rows it is asked for twice. `margin`: times
    plain decoding's rate that anything else must promise."""
    found = plain = expect(rows, [0 if row.free else row.limit for row in rows], costs)
    for _ in range(min(2, len(rows))):
        worth = found.rate
        found = max(plain, _best_limit(rows, _ends(rows, worth, costs), costs), key=_rate)
        if found.rate <= worth * 1.01:
            break
    if len(rows) > 1:
        common = max(plain, _best_limit(rows, [row.limit for row in rows], costs), key=_rate)
        found = found if found.rate > OWN_MARGIN * common.rate else common
    return found if found.rate > margin * plain.rate else plain


def _ends(rows: Sequence[Candidate], worth: float, costs: Costs) -> list[int]:
    """The most drafts each row should have, if tokens that a second could give are `worth` so many."""
    deepest = max(row.limit for row in rows)
    dear = worth * (costs.verify.slope(len(rows)) + costs.draft_share(len(rows), deepest))
    return [_end(row, dear) if row.free else row.limit for row in rows]


def _best_limit(rows: Sequence[Candidate], ends: Sequence[int], costs: Costs) -> Step:
    """The limit for all that gives most; nobody goes beyond their end, and rows that are not free go there."""
    live = [(row.curve.stands, end) for row, end in zip(rows, ends, strict=True) if row.free and end]
    fixed = [row for row in rows if not row.free]
    tokens = len(rows) + sum(row.curve.gains[row.limit] for row in fixed)
    drafts = sum(row.limit for row in fixed)
    drafting = len(live) + sum(row.limit > 0 for row in fixed)
    least = max((row.limit for row in fixed), default=0)
    limit, best_tokens, best_seconds = 0, 0.0, 1.0
    for depth in range(1, max((end for _, end in live), default=0) + 1):
        for stands, end in live:
            if end >= depth:
                tokens += stands[depth]
                drafts += 1
        seconds = costs.seconds(len(rows), drafts, drafting, max(depth, least))
        if tokens * best_seconds > best_tokens * seconds:
            limit, best_tokens, best_seconds = depth, tokens, seconds
    depths = tuple([min(end, limit) if row.free else end for row, end in zip(rows, ends, strict=True)])
    return Step(depths, best_tokens, best_seconds)


def _rate(step: Step) -> float:
    return step.rate


def _end(row: Candidate, dear: float) -> int:
    """Later drafts stand less often than earlier ones, so the first that is too dear ends the row."""
    stands = row.curve.stands
    for depth in range(1, row.limit + 1):
        if stands[depth] <= dear:
            return depth - 1
    return row.limit
