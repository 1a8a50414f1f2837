"""A recurrent memory with the inputs of the last step's drafts. Rolled back by replay.

A slot keeps one committed memory and, of every token that may still be rejected, the small inputs from which its update
is made. The next step replays the accepted ones before its own tokens, in the order of plain decoding, so that a
rejected draft is simply not replayed. Kernels may assume: both tensors are contiguous, slot 0 is written for padding
and nobody reads it, and of a slot's drafts those past `num_replay` are arbitrary.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headlong.checkpoint.tensor_info import zeros
from headlong.state.layer_state import LayerState, Places, Saved
from headlong.state.specs import Capacity, LayerSpec, Rollback


@dataclass(frozen=True)
class RecurrentSpec(LayerSpec):
    """The shape of one row's memory, and of what one draft leaves behind to be replayed."""

    memory: tuple[int, ...]
    draft: tuple[int, ...]

    rollback = Rollback.REPLAY
    needs_checkpoints = True

    def allocate(self, capacity: Capacity) -> "Recurrent":
        places, c = capacity.num_slots + 1, capacity
        return Recurrent(
            zeros((places, *self.memory), c.dtype, c.device),
            zeros((places, c.max_drafts, *self.draft), c.dtype, c.device),
        )

    def bytes_per_slot(self, max_drafts: int, dtype: torch.dtype) -> int:
        return (math.prod(self.memory) + max_drafts * math.prod(self.draft)) * dtype.itemsize


@dataclass(frozen=True)
class Recurrent(LayerState):
    """`committed` is [slots, …] without any token that could be taken back, `drafts` is [slots, K, …]."""

    committed: Tensor
    drafts: Tensor

    @property
    def num_bytes(self) -> int:
        return self.committed.nbytes + self.drafts.nbytes

    def clear(self, slot: int) -> None:
        self.committed[slot] = 0.0

    def save(self, slot: int, num_replay: int) -> Saved:
        return self.committed[slot].clone(), self.drafts[slot, :num_replay].clone()

    def restore(self, slot: int, saved: Saved) -> None:
        committed, drafts = saved
        self.committed[slot] = committed
        self.drafts[slot, : len(drafts)] = drafts

    def check(self, places: Places) -> None:
        assert len(self.committed) == len(self.drafts) == places.slots + 1, "slots without a memory"
