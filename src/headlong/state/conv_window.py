"""The latest inputs of a causal convolution. Rolled back by the offset at which they are read.

A slot keeps the inputs that came before the last step's drafts, and those of the drafts after them. The next step reads
on from the accepted ones: `num_replay` places further. Kernels may assume: the tensor is contiguous, slot 0 is written
for padding and read by nobody, and of a window the places past `past + num_replay` are arbitrary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headlong.checkpoint.tensor_info import zeros
from headlong.state.layer_state import LayerState, Places, Saved
from headlong.state.specs import Capacity, LayerSpec, Rollback


@dataclass(frozen=True)
class ConvWindowSpec(LayerSpec):
    """A convolution over `conv_kernel` inputs of `channels`, the current one among them."""

    channels: int
    conv_kernel: int

    rollback = Rollback.REPLAY
    needs_checkpoints = True

    @property
    def conv_span(self) -> int:
        return self.conv_kernel

    def allocate(self, capacity: Capacity) -> "ConvWindow":
        c, past = capacity, self.conv_kernel - 1
        shape = (c.num_slots + 1, past + c.max_drafts, self.channels)
        return ConvWindow(zeros(shape, c.dtype, c.device), past)

    def bytes_per_slot(self, max_drafts: int, dtype: torch.dtype) -> int:
        return (self.conv_kernel - 1 + max_drafts) * self.channels * dtype.itemsize


@dataclass(frozen=True)
class ConvWindow(LayerState):
    """`windows` is [slots, past + K, channels]: `past` inputs before the drafts, and those of up to K drafts."""

    windows: Tensor
    past: int

    @property
    def num_bytes(self) -> int:
        return self.windows.nbytes

    def clear(self, slot: int) -> None:
        self.windows[slot] = 0.0

    def save(self, slot: int, num_replay: int) -> Saved:
        return (self.windows[slot, : self.past + num_replay].clone(),)

    def restore(self, slot: int, saved: Saved) -> None:
        (window,) = saved
        self.windows[slot, : len(window)] = window

    def check(self, places: Places) -> None:
        assert len(self.windows) == places.slots + 1, "slots without a window"
