"""Some rows of a matrix as a matrix of its own."""

from dataclasses import replace

import torch
from torch import Tensor

from headlong.quant.format import FloatCoding, Grouped, Grouping, PackedWeight, Weight
from headlong.quant.fp8 import Fp8Weight
from headlong.quant.mx import Mxfp4Weight
from headlong.quant.nvfp4 import Nvfp4Weight
from headlong.quant.plain import PlainWeight


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
    return [_some_rows(weight, group * count, count) for group in range(groups)]


def _some_rows(whole: PackedWeight, first: int, count: int) -> PackedWeight:
    """The rows [first, first + count): as a weight of the same format over parts of the same tensors, where they can be
    cut there, so that every kernel takes it."""
    rows = slice(first, first + count)
    match whole:
        case Fp8Weight(block=(high, _), scale_RC=scale) if len(scale) == 1 or not (
            first % high or count % high
        ):
            own = scale if len(scale) == 1 else scale[first // high : (first + count) // high]
            return replace(whole, out_features=count, weight_OD=whole.weight_OD[rows], scale_RC=own)
        case Mxfp4Weight() | Nvfp4Weight():
            return replace(
                whole, out_features=count, codes_OB=whole.codes_OB[rows], scale_OG=whole.scale_OG[rows]
            )
        case PlainWeight():
            return replace(whole, out_features=count, weight_OD=whole.weight_OD[rows])
    return PackedRows(whole, first, count)
