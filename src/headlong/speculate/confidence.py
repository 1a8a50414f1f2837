"""How often drafts stand that their drafter was so and so sure of.

What a drafter calls likely is not what the target accepts: sampled rows share the target's noise and do better than the
number says, a badly fitting head does worse. So probabilities are counted against what became of the drafts, over all
rows together, and then moved by what a position and a row show. Knows no costs.
"""

from collections.abc import Iterable, Sequence

BINS = 8
"""Equal parts of 0…1."""
MEMORY = 0.99
"""What is left of all counts after a step."""
BIN_WEIGHT, OWN_WEIGHT = 4.0, 6.0
"""Trials that the number itself counts for in its bin, and that the bins count for in a row and a position."""
LOWEST, HIGHEST = 0.02, 0.99


class _Share:
    """The drafts of one row or one position: how many, how many were accepted, and how many were expected to be."""

    def __init__(self) -> None:
        self._tried = self._stood = self._expected = 0.0
        self._seen = 0
        self.factor = 1.0
        """On the odds of what the bins say."""

    def add(self, step: int, expected: float, stood: bool) -> None:
        left, self._seen = MEMORY ** (step - self._seen), step
        self._tried = self._tried * left + 1.0
        self._stood = self._stood * left + stood
        self._expected = self._expected * left + expected
        mean = self._expected / self._tried
        found = (self._stood + OWN_WEIGHT * mean) / (self._tried + OWN_WEIGHT)
        self.factor = _odds(found) / _odds(mean)


class Calibration:
    """One per engine."""

    def __init__(self, max_depth: int) -> None:
        self._tried = [0.0] * BINS
        self._stood = [0.0] * BINS
        self._odds = [_odds((place + 0.5) / BINS) for place in range(BINS)]
        self._positions = [_Share() for _ in range(max_depth)]
        self._rows: dict[str, _Share] = {}
        self._step = self._faded = 0

    def chance(self, row_id: str, place: int, confidence: float) -> float:
        """The chance that the row's draft at `place` is accepted if those before it are."""
        odds = self._odds[_bin(confidence)] * self._positions[place].factor
        if row_id in self._rows:
            odds *= self._rows[row_id].factor
        return _rate(odds)

    def observe(self, row_id: str, confidences: Sequence[float], accepted: int) -> None:
        """What became of a row's drafts; those after the first rejected one say nothing."""
        if self._faded < self._step:
            left, self._faded = MEMORY ** (self._step - self._faded), self._step
            self._tried = [count * left for count in self._tried]
            self._stood = [count * left for count in self._stood]
        row = self._rows.setdefault(row_id, _Share())
        for place, confidence in enumerate(confidences[: accepted + 1]):
            number, stood = _bin(confidence), place < accepted
            odds, position = self._odds[number], self._positions[place]
            # Each given the other: late positions are reached by good rows.
            of_row, of_position = _rate(odds * position.factor), _rate(odds * row.factor)
            row.add(self._step, of_row, stood)
            position.add(self._step, of_position, stood)
            self._tried[number] += 1.0
            self._stood[number] += stood
            prior = (number + 0.5) / BINS
            found = (self._stood[number] + BIN_WEIGHT * prior) / (self._tried[number] + BIN_WEIGHT)
            self._odds[number] = _odds(found)

    def tick(self, steps: int = 1) -> None:
        """More steps were taken; the last of them begins to be observed."""
        self._step += steps

    def keep(self, row_ids: Iterable[str]) -> None:
        """Forgets all other rows."""
        self._rows = {row_id: self._rows[row_id] for row_id in row_ids if row_id in self._rows}


def _bin(confidence: float) -> int:
    """What is no number, from a head that is damaged, is no confidence either."""
    return min(int(confidence * BINS), BINS - 1) if confidence > 0.0 else 0


def _rate(odds: float) -> float:
    return odds / (1.0 + odds)


def _odds(rate: float) -> float:
    rate = min(max(rate, LOWEST), HIGHEST)
    return rate / (1.0 - rate)
