"""Keys and values of every position, on pages. Rolled back by moving the length.

The layout is known here and to the attention ops, to nobody else. Kernels may assume: both tensors are contiguous and
have one shape, [pages, KV heads, page size, padded head dimension]; heads are padded with zeros to a multiple of
`HEAD_ALIGN`; position p of a row lies in its page p // page_size at offset
p % page_size; page 0 is written for padding and read by nobody; what lies past a row's length is arbitrary, even NaN.
Other layouts (latent, sliding windows, quantised pages with their scales) are other kinds, with ops that read them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headlong.checkpoint.tensor_info import zeros
from headlong.ops.paged_attention.reference import HEAD_ALIGN
from headlong.state.layer_state import LayerState, Places
from headlong.state.specs import Capacity, LayerSpec, Rollback


@dataclass(frozen=True)
class PagedKvSpec(LayerSpec):
    """`num_heads` keys and as many values of `head_dim` for every position."""

    num_heads: int
    head_dim: int

    rollback = Rollback.LENGTH

    @property
    def padded_dim(self) -> int:
        return self.head_dim + -self.head_dim % HEAD_ALIGN

    def allocate(self, capacity: Capacity) -> "PagedKv":
        shape = (capacity.num_pages + 1, self.num_heads, capacity.page_size, self.padded_dim)
        keys, values = (zeros(shape, capacity.kv_dtype, capacity.device) for _ in range(2))
        return PagedKv(keys, values)

    def bytes_per_token(self, kv_dtype: torch.dtype) -> int:
        return 2 * self.num_heads * self.padded_dim * kv_dtype.itemsize


@dataclass(frozen=True)
class PagedKv(LayerState):
    """Both [pages, KV heads, page size, padded head dimension]. Nothing lies in slots."""

    keys: Tensor
    values: Tensor

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def copy_page(self, source: int, target: int) -> None:
        self.keys[target] = self.keys[source]
        self.values[target] = self.values[source]

    def check(self, places: Places) -> None:
        assert self.keys.shape == self.values.shape, "keys and values are of different shapes"
        assert len(self.keys) == places.pages + 1, "pages without keys and values"
