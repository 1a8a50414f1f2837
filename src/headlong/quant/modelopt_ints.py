"""modelopt's four-bit integers: two output rows to a byte, the first in the low half, and a scale by group of columns.

Knows nothing of who multiplies.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from headlong.errors import CheckpointError
from headlong.quant.format import Format, Part, Shape
from headlong.quant.ints import GroupedInts, ints_label
from headlong.quant.parts import (
    ACTIVATION_PARTS,
    SCALE_BITS,
    Rows,
    check_finite,
    even_group,
    expect,
    expect_grouped,
    row_numbers,
)

FLOAT_SCALES = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class ModeloptInts(Format):
    """How one such matrix is packed."""

    name = "modelopt"
    whole_numbers = True
    unused = ACTIVATION_PARTS
    reads: ClassVar[frozenset[str]] = frozenset({"weight", "weight_scale"})

    group: int
    scale_bits: int = 16

    @property
    def label(self) -> str:
        return ints_label(4, self.group)

    @property
    def bits(self) -> float:
        return 4 + self.scale_bits / self.group

    @classmethod
    def detect(
        cls,
        parts: Mapping[str, Part],
        shape: Shape,
        hint: Mapping[str, Any],
    ) -> "ModeloptInts | None":
        out_features, in_features = shape
        scale = parts.get("weight_scale")
        if "weight" not in parts or parts["weight"].dtype != "U8" or scale is None:
            return None
        if scale.dtype not in FLOAT_SCALES or "weight_scale_2" in parts:
            return None
        if out_features % 2:
            raise CheckpointError(f"weight cannot hold an odd number of rows two to a byte: {list(shape)}")
        expect(parts, "weight", ("U8",), (out_features // 2, in_features))
        scale, groups = expect_grouped(parts, "weight_scale", FLOAT_SCALES, out_features)
        return cls(even_group("weight_scale", in_features, groups), SCALE_BITS[scale.dtype])

    def pack(self, parts: Mapping[str, Tensor], shape: Shape) -> "ModeloptIntsWeight":
        return ModeloptIntsWeight(
            self,
            shape[0],
            shape[1],
            group=self.group,
            g_idx=None,
            codes_HD=parts["weight"],
            scale_OG=check_finite("weight_scale", parts["weight_scale"]),
        )


@dataclass(frozen=True, eq=False)
class ModeloptIntsWeight(GroupedInts):
    """One such matrix in memory."""

    codes_HD: Tensor
    """The codes of two rows in each row of bytes."""
    scale_OG: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.codes_HD, self.scale_OG)

    def codes(self, rows: Rows) -> Tensor:
        numbers_R = row_numbers(rows, self.device)
        fields_RD = self.codes_HD[numbers_R // 2] >> (4 * (numbers_R % 2))[:, None].to(torch.uint8)
        # Signed fields of four bits: flipping the sign's bit adds 8.
        return fields_RD.bitwise_and_(15).bitwise_xor_(8).float().sub_(8.0)

    def zeros(self, rows: Rows) -> None:  # noqa: ARG002 - symmetric
        return None

    def scales(self, rows: Rows) -> Tensor:
        return self.scale_OG[rows].float()
