"""MLX affine integers: dense bits in 32-bit words, and code * scale + bias by group.

A row is one little-endian stream of bits, also for the widths (3, 5, 6) whose codes cross words. MLX's other modes
(mxfp4, nvfp4, mxfp8), which have no biases, are in `mx.py`. Knows nothing of who multiplies.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from headlong.errors import CheckpointError
from headlong.quant.format import Format, Grouped, Grouping, Part, Shape
from headlong.quant.ints import WORD_BITS, ints_label, unpack_fields
from headlong.quant.parts import (
    SCALE_BITS,
    Rows,
    RowWeight,
    by_group,
    check_finite,
    even_group,
    expect,
    expect_grouped,
)

WIDTHS = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True)
class MlxFormat(Format):
    """How one matrix of an MLX checkpoint is packed."""

    name = "mlx"
    whole_numbers = True
    reads: ClassVar[frozenset[str]] = frozenset({"weight", "scales", "biases"})

    width: int
    """How many bits a code has."""
    group: int
    """How many columns share a scale and a bias."""
    scale_bits: int = 16

    @property
    def label(self) -> str:
        return f"mlx {ints_label(self.width, self.group)}"

    @property
    def bits(self) -> float:
        return self.width + 2 * self.scale_bits / self.group

    @classmethod
    def detect(cls, parts: Mapping[str, Part], shape: Shape, hint: Mapping[str, Any]) -> "MlxFormat | None":
        if "weight" not in parts or parts["weight"].dtype != "U32":
            return None
        out_features, in_features = shape
        words = parts["weight"].shape
        fitting = [width for width in WIDTHS if words == (out_features, in_features * width / WORD_BITS)]
        if not fitting:
            raise CheckpointError(
                f"weight has the shape {list(words)}, which holds neither 2, 3, 4, 5, 6 nor 8 bits of {list(shape)}"
            )
        if "biases" not in parts and "scales" in parts:
            raise CheckpointError("biases are missing beside scales, which are of none of MLX's modes")
        scales, groups = expect_grouped(parts, "scales", SCALE_BITS, out_features)
        expect(parts, "biases", SCALE_BITS, scales.shape)
        return cls(fitting[0], even_group("scales", in_features, groups), SCALE_BITS[scales.dtype])

    def pack(self, parts: Mapping[str, Tensor], shape: Shape) -> "MlxWeight":
        scales, biases = (check_finite(name, parts[name]) for name in ("scales", "biases"))
        out_features, in_features = shape
        codes_OB = parts["weight"].view(torch.uint8)
        return MlxWeight(self, out_features, in_features, self.width, self.group, codes_OB, scales, biases)


@dataclass(frozen=True, eq=False)
class MlxWeight(RowWeight):
    """One matrix of an MLX checkpoint in memory."""

    width: int
    group: int
    codes_OB: Tensor
    """The codes' bytes."""
    scales_OG: Tensor
    biases_OG: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.codes_OB, self.scales_OG, self.biases_OG)

    def grouping(self) -> Grouping:
        highest = (1 << self.width) - 1
        factors = "float16" if self.scales_OG.dtype == torch.float16 else "float32"
        return Grouping(self.group, 0, highest, has_offsets=True, factors=factors)

    def grouped(self, first: int, last: int) -> Grouped:
        rows = slice(first, last)
        codes = unpack_fields(self.codes_OB[rows], self.width, self.in_features).to(torch.uint8)
        return Grouped(codes, self.scales_OG[rows].float(), self.biases_OG[rows].float())

    def unpack(self, rows: Rows) -> Tensor:
        values_RD = unpack_fields(self.codes_OB[rows], self.width, self.in_features)
        for values, scales in by_group(values_RD, self.scales_OG[rows].float(), self.group):
            values.mul_(scales)
        for values, biases in by_group(values_RD, self.biases_OG[rows].float(), self.group):
            values.add_(biases)
        return values_RD
