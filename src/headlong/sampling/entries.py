"""The positions a step samples at: host-side flags per row, device tensors per logits row where needed."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from headlong.params import SamplingParams
from headlong.sampling.changes import Early
from headlong.sampling.constraints import Allowed, Asked, collect
from headlong.sampling.penalties import Penalised, penalise
from headlong.sampling.table import SamplingTable


class Entry(NamedTuple):
    """`num_tokens` tokens to be sampled one after the other, the first at absolute `position`, after `offset` drafts
    of this step."""

    slot: int
    position: int
    offset: int
    num_tokens: int = 1


class Entries:
    """L tokens to be sampled, of R rows. Python looks at rows; tensors are made when first asked for, and greedy
    rows without processors never ask."""

    def __init__(
        self,
        rows: Sequence[Entry],
        table: SamplingTable,
        drafts_RK: Tensor | None,
        *,
        patient: bool = True,
    ) -> None:
        """`drafts_RK` has a line for each row; its first `offset` (and, further on, more) stand before. Without
        `patient`, as drafts are made, masks that take long are left out."""
        self._patient = patient
        self.rows = rows
        self.device = table.device
        requests = [table.requests[row.slot] for row in rows]
        self.row_params = [request.params for request in requests if request is not None]
        assert len(self.row_params) == len(rows), "a row without a request cannot be sampled"
        self._drafts_RK = None if drafts_RK is None else drafts_RK.to(self.device)
        self._table = table

    def which(self, wanted: Callable[[SamplingParams], bool]) -> list[int]:
        """Indices of the entries whose request has it. Decided on the host."""
        chosen, first = [], 0
        for row, params in zip(self.rows, self.row_params, strict=True):
            if wanted(params):
                chosen.extend(range(first, first + row.num_tokens))
            first += row.num_tokens
        return chosen

    def where(self, wanted: Callable[[SamplingParams], bool]) -> Tensor | None:
        """`which` as a tensor, or None if there are none."""
        chosen = self.which(wanted)
        return torch.tensor(chosen, device=self.device) if chosen else None

    @cached_property
    def params(self) -> list[SamplingParams]:
        """The sampling parameters of each entry."""
        return [p for row, p in zip(self.rows, self.row_params, strict=True) for _ in range(row.num_tokens)]

    @property
    def slots_L(self) -> Tensor:
        return self._fields_L3[:, 0]

    @property
    def positions_L(self) -> Tensor:
        return self._fields_L3[:, 1]

    @property
    def offsets_L(self) -> Tensor:
        return self._fields_L3[:, 2]

    @cached_property
    def prefix_LK(self) -> Tensor | None:
        """Each entry's line of drafts, of which the first `offset` stand before it."""
        return None if self._drafts_RK is None else self._drafts_RK[self._row_L]

    def penalised(self, logits_LV: Tensor) -> Tensor:
        biased_M = self.where(lambda p: p.biased)
        penalised = self.which(lambda p: p.penalised)
        if not penalised and biased_M is None and self.early is None and self.allowed is None:
            return logits_LV
        logits_LV = logits_LV.clone()
        if penalised:
            self._penalise(logits_LV, penalised)
        if biased_M is not None:
            logits_LV[biased_M] += self._table.bias[self.slots_L[biased_M]]
        return logits_LV

    def _penalise(self, logits_LV: Tensor, index: list[int]) -> None:
        rows, first = [], 0
        for row, params in zip(self.rows, self.row_params, strict=True):
            if params.penalised:
                rows.append(Penalised(self._table.seen[row.slot], first, row.num_tokens, row.offset))
            first += row.num_tokens
        at_M = torch.tensor(index, device=logits_LV.device)
        prefix_MK = None if self.prefix_LK is None else self.prefix_LK[at_M]
        penalise(logits_LV, rows, self._table.penalties(self.slots_L[at_M]), prefix_MK)

    @property
    def early(self) -> Early | None:
        return self._early

    @property
    def allowed(self) -> Allowed | None:
        return self._allowed

    @cached_property
    def _early(self) -> Early | None:
        at_M = self.where(lambda p: p.min_tokens > 0)
        return None if at_M is None else Early(at_M, self.slots_L[at_M], self.positions_L[at_M])

    @cached_property
    def _allowed(self) -> Allowed | None:
        constraints = self._table.constraints
        if not constraints:
            return None
        asked, first = [], 0
        for number, row in enumerate(self.rows):
            if row.slot in constraints and row.num_tokens:
                asked.append(Asked(constraints[row.slot], number, row.offset, first, row.num_tokens))
            first += row.num_tokens
        size = self._table.vocab_size
        return collect(asked, self._drafts_RK, size, self.device, patient=self._patient)

    @cached_property
    def _row_L(self) -> Tensor:
        counts = torch.tensor([row.num_tokens for row in self.rows], device=self.device)
        return torch.repeat_interleave(counts, output_size=sum(row.num_tokens for row in self.rows))

    @cached_property
    def _fields_L3(self) -> Tensor:
        """Slot, position, offset; all but the slot go up by one within a row."""
        fields_R3 = torch.tensor([row[:3] for row in self.rows], device=self.device).view(-1, 3)
        if all(row.num_tokens == 1 for row in self.rows):
            return fields_R3
        firsts, total = [], 0
        for row in self.rows:
            firsts.append(total)
            total += row.num_tokens
        ahead_L = (
            torch.arange(total, device=self.device) - torch.tensor(firsts, device=self.device)[self._row_L]
        )
        moving = torch.tensor([0, 1, 1], device=self.device)
        return fields_R3[self._row_L] + ahead_L[:, None] * moving
