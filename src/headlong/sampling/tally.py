"""What penalised rows have seen, counted on the device: for steps that must not ask the host.

Such a step adds what it emits by itself; what other steps emitted is brought before the next one. The host's own counts
decide what is right. One number for each slot and token, as the kernels of ops/penalise read it.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from headlong.ops.triton_step import SEEN_IN_PROMPT
from headlong.sampling.penalties import Seen


class Tally:
    """Rows show what they have seen before each step that counts here."""

    def __init__(self, seen: Mapping[int, Seen], shape: tuple[int, int], device: torch.device) -> None:
        """`seen` by slot, as it is at any time; `shape` slots and tokens."""
        self._seen, self._shape, self._device = seen, shape, device
        self._known: dict[int, tuple[Seen, int]] = {}
        """The row that was counted last in each slot, and how many tokens it had produced by then."""

    @cached_property
    def counts_SV(self) -> Tensor:
        """The counts by slot and token; those of rows that are not penalised mean nothing."""
        return torch.zeros(self._shape, dtype=torch.int32, device=self._device)

    def update(self, slots: Iterable[int]) -> None:
        """Brings the counts of these slots up to date. No step may be under way whose tokens the host has not counted
        yet."""
        behind = []
        for slot in slots:
            seen = self._seen.get(slot)
            if seen is None:
                continue
            counted, num_produced = self._known.get(slot, (None, 0))
            if counted is not seen or num_produced != seen.num_produced:
                self._known[slot] = seen, seen.num_produced
                behind.append((slot, seen))
        if behind:
            self._bring(behind)

    def advance(self, slot: int, num_tokens: int) -> None:
        """Notes that a step has counted so many tokens of a penalised row on the device."""
        seen, num_produced = self._known[slot]
        self._known[slot] = seen, num_produced + num_tokens

    def _bring(self, rows: list[tuple[int, Seen]]) -> None:
        slots = np.concatenate([np.full(len(seen), slot, dtype=np.int64) for slot, seen in rows])
        ids = np.concatenate([np.array(seen.ids, dtype=np.int64) for _, seen in rows])
        counts = np.concatenate([np.array(seen.counts, dtype=np.int64) for _, seen in rows])
        values = np.where(counts > 0, counts, SEEN_IN_PROMPT)
        slot_T, id_T, value_T = torch.from_numpy(np.stack((slots, ids, values))).to(self._device)
        self.counts_SV[torch.tensor([slot for slot, _ in rows], device=self._device)] = 0
        self.counts_SV[slot_T, id_T] = value_T.to(torch.int32)
