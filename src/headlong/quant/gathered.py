"""Weights whose groups of columns are not even runs, as weights over inputs in another order, whose groups are.

Columns of one group are brought together, and each group is filled up with columns that do not exist. So a kernel for
even groups multiplies weights in act-order, and those whose last group is short. Knows nothing of who multiplies.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headlong.quant.format import FloatCoding, Format, Gathered, Grouped, Grouping, PackedWeight

NO_COLUMN = -1


@dataclass(frozen=True, eq=False)
class RegroupedWeight(PackedWeight):
    """A weight with its columns in the order of their groups."""

    format: Format
    out_features: int
    in_features: int
    inner: PackedWeight
    columns_K: Tensor
    group_of_piece: Tensor
    """The group that each run of columns belongs to, of which a group may have several."""
    known: Grouping | FloatCoding

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.inner.tensors

    def dequantize(self, first: int, last: int) -> Tensor:
        rows_RK = self.inner.dequantize(first, last).index_select(1, self.columns_K.clamp(min=0))
        return rows_RK.mul_(self.columns_K != NO_COLUMN)

    def grouping(self) -> Grouping | None:
        return self.known if isinstance(self.known, Grouping) else None

    def float_coding(self) -> FloatCoding | None:
        return self.known if isinstance(self.known, FloatCoding) else None

    def grouped(self, first: int, last: int) -> Grouped:
        codes, scales, offsets, *_ = self.inner.grouped(first, last)
        offsets = None if offsets is None else offsets.index_select(1, self.group_of_piece)
        # A column that does not exist has the codes of one that does: any number times 0.
        codes = codes.index_select(1, self.columns_K.clamp(min=0))
        return Grouped(codes, scales.index_select(1, self.group_of_piece), offsets)


def regrouped(inner: PackedWeight, group_D: Tensor, known: Grouping | FloatCoding) -> Gathered:
    """The weight with the columns of a group together. `group_D` is the group of each column, and `inner.grouped` has
    its scales by these; `known` says what its codes are, and how long runs of one group may be."""
    piece = known.group + known.group % 2
    order_D = torch.argsort(group_D, stable=True)
    count_G = torch.bincount(group_D)
    pieces_G = -(-count_G // piece)
    group_of_piece = torch.repeat_interleave(torch.arange(len(count_G)), pieces_G)
    first_G = torch.cumsum(pieces_G, 0) - pieces_G
    within_D = torch.arange(len(group_D)) - (torch.cumsum(count_G, 0) - count_G)[group_D[order_D]]
    columns_K = torch.full((len(group_of_piece) * piece,), NO_COLUMN, dtype=torch.int32)
    columns_K[first_G[group_D[order_D]] * piece + within_D] = order_D.int()
    even = known._replace(group=piece)
    weight = RegroupedWeight(
        inner.format, inner.out_features, len(columns_K), inner, columns_K, group_of_piece, even
    )
    return Gathered(weight, columns_K)
