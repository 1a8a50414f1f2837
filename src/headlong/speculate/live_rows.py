"""The rows of a draft that still go on, while it is being made. Tokens and hidden states are the drafter's business."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headlong.types import Plan, RowPlan


class LiveRows:
    """Some rows of a plan, and how many drafts each has."""

    def __init__(self, plan: Plan, rows: Sequence[RowPlan]) -> None:
        self.rows = rows
        self.live = [number for number, row in enumerate(rows) if row.num_drafts]
        """Of `rows`, those that draft in the pass at hand."""
        self.counts = [0] * len(rows)
        self._gate = plan.gate if any(row.request.adaptive for row in rows) else None

    def advance(self, logits_LT: Tensor, drafted_L: Tensor) -> list[int]:
        """Counts the drafts that the live rows just made, given by their places in the logits, and gives the rows'
        places that go on: they are the live rows from now on."""
        kept, going = [True] * len(self.live), [True] * len(self.live)
        if self._gate is not None:
            chosen_L = torch.softmax(logits_LT, dim=-1).gather(1, drafted_L[:, None])[:, 0]
            ids = [self.rows[number].request.id for number in self.live]
            kept, going = self._gate.judge(ids, chosen_L.tolist())
        places = []
        for place, number in enumerate(self.live):
            self.counts[number] += kept[place]
            if going[place] and self.counts[number] < self.rows[number].num_drafts:
                places.append(place)
        self.live = [self.live[place] for place in places]
        return places
