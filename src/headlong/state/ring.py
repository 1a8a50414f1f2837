"""What a row's latest tokens leave behind, one vector each, in a ring. Rolled back by moving the length.

Kernels may assume: the tensor is contiguous, [slots, places, width]; position p of a row lies at place p % places of
its slot; slot 0 is written for padding and read by nobody; what lies past a row's length is arbitrary, even NaN. There
are so many places that the drafts of a step overwrite nothing that is read after they are taken back, and what is kept
of a row that ended inside its last drafts is whole.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headlong.checkpoint.tensor_info import zeros
from headlong.state.layer_state import LayerState, Places, Saved
from headlong.state.specs import Capacity, LayerSpec, Rollback


@dataclass(frozen=True)
class RingSpec(LayerSpec):
    """A token is read together with the `span` − 1 before it; each leaves `width` numbers."""

    span: int
    width: int

    rollback = Rollback.LENGTH
    needs_checkpoints = True

    def allocate(self, capacity: Capacity) -> "Ring":
        places = self._places(capacity.max_drafts)
        return Ring(zeros((capacity.num_slots + 1, places, self.width), capacity.dtype, capacity.device))

    def bytes_per_slot(self, max_drafts: int, dtype: torch.dtype) -> int:
        return self._places(max_drafts) * self.width * dtype.itemsize

    def _places(self, max_drafts: int) -> int:
        return self.span + max_drafts


@dataclass(frozen=True)
class Ring(LayerState):
    """Vectors [slots, places, width]."""

    tokens: Tensor

    @property
    def num_bytes(self) -> int:
        return self.tokens.nbytes

    def save(self, slot: int, num_replay: int) -> Saved:  # noqa: ARG002 - places follow from positions
        return (self.tokens[slot].clone(),)

    def restore(self, slot: int, saved: Saved) -> None:
        (tokens,) = saved
        self.tokens[slot] = tokens

    def check(self, places: Places) -> None:
        assert len(self.tokens) == places.slots + 1, "slots without a ring"
