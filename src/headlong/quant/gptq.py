"""GPTQ: integers packed along the input features, zero points along the output features.

The first version stores zero points less one; `zero_points.py` says how that is told. Columns may belong to groups in
any order. Knows nothing of who multiplies.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    fitting_group,
    ints_label,
    pick_dense,
    unpack_fields,
    word_bits,
)
from headlong.quant.parts import (
    SCALE_BITS,
    Rows,
    check_finite,
    expect,
    expect_grouped,
    expect_stated,
    row_numbers,
)
from headlong.quant.zero_points import (
    FIRST,
    MOST_ROWS,
    SECOND,
    settled,
    version_by_config,
    version_by_values,
    whole_zeros,
)

WIDTHS = (2, 3, 4, 8)


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
    zero_offset: int | None = FIRST
    """What is added to a stored zero point: 1 in the first version, 0 in the second; None where the values must
    decide."""
    stated: bool = True
    """Whether the config says which version it is, and not custom alone."""
    writer: str | None = None
    """The tool that the config says wrote the model."""
    has_g_idx: bool = False
    scale_bits: int = 16

    @property
    def label(self) -> str:
        version = "gptq_v2" if self.zero_offset == SECOND else "gptq"
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
                f"qweight has the shape {list(words)}, which is neither GPTQ's (2, 3, 4 or 8 bits) nor AWQ's "
                f"for a weight of {list(shape)}"
            )
        scales, groups = expect_grouped(parts, "scales", SCALE_BITS, out_features, axis=1)
        expect(parts, "qzeros", ("I32",), (groups, ceil(out_features * width / WORD_BITS)))
        if "g_idx" in parts:
            expect(parts, "g_idx", ("I32", "I64"), (in_features,))
        expect_stated(parts, hint, zeros="qzeros", order="g_idx" if groups > 1 else "")
        offset, stated = version_by_config(hint)
        # With a list of each column's group it does not matter how long runs would be.
        group = fitting_group("scales", in_features, groups, hint.get("group_size"), certain="g_idx" in parts)
        return cls(
            width,
            group,
            groups == 1,
            zero_offset=offset,
            stated=stated,
            writer=hint.get("writer"),
            has_g_idx="g_idx" in parts,
            scale_bits=SCALE_BITS[scales.dtype],
        )

    def pack(self, parts: Mapping[str, Tensor], shape: Shape) -> "GptqWeight":
        scales = check_finite("scales", parts["scales"])
        g_idx = column_groups("g_idx", parts, scales.shape[0], self.group) if self.has_g_idx else None
        out_features, in_features = shape
        weight = GptqWeight(
            self,
            out_features,
            in_features,
            group=self.group,
            g_idx=g_idx,
            width=self.width,
            zero_offset=SECOND,
            qweight_WO=parts["qweight"],
            qzeros_GW=parts["qzeros"],
            scales_GO=scales,
        )
        offset = settled(self.zero_offset, self.stated, weight.version())
        if offset == FIRST:
            stored = weight.zeros(slice(0, out_features))
            words = whole_zeros(parts["qzeros"], stored, self.width, self.writer)
            weight = replace(weight, zero_offset=FIRST) if words is None else replace(weight, qzeros_GW=words)
        return (
            weight
            if offset == self.zero_offset
            else replace(weight, format=replace(self, zero_offset=offset))
        )


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

    def version(self) -> int | None:
        """The version of the zero points by their values, of some rows all over the matrix."""
        step = -(-self.out_features // MOST_ROWS)
        rows = torch.arange(0, self.out_features, step, device=self.device)
        groups = self.scales_GO.shape[0]
        runs = torch.arange(self.in_features, device=self.device) // self.group
        of_column = runs if self.g_idx is None else self.g_idx
        columns_G = torch.bincount(of_column.long(), minlength=groups).float()
        return version_by_values(self.zeros(rows), self.codes(rows), columns_G, self.width)

    def codes(self, rows: Rows) -> Tensor:
        # Not contiguous(), which leaves the strides of a single word as they are, and then bytes cannot be seen.
        words_RW = self.qweight_WO[:, rows].t().clone(memory_format=torch.contiguous_format)
        return unpack_fields(words_RW.view(torch.uint8), self.width, self.in_features)

    def zeros(self, rows: Rows) -> Tensor:
        numbers_R = row_numbers(rows, self.device)
        fields_RG = pick_dense(self.qzeros_GW, numbers_R, self.width, self.out_features)
        return fields_RG.add_(self.zero_offset)

    def scales(self, rows: Rows) -> Tensor:
        return self.scales_GO[:, rows].t().float()
