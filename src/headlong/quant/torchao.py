"""torchao's tensors as its own tool flattens them into safetensors: `_weight_qdata`, `_weight_scale`,
`_weight_zero_point`.

Int8Tensor and IntxUnpackedToInt8Tensor hold a code in each byte, Float8Tensor floats of eight bits, Int4Tensor two
codes in each byte, the first in the low half, with zero points that are floats and are added. Knows nothing of who
multiplies.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from headlong.errors import CheckpointError
from headlong.quant.compressed import CompressedIntsWeight
from headlong.quant.format import Format, Grouped, Grouping, PackedWeight, Part, Shape
from headlong.quant.fp8 import Fp8Weight
from headlong.quant.ints import ints_label, unpack_fields
from headlong.quant.parts import (
    SCALE_BITS,
    Rows,
    RowWeight,
    by_group,
    check_finite,
    even_group,
    expect,
    expect_stated,
)

CODES, SCALES, ZEROS = "_weight_qdata", "_weight_scale", "_weight_zero_point"


@dataclass(frozen=True)
class TorchaoFormat(Format):
    """How one such matrix is packed."""

    name = "torchao"
    reads: ClassVar[frozenset[str]] = frozenset({CODES, SCALES, ZEROS})

    dtype: str
    """The dtype of the codes: I8, F8_E4M3, or U8 for two codes to a byte."""
    group: int
    columns: int
    zero_points: bool
    says_symmetric: bool = False
    """Whether the config says that codes are symmetric, whose zero points are stored all the same."""
    scale_bits: int = 16

    @property
    def label(self) -> str:
        group = None if self.group == self.columns else self.group
        if self.dtype == "F8_E4M3":
            return "torchao fp8 channel" if group is None else f"torchao fp8 1x{group}"
        more = ("asym",) if self.zero_points and not self.says_symmetric else ()
        return f"torchao {ints_label(4 if self.dtype == 'U8' else 8, group, *more)}"

    @property
    def bits(self) -> float:
        width = 4 if self.dtype == "U8" else 8
        zeros = (self.scale_bits if width == 4 else 8) if self.zero_points else 0
        return width + (self.scale_bits + zeros) / self.group

    @property
    def whole_numbers(self) -> bool:  # type: ignore[override]
        return not self.has_float_coding

    @property
    def has_float_coding(self) -> bool:
        return self.dtype == "F8_E4M3"

    @classmethod
    def detect(
        cls,
        parts: Mapping[str, Part],
        shape: Shape,
        hint: Mapping[str, Any],
    ) -> "TorchaoFormat | None":
        if CODES not in parts:
            return None
        out_features, in_features = shape
        codes = expect(parts, CODES, ("I8", "F8_E4M3", "U8"))
        wanted = (out_features, in_features // 2) if codes.dtype == "U8" else shape
        expect(parts, CODES, (codes.dtype,), wanted)
        scales = expect(parts, SCALES, SCALE_BITS)
        across = len(scales.shape) == 2 and codes.dtype == "U8"
        rows, groups = (*scales.shape, 1)[:2] if not across else (scales.shape[1], scales.shape[0])
        if rows != out_features or len(scales.shape) not in (1, 2):
            raise CheckpointError(
                f"{SCALES} has the shape {list(scales.shape)}, which is none of groups of {list(shape)}"
            )
        group = even_group(SCALES, in_features, groups)
        if codes.dtype == "U8":
            expect(parts, ZEROS, SCALE_BITS, scales.shape)
        elif ZEROS in parts:
            expect(parts, ZEROS, ("I8",), scales.shape)
        if codes.dtype == "I8":
            expect_stated(parts, hint, zeros=ZEROS)
        says = hint.get("symmetric") is True and codes.dtype == "I8"
        return cls(codes.dtype, group, in_features, ZEROS in parts, says, SCALE_BITS[scales.dtype])

    def pack(self, parts: Mapping[str, Tensor], shape: Shape) -> PackedWeight:
        out_features, in_features = shape
        scales = check_finite(SCALES, parts[SCALES])
        if self.dtype == "U8":
            zeros = check_finite(ZEROS, parts[ZEROS])
            return TorchaoInt4Weight(self, out_features, in_features, self.group, parts[CODES], scales, zeros)
        scales = scales.view(out_features, -1)
        if self.dtype == "F8_E4M3":
            return Fp8Weight(self, out_features, in_features, (1, self.group), parts[CODES], scales)
        return CompressedIntsWeight(
            self,
            out_features,
            in_features,
            group=self.group,
            g_idx=None,
            codes_OB=parts[CODES].view(torch.uint8),
            scale_OG=scales,
            zero_point=parts[ZEROS].view(out_features, -1) if self.zero_points else None,
            width=8,
            packed=False,
        )


@dataclass(frozen=True, eq=False)
class TorchaoInt4Weight(RowWeight):
    """One Int4Tensor in memory: code · scale + zero point, codes from -8 to 7."""

    group: int
    codes_OB: Tensor
    scales_GO: Tensor
    zeros_GO: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.codes_OB, self.scales_GO, self.zeros_GO)

    def grouping(self) -> Grouping:
        return Grouping(self.group, -8, 7, has_offsets=True, factors="float32")

    def grouped(self, first: int, last: int) -> Grouped:
        rows = slice(first, last)
        scales, zeros = self.scales_GO[:, rows].t().float(), self.zeros_GO[:, rows].t().float()
        return Grouped(self._codes(rows).to(torch.int8), scales, zeros)

    def unpack(self, rows: Rows) -> Tensor:
        values_RD = self._codes(rows)
        for values, scales in by_group(values_RD, self.scales_GO[:, rows].t().float(), self.group):
            values.mul_(scales)
        for values, zeros in by_group(values_RD, self.zeros_GO[:, rows].t().float(), self.group):
            values.add_(zeros)
        return values_RD

    def _codes(self, rows: Rows) -> Tensor:
        # Signed fields of four bits: flipping the sign's bit adds 8.
        return unpack_fields(self.codes_OB[rows] ^ 0x88, 4, self.in_features, lowest=-8)
