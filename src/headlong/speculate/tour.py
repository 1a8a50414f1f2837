"""Getting to know what steps of so many rows cost: depths tried in turn, deep ones only where drafting seems to pay.
Changes speed, never tokens."""

from collections.abc import Hashable, Sequence

from headlong.speculate.costs import Costs, bucket
from headlong.speculate.utility import Candidate, best

STOPS = (0, 1, 1, 1, 3, 5, 3, 0, 5, 3, 5, 0)
"""Depths in the order of what they may lose. Each comes thrice, so that one measurement may go wrong; a single draft
thrice in a row, since the first after a plain step has its head catch up."""
SHALLOW = 4
"""The first stops, which tell what a plain step and a single draft cost."""

REACH = 2
"""Times the best depth by what is known so far that a deeper one may be."""


class Tours:
    """How far the tours are, one for each kind of step and row count."""

    def __init__(self) -> None:
        self._taken: dict[tuple[Hashable, int], int] = {}

    def next(self, kind: Hashable, rows: Sequence[Candidate], costs: Costs) -> int | None:
        """The depth to try now; None where the tour is over, or waits until drafting pays."""
        if self._is_over(kind, len(rows)):
            return None
        taken = self._taken.get((kind, bucket(len(rows))), 0)
        if taken >= SHALLOW and STOPS[taken] > REACH * max(best(rows, costs).depths):
            return None
        return STOPS[taken]

    def took(self, kind: Hashable, rows: int) -> None:
        """The depth was tried and measured."""
        place = kind, bucket(rows)
        self._taken[place] = self._taken.get(place, 0) + 1

    def end(self, kind: Hashable, rows: int) -> None:
        """What so many rows cost is known from elsewhere."""
        self._taken[kind, bucket(rows)] = len(STOPS)

    def begin_again(self) -> None:
        self._taken.clear()

    def _is_over(self, kind: Hashable, rows: int) -> bool:
        """Whether so many rows were toured, or at least half or at most twice as many."""
        return any(
            taken >= len(STOPS) and known_kind == kind and rows <= 2 * known <= 4 * rows
            for (known_kind, known), taken in self._taken.items()
        )
