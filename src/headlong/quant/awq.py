"""AWQ: four-bit integers, eight output features to a word in an order of their own. Zero points lie the same way.

Knows nothing of GPTQ, whose parts have the same names and other shapes, nor of who multiplies.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from headlong.quant.format import Format, Part, Shape
from headlong.quant.ints import GroupedInts, ints_label, pick_fields
from headlong.quant.parts import (
    SCALE_BITS,
    Rows,
    check_finite,
    even_group,
    expect,
    expect_grouped,
    row_numbers,
)

WIDTH = 4
PER_WORD = 8
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""AWQ's order: the nibbles of a word hold features 0 2 4 6 1 3 5 7."""


@dataclass(frozen=True)
class AwqFormat(Format):
    """How one AWQ matrix is packed."""

    name = "awq"
    whole_numbers = True
    reads: ClassVar[frozenset[str]] = frozenset({"qweight", "qzeros", "scales"})

    group: int
    """How many columns share a scale and a zero point."""
    channel: bool = False
    scale_bits: int = 16

    @property
    def label(self) -> str:
        return f"awq {ints_label(WIDTH, None if self.channel else self.group)}"

    @property
    def bits(self) -> float:
        return WIDTH + (self.scale_bits + WIDTH) / self.group

    @classmethod
    def detect(cls, parts: Mapping[str, Part], shape: Shape, hint: Mapping[str, Any]) -> "AwqFormat | None":
        out_features, in_features = shape
        words = out_features // PER_WORD
        if (
            "qweight" not in parts
            or parts["qweight"].shape != (in_features, words)
            or out_features % PER_WORD
        ):
            return None
        expect(parts, "qweight", ("I32",))
        scales, groups = expect_grouped(parts, "scales", SCALE_BITS, out_features, axis=1)
        expect(parts, "qzeros", ("I32",), (groups, words))
        return cls(even_group("scales", in_features, groups), groups == 1, SCALE_BITS[scales.dtype])

    def pack(self, parts: Mapping[str, Tensor], shape: Shape) -> "AwqWeight":
        out_features, in_features = shape
        return AwqWeight(
            self,
            out_features,
            in_features,
            group=self.group,
            g_idx=None,
            qweight_DW=parts["qweight"],
            qzeros_GW=parts["qzeros"],
            scales_GO=check_finite("scales", parts["scales"]),
        )


@dataclass(frozen=True, eq=False)
class AwqWeight(GroupedInts):
    """One AWQ matrix in memory."""

    qweight_DW: Tensor
    qzeros_GW: Tensor | None
    scales_GO: Tensor
    places: tuple[int, ...] = PLACES
    """Which nibble of its word each of eight features lies in."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        held = (self.qweight_DW, self.qzeros_GW, self.scales_GO)
        return tuple(tensor for tensor in held if tensor is not None)

    def codes(self, rows: Rows) -> Tensor:
        if isinstance(rows, Tensor):
            return pick_fields(self.qweight_DW, rows, WIDTH, self.places).contiguous()
        # Rows that follow each other share words, so each word is read once.
        before, words = rows.start // PER_WORD, slice(rows.start // PER_WORD, -(-rows.stop // PER_WORD))
        words_WD = self.qweight_DW[:, words].t().contiguous()
        codes_WPD = words_WD.new_empty((words_WD.shape[0], PER_WORD, self.in_features), dtype=torch.float32)
        for row, place in enumerate(self.places):
            codes_WPD[:, row] = (words_WD >> WIDTH * place).bitwise_and_(15)
        return codes_WPD.flatten(0, 1)[rows.start - before * PER_WORD : rows.stop - before * PER_WORD]

    def zeros(self, rows: Rows) -> Tensor | None:
        if self.qzeros_GW is None:
            return None
        return pick_fields(self.qzeros_GW, row_numbers(rows, self.device), WIDTH, self.places)

    def scales(self, rows: Rows) -> Tensor:
        return self.scales_GO[:, rows].t().float()
