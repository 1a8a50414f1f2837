"""Whether a row goes on drafting, asked after every draft: the depth that was planned is the most it may have.

A draft is dropped if it is too unlikely to be worth its place in the target's pass, and a row stops where a further one
would not be worth its time. Changes speed, never tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headlong.speculate.acceptance import Acceptance
from headlong.speculate.confidence import Calibration
from headlong.speculate.costs import Costs

PACE_SHARE, SLOWEST = 0.1, 2.0
"""How much one step tells of the pace, and how slow it may seem: what is slower still is noise."""


@dataclass
class Made:
    """A row's drafts in this step, as far as they were judged."""

    confidences: list[float] = field(default_factory=list)
    chance: float = 1.0
    """How likely the last draft is accepted if the others are."""
    stands: float = 1.0
    """How likely all drafts are accepted."""
    dropped: float | None = None
    """The last one's chance, if it was not worth its place."""

    @property
    def num_kept(self) -> int:
        return len(self.confidences) - (self.dropped is not None)


class UtilityStop:
    """Judges by what a second could give in this step; where nobody may stop it only remembers."""

    def __init__(self, acceptance: Acceptance, max_depth: int) -> None:
        self.calibration = Calibration(max_depth)
        self.made: dict[str, Made] = {}
        """The drafts of this step, by row."""
        self._passes: list[int] = []
        """Rows in each pass of this step."""
        self._pace = 1.0
        """What a further pass takes where rows stop one by one, as a part of what it takes if all go on."""
        self._acceptance = acceptance
        self._costs = Costs()
        self._limits: Mapping[str, int] = {}
        self._num_rows = 1
        self._worth = 0.0

    def open(self, limits: Mapping[str, int], num_rows: int, worth: float, costs: Costs) -> None:
        """Prepares for one step of `num_rows` rows, of which these may stop before their limits. `worth`: tokens that a
        second could give."""
        self.made, self._passes = {}, []
        self._limits, self._num_rows, self._worth, self._costs = limits, num_rows, worth, costs

    def judge(self, row_ids: Sequence[str], confidences: Sequence[float]) -> tuple[list[bool], list[bool]]:
        dear = self._worth * self._costs.verify.slope(self._num_rows)
        self._passes.append(len(row_ids))
        kept, live, gain = [], [], 0.0
        for row_id, confidence in zip(row_ids, confidences, strict=True):
            made = self._add(row_id, confidence)
            if row_id not in self._limits:
                kept.append(True)
                live.append(True)
                continue
            if made.stands <= dear:
                made.dropped = made.chance
            more = self._next(row_id, made) - dear
            kept.append(made.dropped is None)
            live.append(made.dropped is None and more > 0.0)
            gain += more if live[-1] else 0.0
        count, free = sum(live), all(row_id in self._limits for row_id in row_ids)
        # A pass that is made for others anyway costs these rows next to nothing.
        if count and free and gain <= self._worth * self._pace * self._costs.draft.slope(self._passes[0]):
            live = [False] * len(live)
        return kept, live

    def observe(self, seconds: float) -> None:
        """What the drafting of this step took, as the tables have it, if it was of rows that stopped one by one."""
        if self._passes:
            rows, further = self._passes[0], len(self._passes) - 1
            expected = self._costs.draft.at(rows, 1) + further * self._costs.draft.slope(rows)
            self._pace += PACE_SHARE * (min(seconds / expected, SLOWEST) - self._pace)

    def _add(self, row_id: str, confidence: float) -> Made:
        made = self.made.setdefault(row_id, Made())
        made.chance = self.calibration.chance(row_id, len(made.confidences), confidence)
        made.confidences.append(confidence)
        made.stands *= made.chance
        return made

    def _next(self, row_id: str, made: Made) -> float:
        """How likely one more draft stands, not knowing yet which."""
        depth = len(made.confidences)
        if depth >= self._limits[row_id]:
            return 0.0
        stands = self._acceptance.curve(row_id).stands
        return made.stands * stands[depth + 1] / stands[depth]
