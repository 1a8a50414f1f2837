"""GPTQ: integers packed along the input features, zero points along the output features.

The first version stores zero points less one. Columns may belong to groups in any order. Knows nothing of how a
file says which version it is, nor of who multiplies.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar

import torch
from torch import Tensor

from headlong.errors import CheckpointError
from headlong.quant.format import Format, Part, Shape
from headlong.quant.ints import (
    WORD_BITS,
    GroupedInts,
    column_groups,
    ints_label,
    pick_fields,
    unpack_fields,
    word_bits,
)
from headlong.quant.parts import SCALE_BITS, Rows, check_finite, expect, expect_grouped, row_numbers

WIDTHS = (2, 4, 8)


@dataclass(frozen=True)
class GptqFormat(Format):
    """How one GPTQ matrix is packed."""

    name = "gptq"
    whole_numbers = True
    reads: ClassVar[frozenset[str]] = frozenset({"qweight", "qzeros", "scales", "g_idx"})

    width: int
    """How many bits a code has."""
    group: int
    """How many columns share a scale and a zero point; the last group may be short."""
    channel: bool = False
    zero_offset: int = 1
    """What is added to a stored zero point: 1 in the first version, 0 in the second."""
    has_g_idx: bool = False
    scale_bits: int = 16

    @property
    def label(self) -> str:
        version = "gptq" if self.zero_offset else "gptq_v2"
        return f"{version} {ints_label(self.width, None if self.channel else self.group)}"

    @property
    def bits(self) -> float:
        return self.width + (self.scale_bits + self.width) / self.group

    @classmethod
    def detect(cls, parts: Mapping[str, Part], shape: Shape, hint: Mapping[str, Any]) -> "GptqFormat | None":
        out_features, in_features = shape
        # Words along the input features; AWQ has as many rows as there are input features.
        if "qweight" not in parts or parts["qweight"].shape == (in_features, ceil(out_features / 8)):
            return None
        words = expect(parts, "qweight", ("I32",)).shape
        width = word_bits(words[0], in_features, WIDTHS, hint.get("bits")) if len(words) == 2 else None
        if width is None or words[1] != out_features:
            raise CheckpointError(
                f"qweight has the shape {list(words)}, which is neither GPTQ's (2, 4 or 8 bits) nor AWQ's "
                f"for a weight of {list(shape)}"
            )
        scales, groups = expect_grouped(parts, "scales", SCALE_BITS, out_features, axis=1)
        expect(parts, "qzeros", ("I32",), (groups, ceil(out_features * width / WORD_BITS)))
        if "g_idx" in parts:
            expect(parts, "g_idx", ("I32", "I64"), (in_features,))
        return cls(
            width,
            _group(in_features, groups, hint.get("group_size")),
            groups == 1,
            zero_offset=0 if hint.get("checkpoint_format") == "gptq_v2" else 1,
            has_g_idx="g_idx" in parts,
            scale_bits=SCALE_BITS[scales.dtype],
        )

    def pack(self, parts: Mapping[str, Tensor], shape: Shape) -> "GptqWeight":
        scales = check_finite("scales", parts["scales"])
        g_idx = column_groups("g_idx", parts, scales.shape[0], self.group) if self.has_g_idx else None
        out_features, in_features = shape
        return GptqWeight(
            self,
            out_features,
            in_features,
            group=self.group,
            g_idx=g_idx,
            width=self.width,
            zero_offset=self.zero_offset,
            qweight_WO=parts["qweight"],
            qzeros_GW=parts["qzeros"],
            scales_GO=scales,
        )


def _group(in_features: int, groups: int, hinted: Any) -> int:
    """How many columns a group has; the last group may be short."""
    powers = [1 << power for power in range(in_features.bit_length() + 1)]
    likely = [hinted] if isinstance(hinted, int) and hinted > 0 else []
    if groups and in_features % groups == 0:
        likely.append(in_features // groups)
    for group in (*likely, *powers):
        if ceil(in_features / group) == groups:
            return min(group, in_features)
    raise CheckpointError(f"scales have {groups} groups, which do not divide {in_features} input features")


@dataclass(frozen=True, eq=False)
class GptqWeight(GroupedInts):
    """One GPTQ matrix in memory."""

    width: int
    zero_offset: int
    qweight_WO: Tensor
    qzeros_GW: Tensor
    scales_GO: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        held = (self.qweight_WO, self.qzeros_GW, self.scales_GO)
        return held if self.g_idx is None else (*held, self.g_idx)

    def codes(self, rows: Rows) -> Tensor:
        # Not contiguous(), which leaves the strides of a single word as they are, and then bytes cannot be seen.
        words_RW = self.qweight_WO[:, rows].t().clone(memory_format=torch.contiguous_format)
        return unpack_fields(words_RW.view(torch.uint8), self.width, self.in_features)

    def zeros(self, rows: Rows) -> Tensor:
        fields_RG = pick_fields(self.qzeros_GW, row_numbers(rows, self.device), self.width)
        return fields_RG.add_(self.zero_offset)

    def scales(self, rows: Rows) -> Tensor:
        return self.scales_GO[:, rows].t().float()
