"""y = x Wᵀ for a packed W: a tile of rows is unpacked, multiplied and forgotten. Slow, frugal and right for every
format; kernels that multiply packed weights directly are measured by it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from headlong.ops.linear.invariance import find_tile, launch
from headlong.ops.linear.linear import Linear
from headlong.ops.linear.reference import ALIGN, ReferenceLinear
from headlong.ops.norm.normed import Normed, whole
from headlong.quant.format import PackedWeight

TILE_ELEMENTS = 1 << 20
"""How many elements an unpacked tile has: 4 MB in float32, which a core's caches nearly hold."""


class UnpackingLinear(Linear):
    """A linear that unpacks tile by tile. All tiles have the same shape, the last one padded, so that one measurement
    serves for all."""

    name = "unpack by tile"

    def __init__(self, weight: PackedWeight, dtype: torch.dtype) -> None:
        """`dtype` is what is multiplied in."""
        self.weight = weight
        self.dtype = dtype
        self.out_features, self.in_features = weight.out_features, weight.in_features
        rows = max(TILE_ELEMENTS // self.in_features // ALIGN, 1) * ALIGN
        self.tile_rows = min(rows, -(-self.out_features // ALIGN) * ALIGN)
        self.pad_in = -self.in_features % ALIGN
        self.tile = 1
        if weight.device.type == "cpu":
            found = find_tile(ReferenceLinear, self.tile_rows, self.in_features + self.pad_in, dtype)
            self.tile = 0 if found is None else found

    def __call__(self, given: Normed) -> Tensor:
        x_ND = whole(given)
        x = x_ND.to(self.dtype)
        if self.pad_in:
            x = F.pad(x, (0, self.pad_in))
        out = x_ND.new_empty(x.shape[0], self.out_features)
        for first in range(0, self.out_features, self.tile_rows):
            last = min(first + self.tile_rows, self.out_features)
            rows = self.weight.dequantize(first, last).to(self.dtype)
            if self.pad_in or last - first < self.tile_rows:
                rows = F.pad(rows, (0, self.pad_in, 0, self.tile_rows - (last - first)))
            out[:, first:last] = self._multiply(x, rows)[:, : last - first]
        return out

    def rows(self, outs_T: Tensor) -> Tensor:
        return self.weight.dequantize_rows(outs_T.to(self.weight.device)).to(self.dtype)

    def _multiply(self, x_ND: Tensor, rows: Tensor) -> Tensor:
        if self.tile:
            return launch(lambda part: F.linear(part, rows), x_ND, self.tile)
        # Nothing faster is invariant at this shape. A copy, because a product's bits depend on where its row starts.
        return torch.stack([torch.mv(rows, x.clone()) for x in x_ND])
