"""Steps that are taken for what they teach: which, how often, and what they may lose. Changes speed, never tokens."""

import math
from collections.abc import Sequence

from headlong.speculate.acceptance import HOPE
from headlong.speculate.costs import Costs
from headlong.speculate.utility import Candidate, Step, best, expect

SHARE, CALM_SHARE = 0.0125, 0.005
"""The part of all time that may be lost to steps that are taken for what they teach: usually, and where they have long
taught nothing new."""
CALM = 320.0
"""Plain steps' time that is long. A surprise alone does not end it, since luck is one now and then: what follows from
it does."""
SAVINGS, DEBT = 2.0, 2.0
"""Plain steps that can be saved up for probes, and lost in advance after a surprise."""
UNLIKELY = 0.15
"""Chance of what counts as a surprise."""
LOOK_EVERY, HOPELESS = 4, 64
"""Steps until rows that do not draft are looked for again: usually, and if drafting could not pay them at all."""
ASIDE_EVERY = 32
"""Steps after which rows that draft try another depth for once."""


class Probing:
    """The account of a probe, kept in seconds as the costs' tables have them."""

    def __init__(self) -> None:
        self.rows: dict[str, float] = {}
        """Rows that draft in this step only to be seen, and how likely their drafts seemed to stand."""
        self.surprised = False
        """Whether far more of the last step's stood."""
        self.hopeless = 0
        """Looks in a row that found no row worth a probe."""
        self._credit = 0.0
        """What probes may lose."""
        self._calm = 0.0
        """Time since drafting was best."""
        self._price = 0.0
        """What the last step that was thought of for what it teaches would have lost: less than that buys none."""
        self._until_look, self._until_aside = 0, ASIDE_EVERY
        self._plain_turn = False
        self._rate_aside: float | None = None
        """During a step that is not the best one, the rate of the best; else None."""
        self._catch_up = 0.0
        """What it takes, of late, until the drafter of rows that had paused is ready."""

    def begin(self) -> None:
        """A new step."""
        self.rows, self._rate_aside = {}, None

    @property
    def is_aside(self) -> bool:
        """Whether this step was chosen for what it teaches."""
        return bool(self.rows) or self._rate_aside is not None

    def others_came(self) -> None:
        self._price = 0.0

    def costs_changed(self) -> None:
        """What was found not to be worth a look may be with these."""
        self._price = 0.0
        self._until_look = min(self._until_look, LOOK_EVERY)

    def is_due(self, chosen: Step) -> bool:
        """Whether `other` is to be asked in this step."""
        if self.surprised or (self._until_aside <= 1 and any(chosen.depths)):
            return True
        return self._until_look <= 1 and self._credit >= self._price and not all(chosen.depths)

    def pass_over(self, chosen: Step) -> None:
        """A step for which it is not asked."""
        self._until_look -= 1
        if any(chosen.depths):
            self._until_aside -= 1
            self._calm = 0.0

    def other(self, rows: Sequence[Candidate], chosen: Step, costs: Costs) -> tuple[int, ...] | None:
        """Other depths than the best, if something may be learned and enough was saved up for what it loses."""
        self.pass_over(chosen)
        if (self._until_look <= 0 and self._credit >= self._price) or self.surprised:
            idle = _worth_a_look(rows, chosen, costs)
            depths = tuple(1 if number in idle else depth for number, depth in enumerate(chosen.depths))
            self._until_look = LOOK_EVERY if idle or all(chosen.depths) else HOPELESS
            self.hopeless = 0 if idle or any(chosen.depths) else self.hopeless + 1
            self.rows = {rows[number].row_id: rows[number].curve.stands[1] for number in idle}
            if idle and self._affordable(rows, depths, chosen, costs):
                return depths
            self.rows = {}
        if self._until_aside <= 0 and any(chosen.depths):
            self._until_aside = ASIDE_EVERY
            depths = self._aside(rows, chosen)
            if self._affordable(rows, depths, chosen, costs):
                return depths
        return None

    def judge(self, stood: dict[str, bool]) -> None:
        """Learns from a probe. `stood` says for each probed row whether its first draft was accepted."""
        chances = [self.rows[row_id] for row_id in stood]
        self.surprised = bool(stood) and _is_surprising(chances, sum(stood.values()))

    def late(self, seconds: float) -> float:
        """Rows that had paused took so much longer to draft. Gives what that takes on the whole: of one step it may
        be anything."""
        self._catch_up += 0.25 * (seconds - self._catch_up)
        return self._catch_up

    def book(self, time: float, step: float, tokens: int, plain: float) -> None:
        """`time` went by; the last step took `step` and gave so many tokens, and a plain one takes `plain`."""
        self._calm += time
        self._credit += (SHARE if self._calm < CALM * plain else CALM_SHARE) * time
        if self._rate_aside is not None:
            self._credit -= step - tokens / self._rate_aside
        self._credit = min(self._credit, SAVINGS * plain)

    def _aside(self, rows: Sequence[Candidate], chosen: Step) -> tuple[int, ...]:
        """The depths of a probe: in turns one draft more for every row that drafts, and no drafts at all."""
        self._plain_turn = not self._plain_turn
        more = 0 if self._plain_turn else 1
        return tuple(
            depth if not row.free or not depth else min(depth + 1, row.limit) * more
            for row, depth in zip(rows, chosen.depths, strict=True)
        )

    def _affordable(
        self, rows: Sequence[Candidate], depths: tuple[int, ...], chosen: Step, costs: Costs
    ) -> bool:
        """Whether savings cover what a step is expected to lose against the best. What it does lose is paid later."""
        step = expect(rows, depths, costs)
        debt = DEBT * costs.verify.at(len(rows), 0) if self.surprised else 0.0
        late = self._catch_up if self.rows else 0.0
        self._price = step.seconds + late - step.tokens / chosen.rate
        if self._price > self._credit + debt:
            return False
        self._rate_aside = chosen.rate
        return True


def _worth_a_look(rows: Sequence[Candidate], chosen: Step, costs: Costs) -> list[int]:
    """The rows that do not draft but would, were their drafts as good as drafts can be."""
    idle = [
        number
        for number, (row, depth) in enumerate(zip(rows, chosen.depths, strict=True))
        if row.free and row.limit and not depth
    ]
    if not idle:
        return []
    hopeful = list(rows)
    for number in idle:
        hopeful[number] = hopeful[number]._replace(curve=HOPE)
    hoped = best(hopeful, costs)
    return [number for number in idle if hoped.depths[number]]


def _is_surprising(chances: list[float], stood: int) -> bool:
    """Whether more drafts stood than was to be expected of these chances: all of them against the odds, or far more."""
    spread = math.sqrt(sum(chance * (1.0 - chance) for chance in chances))
    against_the_odds = stood == len(chances) and math.prod(chances) < UNLIKELY
    return against_the_odds or stood > sum(chances) + 2.0 * spread
