"""The positions a step samples at, one entry per logits row, as tensors and as host-side flags."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headlong.params import SamplingParams
from headlong.sampling.table import SamplingTable


@dataclass(frozen=True)
class Entry:
    """One token to be sampled: at absolute `position`, after `offset` drafts of this step."""

    slot: int
    position: int
    offset: int
    num_generated: int
    """Tokens the row will have produced before this one."""


@dataclass(frozen=True)
class Entries:
    """L entries with what the processors gather. `prefix_LK` holds each entry's row of drafts, of which the
    first `offset` stand before it."""

    host: tuple[Entry, ...]
    params: tuple[SamplingParams, ...]
    slots_L: Tensor
    positions_L: Tensor
    offsets_L: Tensor
    generated_L: Tensor
    prefix_LK: Tensor | None

    @classmethod
    def of(cls, entries: Sequence[Entry], table: SamplingTable, prefix_LK: Tensor | None) -> "Entries":
        fields = torch.tensor(
            [(e.slot, e.position, e.offset, e.num_generated) for e in entries], device=table.device
        ).view(-1, 4)
        requests = [table.requests[e.slot] for e in entries]
        assert all(request is not None for request in requests)
        params = tuple(request.params for request in requests if request is not None)
        slots, positions, offsets, generated = fields.unbind(1)
        return cls(tuple(entries), params, slots, positions, offsets, generated, prefix_LK)

    def where(self, wanted: Callable[[SamplingParams], bool]) -> Tensor | None:
        """Indices of the entries whose request has it, or None if there are none. Decided on the host."""
        chosen = [i for i, params in enumerate(self.params) if wanted(params)]
        return torch.tensor(chosen, device=self.slots_L.device) if chosen else None
