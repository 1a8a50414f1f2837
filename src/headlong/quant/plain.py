"""Floats in the dtype they are stored in, widened a tile at a time. Knows nothing of who multiplies."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from headlong.quant.format import Format, Part, Shape
from headlong.quant.parts import FLOAT_BITS, Rows, RowWeight, expect


@dataclass(frozen=True)
class PlainFormat(Format):
    """A float weight in the dtype it is stored in."""

    name = "plain"
    reads: ClassVar[frozenset[str]] = frozenset({"weight"})

    dtype: str

    @property
    def label(self) -> str:
        return self.dtype.lower()

    @property
    def bits(self) -> float:
        return float(FLOAT_BITS[self.dtype])

    @classmethod
    def detect(cls, parts: Mapping[str, Part], shape: Shape, hint: Mapping[str, Any]) -> "PlainFormat | None":
        if "weight" not in parts or parts["weight"].dtype not in FLOAT_BITS:
            return None
        return cls(expect(parts, "weight", FLOAT_BITS, shape).dtype)

    def pack(self, parts: Mapping[str, Tensor], shape: Shape) -> "PlainWeight":
        out_features, in_features = shape
        return PlainWeight(self, out_features, in_features, parts["weight"])


@dataclass(frozen=True, eq=False)
class PlainWeight(RowWeight):
    """One float matrix in memory, in the dtype it is stored in."""

    weight_OD: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.weight_OD,)

    def permuted(self, order: Tensor) -> "PlainWeight":
        return replace(self, weight_OD=self.weight_OD[order])

    def unpack(self, rows: Rows) -> Tensor:
        # A slice of float32 would be a view of the weight itself.
        return self.weight_OD[rows].to(torch.float32, copy=isinstance(rows, slice))
