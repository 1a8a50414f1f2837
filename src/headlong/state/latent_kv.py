"""One vector for every position, on pages: keys and values of all heads in the compressed form. Rolled back by moving
the length.

A position holds the latent, from which every head's keys and values follow, and the rotated part of the key, which all
heads share. Kernels may assume: the tensor is contiguous, [pages, page size, padded width]; a vector is the latent,
then the rotated part, then zeros up to a multiple of `HEAD_ALIGN`; pages and positions are those of `paged_kv.py`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headlong.checkpoint.tensor_info import zeros
from headlong.ops.paged_attention.reference import HEAD_ALIGN
from headlong.state.layer_state import LayerState, Places
from headlong.state.specs import Capacity, LayerSpec, Rollback


@dataclass(frozen=True)
class LatentKvSpec(LayerSpec):
    """A latent of `rank` numbers and a rotated part of `rope_dim` for every position."""

    rank: int
    rope_dim: int

    rollback = Rollback.LENGTH

    @property
    def padded_width(self) -> int:
        width = self.rank + self.rope_dim
        return width + -width % HEAD_ALIGN

    def allocate(self, capacity: Capacity) -> "LatentKv":
        shape = (capacity.num_pages + 1, capacity.page_size, self.padded_width)
        return LatentKv(zeros(shape, capacity.kv_dtype, capacity.device))

    def bytes_per_token(self, kv_dtype: torch.dtype) -> int:
        return self.padded_width * kv_dtype.itemsize


@dataclass(frozen=True)
class LatentKv(LayerState):
    """Latents [pages, page size, padded width]. Nothing lies in slots."""

    latents: Tensor

    @property
    def num_bytes(self) -> int:
        return self.latents.nbytes

    def copy_page(self, source: int, target: int) -> None:
        self.latents[target] = self.latents[source]

    def check(self, places: Places) -> None:
        assert len(self.latents) == places.pages + 1, "pages without latents"
