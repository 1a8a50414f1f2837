"""What a layer asks the state to keep for it, and how much of everything there will be.

A spec is the description of one kind of layer state before there are tensors: it counts bytes, says how it is rolled
back, and allocates. The kinds are beside their specs: `paged_kv.py`, `latent_kv.py`, `recurrent.py`, `conv_window.py`
and, composed of the last two, `delta_net.py`; `ring.py`, `entries.py` and, composed of these, `compressed_kv.py`. A new
kind is a new pair of such classes; nothing else in the engine asks what kind a spec or a layer state is.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

import torch

from headlong.state.layer_state import LayerState

CHECKPOINTS_PER_SLOT = 2
"""Checkpoints for each slot that the prefix cache may keep on the device where nobody says how much."""


class Rollback(Enum):
    """How rejected drafts are taken back."""

    LENGTH = "length"
    """Positions decide: what lies past a row's length is not read before it is written again. Tokens may be fed one
    after the other in several passes before any of them is committed."""
    REPLAY = "replay"
    """Drafts are kept beside the committed state, and the next step replays those that were accepted. All tokens that
    may be rejected must be fed in one pass."""


@dataclass(frozen=True)
class HeadPlace:
    """Where an MTP head keeps its own state, if that is not where its target does."""

    layers: frozenset[str]
    kv_dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """How much state there is, and in which dtypes. Place 0 of pages and slots comes on top."""

    num_pages: int
    page_size: int
    num_slots: int
    max_drafts: int
    kv_dtype: torch.dtype
    """The dtype of what lies on pages."""
    dtype: torch.dtype
    """The dtype of what lies in slots."""
    device: torch.device
    head: HeadPlace | None = None

    def of(self, layer: str) -> "Capacity":
        """The capacity for this layer, which may be one of a head with a place of its own."""
        if self.head is None or layer not in self.head.layers:
            return self
        return replace(self, kv_dtype=self.head.kv_dtype, device=self.head.device)


@dataclass(frozen=True, kw_only=True)
class PrefixCapacity:
    """How much of what rows computed is kept for others, besides the pages nobody holds."""

    device_bytes: int | None = None
    """Bytes of checkpoints on the device; by default twice what all slots hold."""
    host_bytes: int | None = None
    """Bytes of checkpoints in host memory, of those pushed out of the device; by default four times as much."""
    head: bool = False
    """Whether there is an MTP head, whose keys only rows that draft write."""


class LayerSpec(ABC):
    """What one layer keeps. Knows sizes, no tensors; a kind that keeps nothing on pages, or nothing in slots, leaves
    that method as it is here."""

    rollback: Rollback | None = None
    """None for a kind that cannot be rolled back: it is refused at load."""
    needs_checkpoints: bool = False
    """Whether it keeps anything in slots that earlier tokens determine: a prompt can then go on only where a checkpoint
    was saved, not at any position whose pages are there."""

    @abstractmethod
    def allocate(self, capacity: Capacity) -> LayerState:
        """The layer's tensors, cleared."""

    @property
    def conv_span(self) -> int | None:
        """How many inputs its causal convolution looks at, the current one among them; None without a convolution."""
        return None

    def bytes_per_token(self, kv_dtype: torch.dtype) -> int:  # noqa: ARG002
        """Bytes on pages for each position, with all that belongs to it there, such as the scales of a quantised
        page."""
        return 0

    def bytes_per_page(self, page_size: int, kv_dtype: torch.dtype) -> int:
        """Bytes on each page. A kind that does not keep something of every position overrides this."""
        return page_size * self.bytes_per_token(kv_dtype)

    def bytes_per_slot(self, max_drafts: int, dtype: torch.dtype) -> int:  # noqa: ARG002
        """Bytes in each slot, for `max_drafts` drafts at most."""
        return 0


def bytes_per_page(specs: Iterable[LayerSpec], page_size: int, kv_dtype: torch.dtype) -> int:
    """Bytes on each page, of all layers."""
    return sum(spec.bytes_per_page(page_size, kv_dtype) for spec in specs)


def bytes_per_slot(specs: Iterable[LayerSpec], max_drafts: int, dtype: torch.dtype) -> int:
    """Bytes in each slot, of all layers."""
    return sum(spec.bytes_per_slot(max_drafts, dtype) for spec in specs)


def conv_span(specs: Iterable[LayerSpec]) -> int | None:
    """How many inputs the layers' causal convolutions look at, if there are any; it is the same for all of them."""
    found = {spec.conv_span for spec in specs if spec.conv_span is not None}
    assert len(found) <= 1, "the layers' convolutions look at different numbers of inputs"
    return next(iter(found), None)
