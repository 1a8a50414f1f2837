"""Finds out, on this machine, how a linear must be padded so that a row's bits do not depend on the others.

BLAS libraries choose code paths by shape. Nothing promises which shapes agree, so they are measured once per
weight shape at load; a linear that never agrees is refused.
"""

from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

TILES = (1, 2, 4, 8, 16)
PROBE_ROWS = 32
PROBE_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 24, 31, 32, 48, 64, 100, 128)
MAX_PROBE_FEATURES = 4096


class Linear(Protocol):
    """What layers call; `name` is for people."""

    name: str
    in_features: int
    out_features: int

    def __call__(self, x_ND: Tensor) -> Tensor: ...


LinearFactory = Callable[[Tensor, int], Linear]


class RowLinear:
    """One matrix-vector product per row: slow and beyond doubt. Serves where nothing faster is invariant.

    Each row is copied first: BLAS may take another path for a vector that starts off an alignment boundary."""

    name = "row by row"

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight = weight

    def __call__(self, x_ND: Tensor) -> Tensor:
        x = x_ND.to(self.weight.dtype)
        return torch.stack([torch.mv(self.weight, row.clone()) for row in x]).to(x_ND.dtype)


@cache
def find_tile(make: LinearFactory, out_features: int, in_features: int, dtype: torch.dtype) -> int | None:
    """The smallest row tile at which `make`'s linear is batch-invariant for this shape, or None.
    Very wide outputs are probed on a part of their features."""
    out_features = min(out_features, MAX_PROBE_FEATURES)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    rows = torch.randn(max(PROBE_COUNTS), in_features, generator=generator).to(dtype)
    return next((tile for tile in TILES if _agrees(make(weight, tile), rows)), None)


def _agrees(linear: Linear, rows: Tensor) -> bool:
    alone = torch.cat([linear(rows[i : i + 1]) for i in range(PROBE_ROWS)])
    return all(
        torch.equal(linear(rows[:count])[:PROBE_ROWS], alone[:count]) for count in PROBE_COUNTS
    ) and torch.equal(linear(rows[:PROBE_ROWS].flip(0)).flip(0), alone)
