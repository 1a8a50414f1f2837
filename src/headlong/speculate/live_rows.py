"""The rows of a draft that still go on, while it is being made. Tokens and hidden states are the drafter's business."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from headlong.types import Plan, RowPlan


class Rows(Protocol):
    """Who drafts in the pass at hand."""

    live: list[int]
    """Numbers of the rows that do, among all that draft in this step."""

    def advance(self, logits_LT: Tensor | None, places_L: Tensor) -> list[int] | None:
        """Told what the live rows just drafted: where that stands in their logits, if there are any. Gives the places,
        among the live rows, of those that go on; None where all of them do, or nobody. They are live from now on."""
        ...


class LiveRows:
    """Some rows of a plan, each to its own depth or to where the plan's stop rule ends it; and the drafts each has."""

    def __init__(self, plan: Plan, rows: Sequence[RowPlan]) -> None:
        self.rows = rows
        self.live = [number for number, row in enumerate(rows) if row.num_drafts]
        self.counts = [0] * len(rows)
        self._stop = plan.draft_stop if any(row.request.adaptive for row in rows) else None

    def advance(self, logits_LT: Tensor | None, places_L: Tensor) -> list[int] | None:
        kept = goes_on = [True] * len(self.live)
        if self._stop is not None:
            assert logits_LT is not None, "a stop rule is told how sure the drafter is"
            chosen_L = torch.softmax(logits_LT, dim=-1).gather(1, places_L[:, None])[:, 0]
            ids = [self.rows[number].request.id for number in self.live]
            kept, goes_on = self._stop.judge(ids, chosen_L.tolist())
        stay = []
        for place, number in enumerate(self.live):
            self.counts[number] += kept[place]
            if goes_on[place] and self.counts[number] < self.rows[number].num_drafts:
                stay.append(place)
        if len(stay) == len(self.live):
            return None
        self.live = [self.live[place] for place in stay]
        return stay


class EvenRows:
    """Rows that all draft to one depth, and never ask the host: what one has beyond its own depth is padding."""

    def __init__(self, num_rows: int, num_drafts: int) -> None:
        self.live = list(range(num_rows))
        self._left = num_drafts

    def advance(self, logits_LT: Tensor | None, places_L: Tensor) -> None:  # noqa: ARG002
        self._left -= 1
        if not self._left:
            self.live = []
