"""How likely drafts are accepted, by depth: of all rows together, and of each row.

A row starts from what all rows show and moves to what it shows itself. Old evidence fades, so that a text that changes
is followed. Knows no costs.
"""

from collections.abc import Iterable
from operator import mul
from typing import NamedTuple

PRIOR = 0.7
"""Acceptance of a draft whose predecessors stand, before anything was seen."""
PRIOR_WEIGHT = 4.0
SHARED_MEMORY, ROW_MEMORY = 0.97, 0.93
"""What is left of the evidence after a step with drafts."""
IDLE_MEMORY = 0.98
"""What is left of a row's evidence after a step in which it did not draft."""
POOL_WEIGHT, ROW_WEIGHT = 4.0, 8.0
"""Trials that the shared rates count for: in a row's mean, and at one depth."""
LOWEST, HIGHEST = 0.02, 0.98


class Curve:
    """What drafting gives: `gains[k]` tokens more than plain, of which the k-th draft brings `stands[k]`."""

    def __init__(self, rates: Iterable[float]) -> None:
        """`rates`: acceptance at each depth of a draft whose predecessors were accepted."""
        self.stands, self.gains = [1.0], [0.0]
        for rate in rates:
            self.stands.append(self.stands[-1] * rate)
            self.gains.append(self.gains[-1] + self.stands[-1])


HOPE = Curve([0.95] * 64)
"""Drafts as good as one may hope for."""


class Evidence:
    """Fading counts by depth of drafts whose predecessors were accepted: how many there were, and how many stood."""

    def __init__(self, depth: int, memory: float, idle_memory: float) -> None:
        """What is left of them after a step with drafts, and after one without."""
        self.tried = [0.0] * depth
        self.stood = [0.0] * depth
        self._memory = memory
        self._idle_memory = idle_memory
        self._seen = 0

    def add(self, step: int, drafts: int, accepted: int, dropped: float | None) -> None:
        if step != self._seen:
            # What is not tried any more fades too, and looks as good as the depth before it until it is tried again.
            self.fade(self._memory * self._idle_memory ** (step - self._seen - 1))
            self._seen = step
        for place in range(min(accepted + 1, drafts)):
            self.tried[place] += 1.0
            self.stood[place] += place < accepted
        if dropped is not None and accepted == drafts:
            self.tried[drafts] += 1.0
            self.stood[drafts] += dropped

    def fade(self, left: float) -> None:
        self.tried = [count * left for count in self.tried]
        self.stood = [count * left for count in self.stood]


class Acceptance:
    """One per engine."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self._shared = Evidence(max_depth, SHARED_MEMORY, 1.0)
        self._rows: dict[str, Evidence] = {}
        self._curves: dict[str, Curve] = {}
        """The curves of the rows that were seen since the last change; others are computed when they are asked for."""
        self._shared_now: _Shared | None = None
        self._step = 0

    def tick(self, steps: int = 1) -> None:
        """More steps were taken; the last of them begins to be observed."""
        self._step += steps

    def curve(self, row_id: str) -> Curve:
        if row_id not in self._rows:
            return self._all().curve
        if row_id not in self._curves:
            self._curves[row_id] = Curve(_own_rates(self._rows[row_id], self._all()))
        return self._curves[row_id]

    def observe(self, row_id: str, drafts: int, accepted: int, dropped: float | None = None) -> None:
        """`dropped`: the chance of a further draft that was made and not tried. Were it left out, only drafts that
        looked good would count."""
        if row_id not in self._rows:
            self._rows[row_id] = Evidence(self.max_depth, ROW_MEMORY, IDLE_MEMORY)
        for evidence in (self._shared, self._rows[row_id]):
            evidence.add(self._step, drafts, accepted, dropped)
        self._shared_now = None
        self._curves.pop(row_id, None)

    def doubt(self, row_ids: Iterable[str]) -> None:
        """Half of what was seen of these rows is taken for old, since they did otherwise than was to be expected; and
        so is half of what all rows show if there are no others."""
        row_ids = set(row_ids)
        for row_id in row_ids:
            self._rows[row_id].fade(0.5)
        if row_ids >= self._rows.keys():
            self._shared.fade(0.5)
            self._shared_now = None
        self._curves.clear()

    def keep(self, row_ids: Iterable[str]) -> None:
        """Forgets all other rows."""
        self._rows = {row_id: self._rows[row_id] for row_id in row_ids if row_id in self._rows}
        self._curves = {row_id: curve for row_id, curve in self._curves.items() if row_id in self._rows}

    def __len__(self) -> int:
        return len(self._rows)

    def _all(self) -> "_Shared":
        if self._shared_now is None:
            rates, before = [], PRIOR
            for tried, stood in zip(self._shared.tried, self._shared.stood, strict=True):
                # A depth that was seldom reached is taken to do as well as the one before it.
                before = (stood + PRIOR_WEIGHT * before) / (tried + PRIOR_WEIGHT)
                rates.append(before)
            self._shared_now = _Shared(rates, [_odds(rate) for rate in rates], Curve(rates))
        return self._shared_now


class _Shared(NamedTuple):
    """What all rows show together."""

    rates: list[float]
    odds: list[float]
    curve: Curve


def _own_rates(row: Evidence, shared: _Shared) -> list[float]:
    """The row's mean moves the rates of all depths alike, as odds; its own count at a depth then moves that one."""
    tried, stood = sum(row.tried), sum(row.stood)
    expected = sum(map(mul, row.tried, shared.rates)) / tried
    mean = (stood + POOL_WEIGHT * expected) / (tried + POOL_WEIGHT)
    factor = _odds(mean) / _odds(expected)
    rates = []
    for odds, count, good in zip(shared.odds, row.tried, row.stood, strict=True):
        moved = odds * factor
        rates.append((good + ROW_WEIGHT * moved / (1.0 + moved)) / (count + ROW_WEIGHT))
    return rates


def _odds(rate: float) -> float:
    rate = min(max(rate, LOWEST), HIGHEST)
    return rate / (1.0 - rate)
