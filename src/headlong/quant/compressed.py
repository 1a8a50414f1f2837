"""The integers of compressed-tensors: `pack-quantized` words and `int-quantized` bytes.

Knows nothing of other formats' layouts, nor of who multiplies.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor

from headlong.errors import CheckpointError
from headlong.quant.format import Format, Part, Shape
from headlong.quant.ints import (
    WORD_BITS,
    GroupedInts,
    column_groups,
    ints_label,
    pick_dense,
    unpack_fields,
    word_bits,
)
from headlong.quant.parts import (
    ACTIVATION_PARTS,
    SCALAR_SHAPES,
    SCALE_BITS,
    Rows,
    check_finite,
    check_in_range,
    even_group,
    expect,
    expect_stated,
    row_numbers,
)

WIDTHS = (2, 3, 4, 5, 6, 7, 8)


@dataclass(frozen=True)
class CompressedInts(Format):
    """How one integer matrix of compressed-tensors is packed: several codes to a word if `packed`, else one byte
    each."""

    name = "compressed-tensors"
    whole_numbers = True
    unused = ACTIVATION_PARTS

    width: int
    """How many bits a code has."""
    group: int
    """How many columns share a scale: all of them in a channel-wise weight."""
    shared: str
    """What has a scale of its own: a group of columns, a channel (an output row) or the whole tensor."""
    packed: bool
    zero_point: str | None = None
    """The dtype of the zero points, I32 (words along the rows) or I8; None if the codes are symmetric."""
    act_order: bool = False
    says_symmetric: bool = False
    """Whether the config says that zero points, where there are any, are 0."""
    scale_bits: int = 16

    @property
    def reads(self) -> frozenset[str]:
        codes = ("weight_packed", "weight_shape") if self.packed else ("weight",)
        return frozenset({*codes, "weight_scale", "weight_zero_point", "weight_g_idx"})

    @property
    def label(self) -> str:
        group = {"group": self.group, "channel": None, "tensor": 0}[self.shared]
        asymmetric = self.zero_point and not self.says_symmetric
        more = [word for word, there in (("asym", asymmetric), ("act-order", self.act_order)) if there]
        return ints_label(self.width, group, *more)

    @property
    def bits(self) -> float:
        if self.shared == "tensor":
            return float(self.width)
        zero_bits = {None: 0, "I8": 8, "I32": self.width}[self.zero_point]
        return self.width + (self.scale_bits + zero_bits) / self.group

    @classmethod
    def detect(
        cls, parts: Mapping[str, Part], shape: Shape, hint: Mapping[str, Any]
    ) -> "CompressedInts | None":
        packed = "weight_packed" in parts and parts["weight_packed"].dtype == "I32"
        if not packed and not ("weight" in parts and parts["weight"].dtype == "I8"):
            return None
        width = cls._width(parts, shape, hint) if packed else 8
        scale = expect(parts, "weight_scale", SCALE_BITS)
        shared, group = cls._group(scale.shape, shape)
        hinted = hint.get("group_size")
        # A group that nobody would choose and that is not the config's: some scales were lost.
        if (
            shared == "group"
            and isinstance(hinted, int)
            and hinted > 0
            and group != hinted
            and group & (group - 1)
        ):
            raise CheckpointError(
                f"weight_scale has {scale.shape[1]} groups of {group} columns, where the config says {hinted}"
            )
        zero_point = None
        if "weight_zero_point" in parts:
            zero_point = cls._zero_point(parts, shape, width, scale.shape, packed)
        if "weight_g_idx" in parts:
            expect(parts, "weight_g_idx", ("I32", "I64"), (shape[1],))
        act_order = "weight_g_idx" in parts
        order = "weight_g_idx" if shared == "group" and group < shape[1] else ""
        expect_stated(parts, hint, zeros="weight_zero_point", order=order)
        says = hint.get("symmetric") is True
        return cls(width, group, shared, packed, zero_point, act_order, says, SCALE_BITS[scale.dtype])

    @staticmethod
    def _width(parts: Mapping[str, Part], shape: Shape, hint: Mapping[str, Any]) -> int:
        words = parts["weight_packed"].shape
        hinted = hint.get("bits")
        width = word_bits(words[1], shape[1], WIDTHS, hinted) if len(words) == 2 else None
        if width is None or words[0] != shape[0]:
            raise CheckpointError(
                f"weight_packed has the shape {list(words)}, which holds no 2 to 8 bits of {list(shape)}"
            )
        # Once codes did not cross words: four of 7 bits filled one, as four of 8 bits do.
        if hinted in WIDTHS and hinted != width and words[1] == ceil(shape[1] / (WORD_BITS // hinted)):
            raise CheckpointError(
                f"weight_packed holds {width} bits by its shape and {hinted} by the config: save it again"
            )
        expect(parts, "weight_shape", ("I64", "I32"), (2,))
        return width

    @staticmethod
    def _group(scale: Shape, shape: Shape) -> tuple[str, int]:
        out_features, in_features = shape
        if scale in ((out_features,), (out_features, 1)):
            return "channel", in_features
        if scale in SCALAR_SHAPES:
            return "tensor", in_features
        if len(scale) == 2 and scale[0] == out_features:
            return "group", even_group("weight_scale", in_features, scale[1])
        raise CheckpointError(
            f"weight_scale has the shape {list(scale)}, which is no scale per tensor, row or group of {list(shape)}"
        )

    @staticmethod
    def _zero_point(parts: Mapping[str, Part], shape: Shape, width: int, scale: Shape, packed: bool) -> str:
        part = expect(parts, "weight_zero_point", ("I32", "I8") if packed else ("I8",))
        if part.dtype == "I32":
            groups = scale[1] if len(scale) == 2 else 1
            expect(parts, "weight_zero_point", ("I32",), (ceil(shape[0] * width / WORD_BITS), groups))
        else:
            expect(parts, "weight_zero_point", ("I8",), scale)
        return part.dtype

    def pack(self, parts: Mapping[str, Tensor], shape: Shape) -> "CompressedIntsWeight":
        out_features, in_features = shape
        if self.packed:
            stored = parts["weight_shape"].tolist()
            if stored != list(shape):
                raise CheckpointError(f"weight_shape says {stored} where the model has {list(shape)}")
        grid = (1 if self.shared == "tensor" else out_features, in_features // self.group)
        zero_point = parts["weight_zero_point"] if self.zero_point else None
        if zero_point is not None and self.zero_point == "I8":
            half = 1 << (self.width - 1)
            zero_point = check_in_range("weight_zero_point", zero_point, -half, half - 1).view(grid)
        return CompressedIntsWeight(
            self,
            out_features,
            in_features,
            group=self.group,
            g_idx=column_groups("weight_g_idx", parts, grid[1], self.group) if self.act_order else None,
            codes_OB=parts["weight_packed" if self.packed else "weight"].view(torch.uint8),
            scale_OG=check_finite("weight_scale", parts["weight_scale"]).view(grid),
            zero_point=zero_point,
            width=self.width,
            packed=self.packed,
        )


@dataclass(frozen=True, eq=False)
class CompressedIntsWeight(GroupedInts):
    """One integer matrix of compressed-tensors in memory."""

    codes_OB: Tensor
    """The codes' bytes."""
    scale_OG: Tensor
    """The scales by row and group; a single row if one scale serves the whole matrix."""
    zero_point: Tensor | None
    width: int
    packed: bool

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        held = (self.codes_OB, self.scale_OG, self.zero_point, self.g_idx)
        return tuple(tensor for tensor in held if tensor is not None)

    def codes(self, rows: Rows) -> Tensor:
        if not self.packed:
            return self.codes_OB[rows].view(torch.int8).float()
        width = self.width
        return unpack_fields(self.codes_OB[rows], width, self.in_features, lowest=-(1 << (width - 1)))

    def zeros(self, rows: Rows) -> Tensor | None:
        if self.zero_point is None:
            return None
        if self.zero_point.dtype == torch.int8:
            return self.zero_point[self._scale_rows(rows)].float()
        numbers_R, width = row_numbers(rows, self.device), self.width
        fields_RG = pick_dense(self.zero_point.t(), numbers_R, width, self.out_features)
        return fields_RG.sub_(1 << (width - 1))

    def scales(self, rows: Rows) -> Tensor:
        return self.scale_OG[self._scale_rows(rows)].float()

    def _scale_rows(self, rows: Rows) -> Rows:
        return slice(0, 1) if self.scale_OG.shape[0] == 1 else rows
