"""What a layer keeps that attends to a window of tokens and to compressed entries: rings and entries of both its
compressors. All are rolled back by moving the length."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headlong.state.entries import Entries, EntriesSpec
from headlong.state.layer_state import LayerState, Places, Saved
from headlong.state.ring import Ring, RingSpec
from headlong.state.specs import Capacity, LayerSpec, Rollback


@dataclass(frozen=True)
class CompressorSpec:
    """What one compressor keeps: of a token the values and gates, `width` numbers, of which an entry takes `span`
    tokens; and an entry of `dim` numbers for every `ratio` tokens."""

    ratio: int
    span: int
    width: int
    dim: int

    @property
    def ring(self) -> RingSpec:
        return RingSpec(self.span, self.width)

    @property
    def entries(self) -> EntriesSpec:
        return EntriesSpec(self.ratio, self.dim)


@dataclass(frozen=True)
class CompressedKvSpec(LayerSpec):
    """Keys of the last `window` tokens, of `head_dim` numbers each, and what the layer's compressors keep: none, that
    of its entries, or also that of its indexer."""

    window: int
    head_dim: int
    compressors: tuple[CompressorSpec, ...] = ()

    rollback = Rollback.LENGTH
    needs_checkpoints = True

    def allocate(self, capacity: Capacity) -> "CompressedKv":
        window = RingSpec(self.window, self.head_dim).allocate(capacity)
        rings = [compressor.ring.allocate(capacity) for compressor in self.compressors]
        return CompressedKv(window, rings, [each.entries.allocate(capacity) for each in self.compressors])

    def bytes_per_page(self, page_size: int, kv_dtype: torch.dtype) -> int:
        return sum(each.entries.bytes_per_page(page_size, kv_dtype) for each in self.compressors)

    def bytes_per_slot(self, max_drafts: int, dtype: torch.dtype) -> int:
        rings = [RingSpec(self.window, self.head_dim), *(each.ring for each in self.compressors)]
        return sum(ring.bytes_per_slot(max_drafts, dtype) for ring in rings)


class CompressedKv(LayerState):
    """The parts, and their tensors as the ops take them."""

    def __init__(self, window: Ring, rings: Sequence[Ring], entries: Sequence[Entries]) -> None:
        self._rings, self._entries = (window, *rings), tuple(entries)

    @property
    def window(self) -> Tensor:
        """[slots, places, head_dim]"""
        return self._rings[0].tokens

    def compressor(self, number: int) -> tuple[Tensor, Tensor]:
        """The ring and the entries of a compressor."""
        return self._rings[1 + number].tokens, self._entries[number].made

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in (*self._rings, *self._entries))

    def copy_page(self, source: int, target: int) -> None:
        for entries in self._entries:
            entries.copy_page(source, target)

    def save(self, slot: int, num_replay: int) -> Saved:
        return tuple(tensor for ring in self._rings for tensor in ring.save(slot, num_replay))

    def restore(self, slot: int, saved: Saved) -> None:
        for ring, tensor in zip(self._rings, saved, strict=True):
            ring.restore(slot, (tensor,))

    def check(self, places: Places) -> None:
        for part in (*self._rings, *self._entries):
            part.check(places)
