"""NVFP4: four-bit floats (e2m1), an e4m3 scale per group of 16 and one float32 for the whole matrix.

modelopt multiplies with the last (`weight_scale_2`), compressed-tensors divides by it (`weight_global_scale`); the
low half of a byte comes first in both. Activations stay in float. Knows nothing of who multiplies.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor

from headlong.errors import CheckpointError
from headlong.quant.format import FloatCoding, Format, Gathered, Grouped, Part, Shape
from headlong.quant.fp8 import decode_fp8
from headlong.quant.gathered import regrouped
from headlong.quant.ints import lookup_nibbles, split_nibbles
from headlong.quant.parts import (
    ACTIVATION_PARTS,
    SCALAR_SHAPES,
    Rows,
    RowWeight,
    by_group,
    check_finite,
    check_sense,
    even_group,
    expect,
    expect_grouped,
)

GROUP = 16
SCALE_BITS = 8

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES))
E2M1_MAX = 6.0


@dataclass(frozen=True)
class Nvfp4Format(Format):
    """How one NVFP4 matrix is packed."""

    name = "nvfp4"
    unused = ACTIVATION_PARTS

    divides: bool
    """True where the global scale divides (compressed-tensors), False where it multiplies (modelopt)."""
    group: int = GROUP

    @property
    def codes_name(self) -> str:
        return "weight_packed" if self.divides else "weight"

    @property
    def global_name(self) -> str:
        return "weight_global_scale" if self.divides else "weight_scale_2"

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({self.codes_name, "weight_scale", self.global_name})

    @property
    def label(self) -> str:
        return self.name if self.group == GROUP else f"{self.name} group {self.group}"

    @property
    def has_float_coding(self) -> bool:
        return True

    @property
    def bits(self) -> float:
        return 4 + SCALE_BITS / self.group

    @classmethod
    def detect(cls, parts: Mapping[str, Part], shape: Shape, hint: Mapping[str, Any]) -> "Nvfp4Format | None":
        claimed = [
            name for name in ("weight", "weight_packed") if name in parts and parts[name].dtype == "U8"
        ]
        found = cls(divides=claimed == ["weight_packed"])
        if len(claimed) != 1 or not parts.keys() & {"weight_scale", found.global_name}:
            return None
        out_features, in_features = shape
        if in_features % 2:
            raise CheckpointError(
                f"an NVFP4 weight cannot have an odd number of input features: {list(shape)}"
            )
        expect(parts, found.codes_name, ("U8",), (out_features, in_features // 2))
        _, groups = expect_grouped(parts, "weight_scale", ("F8_E4M3",), out_features)
        expect(parts, found.global_name, ("F32",), *SCALAR_SHAPES)
        if groups == ceil(in_features / GROUP):
            return found
        return cls(found.divides, even_group("weight_scale", in_features, groups))

    def pack(self, parts: Mapping[str, Tensor], shape: Shape) -> "Nvfp4Weight":
        scale = check_finite("weight_scale", parts["weight_scale"])
        overall = check_finite(self.global_name, parts[self.global_name])
        if not bool(overall.all()):
            raise CheckpointError(
                f"{self.global_name} is 0, so the weight has no values: the file is damaged"
            )
        factor = 1 / float(overall) if self.divides else float(overall)
        check_sense(self.global_name, abs(E2M1_MAX * _largest(scale) * factor), divides=self.divides)
        out_features, in_features = shape
        return Nvfp4Weight(
            self,
            out_features,
            in_features,
            self.group,
            self.divides,
            parts[self.codes_name],
            scale,
            overall.view(()),
        )


def _largest(scale: Tensor) -> float:
    """The largest magnitude among eight-bit floats, whose bytes are in their order."""
    codes = scale.view(torch.uint8).bitwise_and(0x7F)
    return float(codes.max().view(torch.float8_e4m3fn).float()) if codes.numel() else 0.0


@dataclass(frozen=True, eq=False)
class Nvfp4Weight(RowWeight):
    """One NVFP4 matrix in memory."""

    group: int
    divides: bool
    codes_OB: Tensor
    """The codes, two to a byte."""
    scale_OG: Tensor
    global_scale: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.codes_OB, self.scale_OG, self.global_scale)

    def unpack(self, rows: Rows) -> Tensor:
        values_RD = lookup_nibbles(self.codes_OB[rows], E2M1)
        for values, scales in by_group(values_RD, self._scales(rows), self.group):
            values.mul_(scales)
        return values_RD

    def float_coding(self) -> FloatCoding | None:
        return None if self.in_features % self.group else FloatCoding(self.group, E2M1)

    def gathered(self) -> Gathered | None:
        if self.in_features % self.group == 0:
            return None
        columns = torch.arange(self.in_features, device=self.device) // self.group
        return regrouped(self, columns, FloatCoding(self.group, E2M1))

    def grouped(self, first: int, last: int) -> Grouped:
        rows = slice(first, last)
        return Grouped(split_nibbles(self.codes_OB[rows]), self._scales(rows), None)

    def _scales(self, rows: Rows) -> Tensor:
        scales_RG = decode_fp8(self.scale_OG[rows])
        return scales_RG.div_(self.global_scale) if self.divides else scales_RG.mul_(self.global_scale)
