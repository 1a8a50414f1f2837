"""Some rows of a matrix as a matrix of its own."""

import torch
from torch import Tensor

from headlong.quant.format import FloatCoding, Grouped, Grouping, PackedWeight, Weight


class PackedRows(PackedWeight):
    """The rows [first, first + count) of a packed weight, which stays whole in memory."""

    def __init__(self, whole: PackedWeight, first: int, count: int) -> None:
        self.whole, self.first = whole, first
        self.format, self.in_features, self.out_features = whole.format, whole.in_features, count

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.whole.tensors

    def dequantize(self, first: int, last: int) -> Tensor:
        return self.whole.dequantize(self.first + first, self.first + last)

    def dequantize_rows(self, rows_N: Tensor) -> Tensor:
        return self.whole.dequantize_rows(self.first + rows_N)

    def grouping(self) -> Grouping | None:
        return self.whole.grouping()

    def float_coding(self) -> FloatCoding | None:
        return self.whole.float_coding()

    def grouped(self, first: int, last: int) -> Grouped:
        return self.whole.grouped(self.first + first, self.first + last)


def rows_of(weight: Weight, groups: int) -> list[Weight]:
    """Returns the rows of a weight in equal groups, one after the other."""
    if isinstance(weight, torch.Tensor):
        return [part.contiguous() for part in weight.chunk(groups)]
    count = weight.out_features // groups
    return [PackedRows(weight, group * count, count) for group in range(groups)]
