"""The tensors behind each kind of layer state. Knows shapes, not rows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headlong.checkpoint.tensor_info import zeros
from headlong.errors import ConfigError
from headlong.ops.gated_delta.reference import DeltaState
from headlong.ops.paged_attention.reference import HEAD_ALIGN
from headlong.state.specs import Capacity, DeltaNetSpec, KvSpec, LayerSpec


@dataclass(frozen=True)
class KvState:
    """[pages, heads, page_size, head_dim padded]. Stale entries past a row's length are never read."""

    keys: Tensor
    values: Tensor

    def clear(self, slot: int) -> None:
        """Nothing to do: pages belong to no slot."""

    def copy_page(self, source: int, target: int) -> None:
        self.keys[target] = self.keys[source]
        self.values[target] = self.values[source]


@dataclass(frozen=True)
class DeltaNetState:
    """The recurrent memory with its replay buffer, and the convolution windows [slots, window, channels]."""

    delta: DeltaState
    windows: Tensor

    def clear(self, slot: int) -> None:
        self.delta.committed_SHDE[slot] = 0.0
        self.windows[slot] = 0.0

    def save(self, slot: int, num_replay: int) -> tuple[Tensor, ...]:
        """Copies of what a slot holds, of the drafts only those still to be replayed."""
        drafts = self.delta.drafts_SKHX[slot]
        past = self.windows.shape[1] - len(drafts)
        parts = (
            self.delta.committed_SHDE[slot],
            drafts[:num_replay],
            self.windows[slot, : past + num_replay],
        )
        return tuple(part.clone() for part in parts)

    def restore(self, slot: int, saved: tuple[Tensor, ...]) -> None:
        """Into a cleared slot."""
        memory, drafts, window = saved
        self.delta.committed_SHDE[slot] = memory
        self.delta.drafts_SKHX[slot, : len(drafts)] = drafts
        self.windows[slot, : len(window)] = window


LayerState = KvState | DeltaNetState


def allocate(name: str, spec: LayerSpec, capacity: Capacity) -> LayerState:
    """Tensors for one layer; `name` is for the complaint if it cannot be served."""
    c = capacity
    if isinstance(spec, KvSpec):
        width = spec.head_dim + -spec.head_dim % HEAD_ALIGN
        shape = (c.num_pages + 1, spec.num_heads, c.page_size, width)
        return KvState(*(zeros(shape, c.kv_dtype, c.device) for _ in range(2)))
    if not isinstance(spec, DeltaNetSpec):
        raise ConfigError(
            f"{name}: its state ({type(spec).__name__}) cannot be rolled back, so it cannot be served"
        )
    places, width = c.num_slots + 1, spec.key_dim + spec.value_dim + 2
    shapes = (
        (places, spec.num_heads, spec.key_dim, spec.value_dim),
        (places, c.max_drafts, spec.num_heads, width),
        (places, spec.conv_kernel - 1 + c.max_drafts, spec.conv_channels),
    )
    memory, drafts, windows = (zeros(shape, c.dtype, c.device) for shape in shapes)
    return DeltaNetState(DeltaState(memory, drafts), windows)


def bytes_per_token(specs: list[LayerSpec], kv_dtype: torch.dtype) -> int:
    kv = [spec for spec in specs if isinstance(spec, KvSpec)]
    return sum(2 * s.num_heads * (s.head_dim + -s.head_dim % HEAD_ALIGN) for s in kv) * kv_dtype.itemsize


def bytes_per_slot(specs: list[LayerSpec], max_drafts: int, dtype: torch.dtype) -> int:
    total = 0
    for spec in specs:
        if isinstance(spec, DeltaNetSpec):
            total += spec.num_heads * spec.key_dim * spec.value_dim
            total += max_drafts * spec.num_heads * (spec.key_dim + spec.value_dim + 2)
            total += (spec.conv_kernel - 1 + max_drafts) * spec.conv_channels
    return total * dtype.itemsize
