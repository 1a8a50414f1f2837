"""One vector for every few positions, on pages: entries that a compressor made. Rolled back by moving the length.

An entry belongs to the page in which its last token lies. Kernels may assume: the tensor is contiguous, [pages, entries
a page, width]; entry e ends at position q = (e + 1) · ratio − 1 and lies on the row's page q // page_size, at place
(q % page_size) // ratio; page 0 is written for padding; entries that end past a row's length are arbitrary, even NaN.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headlong.checkpoint.tensor_info import zeros
from headlong.state.layer_state import LayerState, Places
from headlong.state.specs import Capacity, LayerSpec, Rollback


@dataclass(frozen=True)
class EntriesSpec(LayerSpec):
    """An entry of `width` numbers for every `ratio` positions."""

    ratio: int
    width: int

    rollback = Rollback.LENGTH

    def allocate(self, capacity: Capacity) -> "Entries":
        shape = (capacity.num_pages + 1, self._each(capacity.page_size), self.width)
        return Entries(zeros(shape, capacity.kv_dtype, capacity.device))

    def bytes_per_page(self, page_size: int, kv_dtype: torch.dtype) -> int:
        return self._each(page_size) * self.width * kv_dtype.itemsize

    def _each(self, page_size: int) -> int:
        """The most entries that end on one page."""
        return -(-page_size // self.ratio)


@dataclass(frozen=True)
class Entries(LayerState):
    """Entries [pages, entries a page, width]. Nothing lies in slots."""

    made: Tensor

    @property
    def num_bytes(self) -> int:
        return self.made.nbytes

    def copy_page(self, source: int, target: int) -> None:
        self.made[target] = self.made[source]

    def check(self, places: Places) -> None:
        assert len(self.made) == places.pages + 1, "pages without entries"
