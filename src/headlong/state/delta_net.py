"""What a Gated DeltaNet layer keeps: a recurrent memory and a convolution window, both rolled back by replay."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headlong.ops.gated_delta.reference import DeltaState
from headlong.state.conv_window import ConvWindow, ConvWindowSpec
from headlong.state.layer_state import LayerState, Places, Saved
from headlong.state.recurrent import Recurrent, RecurrentSpec
from headlong.state.specs import Capacity, LayerSpec, Rollback


@dataclass(frozen=True)
class DeltaNetSpec(LayerSpec):
    """A memory [key_dim, value_dim] for each of `num_heads` value heads, and a window over `conv_channels`."""

    num_heads: int
    key_dim: int
    value_dim: int
    conv_channels: int
    conv_kernel: int

    rollback = Rollback.REPLAY
    needs_checkpoints = True

    @property
    def conv_span(self) -> int:
        return self.conv_kernel

    @property
    def memory(self) -> RecurrentSpec:
        """A draft leaves its key, its value, its decay and its β behind."""
        heads, key, value = self.num_heads, self.key_dim, self.value_dim
        return RecurrentSpec((heads, key, value), (heads, key + value + 2))

    @property
    def window(self) -> ConvWindowSpec:
        return ConvWindowSpec(self.conv_channels, self.conv_kernel)

    def allocate(self, capacity: Capacity) -> "DeltaNetState":
        return DeltaNetState(self.memory.allocate(capacity), self.window.allocate(capacity))

    def bytes_per_slot(self, max_drafts: int, dtype: torch.dtype) -> int:
        parts = self.memory, self.window
        return sum(part.bytes_per_slot(max_drafts, dtype) for part in parts)


class DeltaNetState(LayerState):
    """The two parts, and their tensors as the ops take them."""

    def __init__(self, memory: Recurrent, window: ConvWindow) -> None:
        self._memory, self._window = memory, window
        self.delta = DeltaState(memory.committed, memory.drafts)

    @property
    def windows(self) -> Tensor:
        """[slots, kernel - 1 + K, channels]"""
        return self._window.windows

    @property
    def num_bytes(self) -> int:
        return self._memory.num_bytes + self._window.num_bytes

    def clear(self, slot: int) -> None:
        self._memory.clear(slot)
        self._window.clear(slot)

    def save(self, slot: int, num_replay: int) -> Saved:
        return *self._memory.save(slot, num_replay), *self._window.save(slot, num_replay)

    def restore(self, slot: int, saved: Saved) -> None:
        committed, drafts, window = saved
        self._memory.restore(slot, (committed, drafts))
        self._window.restore(slot, (window,))

    def check(self, places: Places) -> None:
        self._memory.check(places)
        self._window.check(places)
