"""Finds out, on this machine, how a linear must be padded so that a row's bits do not depend on the others.

BLAS libraries choose code paths by shape. Nothing promises which shapes agree, so they are measured once per
weight shape at load: every number of rows that will ever be launched, and every row's place among them. A linear
that never agrees is refused.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from headlong.ops.linear.linear import Linear
from headlong.ops.native import threads_for_native
from headlong.ops.norm.normed import Normed, whole
from headlong.ops.trial import factors

LAUNCH_ROWS = 128
"""The most rows of one launch; more rows go in several launches."""
TILES = (1, 2, 4, 8, 16)
LARGE_TILES = (8, 16)
LARGE = 1 << 23
"""Elements of a weight above which rows are padded more, so that fewer numbers of rows need measuring."""
MAX_PROBE_FEATURES = 4096
LINE = 64
"""The bytes of a cache line, which tensors of their own begin at. BLAS may take another path for rows that do not."""


LinearFactory = Callable[[Tensor, int], Linear]


def launch(multiply: Callable[[Tensor], Tensor], x_ND: Tensor, tile: int) -> Tensor:
    """Applies `multiply` to rows padded to a multiple of `tile`, at most `LAUNCH_ROWS` at a time."""
    num_rows = x_ND.shape[0]
    if x_ND.data_ptr() % LINE:
        x_ND = x_ND.clone()
    if num_rows > LAUNCH_ROWS:
        return torch.cat([launch(multiply, part, tile) for part in x_ND.split(LAUNCH_ROWS)])
    missing = -num_rows % tile
    return multiply(F.pad(x_ND, (0, 0, 0, missing)))[:num_rows] if missing else multiply(x_ND)


class RowLinear(Linear):
    """A linear that makes one matrix-vector product per row: slow, and batch-invariant beyond doubt. It serves where
    nothing faster is invariant."""

    name = "row by row"

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight = weight

    def __call__(self, given: Normed) -> Tensor:
        x_ND = whole(given)
        x = x_ND.to(self.weight.dtype)
        # A copy, because the product's bits depend on where in memory its row starts.
        return torch.stack([torch.mv(self.weight, row.clone()) for row in x]).to(x_ND.dtype)

    def rows(self, outs_T: Tensor) -> Tensor:
        return self.weight[outs_T.to(self.weight.device)]


def find_tile(make: LinearFactory, out_features: int, in_features: int, dtype: torch.dtype) -> int | None:
    """Finds the smallest row tile at which `make`'s linear is batch-invariant for this shape, or None. Very wide
    outputs are probed on a part of their features."""
    with threads_for_native.lifted():
        return _find_tile(make, out_features, in_features, dtype, torch.get_num_threads())


@cache
def _find_tile(
    make: LinearFactory, out_features: int, in_features: int, dtype: torch.dtype, _: int
) -> int | None:
    """What is found holds for as many threads as torch has."""
    tiles = LARGE_TILES if out_features * in_features > LARGE else TILES
    shape = (min(out_features, MAX_PROBE_FEATURES), in_features)
    rows, weight = factors((LAUNCH_ROWS, in_features), shape, dtype)
    return next((tile for tile in tiles if _agrees(make(weight, tile), rows, tile)), None)


def _agrees(linear: Linear, rows: Tensor, tile: int) -> bool:
    alone = torch.cat([linear(rows[i : i + 1]) for i in range(LAUNCH_ROWS)])
    return all(
        torch.equal(linear(rows[:count]), alone[:count]) for count in range(tile, LAUNCH_ROWS + 1, tile)
    ) and torch.equal(linear(rows.flip(0)).flip(0), alone)
