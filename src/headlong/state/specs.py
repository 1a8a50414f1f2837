"""What a layer asks the state to keep for it. Each kind says how it is rolled back."""

from dataclasses import dataclass, replace

import torch

CHECKPOINTS_PER_SLOT = 2
"""That the prefix cache may keep on the device where nobody says how much."""


@dataclass(frozen=True)
class KvSpec:
    """Keys and values of every position; rolled back by moving the length."""

    num_heads: int
    head_dim: int


@dataclass(frozen=True)
class DeltaNetSpec:
    """A recurrent memory and a convolution window; rolled back by replay and by a read offset."""

    num_heads: int
    key_dim: int
    value_dim: int
    conv_channels: int
    conv_kernel: int


LayerSpec = KvSpec | DeltaNetSpec


@dataclass(frozen=True)
class HeadPlace:
    """Where an MTP head keeps its own state, if that is not where its target does."""

    layers: frozenset[str]
    kv_dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """How much state there is, and of what kind. Place 0 of pages and slots comes on top."""

    num_pages: int
    page_size: int
    num_slots: int
    max_drafts: int
    kv_dtype: torch.dtype
    dtype: torch.dtype
    device: torch.device
    head: HeadPlace | None = None

    def of(self, layer: str) -> "Capacity":
        """As it is for this layer."""
        if self.head is None or layer not in self.head.layers:
            return self
        return replace(self, kv_dtype=self.head.kv_dtype, device=self.head.device)


@dataclass(frozen=True, kw_only=True)
class PrefixCapacity:
    """How much of what rows computed is kept for others, besides the pages nobody holds."""

    device_bytes: int | None = None
    """Of recurrent checkpoints; by default twice what all slots hold."""
    host_bytes: int | None = None
    """Of those pushed out of the device; by default four times as much."""
    head: bool = False
    """Whether there is an MTP head, whose keys only rows that draft write."""
