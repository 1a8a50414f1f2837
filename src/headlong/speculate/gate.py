"""Whether a row goes on drafting, asked after every draft: the depth that was planned is the most it may have.

A draft is dropped if it is too unlikely to be worth its place in the target's pass, and a row stops where a further one
would not be worth its time. Changes speed, never tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headlong.speculate.acceptance import Acceptance
from headlong.speculate.confidence import Calibration
from headlong.speculate.costs import Costs


@dataclass
class Made:
    """A row's drafts in this step, as far as they were judged."""

    confidences: list[float] = field(default_factory=list)
    chance: float = 1.0
    """That the last of them stands if the others do."""
    stands: float = 1.0
    """How likely all of them stand."""
    dropped: float | None = None
    """The last one's chance, if it was not worth its place."""

    @property
    def num_kept(self) -> int:
        return len(self.confidences) - (self.dropped is not None)


class UtilityGate:
    """Judges by what a second could give in this step; where nobody may stop it only remembers."""

    def __init__(self, acceptance: Acceptance, costs: Costs, max_depth: int) -> None:
        self.calibration = Calibration(max_depth)
        self.made: dict[str, Made] = {}
        """Of this step, by row."""
        self._acceptance = acceptance
        self._costs = costs
        self._limits: Mapping[str, int] = {}
        self._num_rows = 1
        self._worth = 0.0

    def open(self, limits: Mapping[str, int], num_rows: int, worth: float) -> None:
        """For one step of `num_rows` rows, of which these may stop before their limits. `worth`: tokens that a second
        could give."""
        self.made = {}
        self._limits, self._num_rows, self._worth = limits, num_rows, worth

    def judge(self, row_ids: Sequence[str], confidences: Sequence[float]) -> tuple[list[bool], list[bool]]:
        dear = self._worth * self._costs.verify.slope(self._num_rows)
        kept, going, gain = [], [], 0.0
        for row_id, confidence in zip(row_ids, confidences, strict=True):
            made = self._add(row_id, confidence)
            if row_id not in self._limits:
                kept.append(True)
                going.append(True)
                continue
            if made.stands <= dear:
                made.dropped = made.chance
            more = self._next(row_id, made) - dear
            kept.append(made.dropped is None)
            going.append(made.dropped is None and more > 0.0)
            gain += more if going[-1] else 0.0
        count, free = sum(going), all(row_id in self._limits for row_id in row_ids)
        # A pass that is made for others anyway costs these rows next to nothing.
        if count and free and gain <= self._worth * self._costs.draft.slope(count):
            going = [False] * len(going)
        return kept, going

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
