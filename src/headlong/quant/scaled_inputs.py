"""Weights whose inputs are multiplied first: AWQ's and SmoothQuant's `pre_quant_scale`, as modelopt writes them.

A factor of an input is a factor of its column, so it is applied to the columns as they are unpacked. Knows nothing of
how the weight itself is packed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from headlong.errors import CheckpointError
from headlong.quant.format import Format, Gathered, PackedWeight, Part, Shape
from headlong.quant.parts import SCALE_BITS, check_finite, expect

SCALES = "pre_quant_scale"


@dataclass(frozen=True)
class ScaledInputs(Format):
    """A format with a factor for each column."""

    name: ClassVar[str] = "scaled inputs"

    inner: Format
    columns: int
    scale_bits: int = 16

    @property
    def reads(self) -> frozenset[str]:
        return self.inner.reads | {SCALES}  # type: ignore[attr-defined]

    @property
    def unused(self) -> Mapping[str, str]:  # type: ignore[override]
        return self.inner.unused

    @property
    def label(self) -> str:
        return f"{self.inner.label} {SCALES}"

    @property
    def bits(self) -> float:
        return self.inner.bits

    @classmethod
    def detect(
        cls,
        parts: Mapping[str, Part],
        shape: Shape,
        hint: Mapping[str, Any],
    ) -> None:
        """No format by itself: `of` makes one of another."""
        return None

    @classmethod
    def of(cls, inner: Format, parts: Mapping[str, Part], shape: Shape) -> "ScaledInputs":
        part = expect(parts, SCALES, SCALE_BITS, (shape[1],), (1, shape[1]))
        return cls(inner, shape[1], SCALE_BITS[part.dtype])

    def pack(self, parts: Mapping[str, Tensor], shape: Shape) -> "ScaledInputsWeight":
        scales = check_finite(SCALES, parts[SCALES]).view(-1)
        if not bool(scales.ne(0).all()):
            raise CheckpointError(f"{SCALES} holds 0: the file is damaged")
        inner = self.inner.pack({name: part for name, part in parts.items() if name != SCALES}, shape)
        return ScaledInputsWeight(self, shape[0], shape[1], inner, scales)


@dataclass(frozen=True, eq=False)
class ScaledInputsWeight(PackedWeight):
    """A weight with a factor for each column."""

    format: Format
    out_features: int
    in_features: int
    inner: PackedWeight
    scales_D: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.inner.tensors, self.scales_D)

    def gathered(self) -> Gathered:
        weight, columns_K, factors_K = self.inner.gathered() or Gathered(
            self.inner, torch.arange(self.in_features, dtype=torch.int32)
        )
        scales_K = self.scales_D.float()[columns_K.clamp(min=0)]
        return Gathered(weight, columns_K, scales_K if factors_K is None else scales_K * factors_K)

    def dequantize(self, first: int, last: int) -> Tensor:
        return self.inner.dequantize(first, last).mul_(self.scales_D.float())

    def dequantize_rows(self, rows_N: Tensor) -> Tensor:
        return self.inner.dequantize_rows(rows_N).mul_(self.scales_D.float())
