"""AWQ's second layout (GEMV): eight input features to a word, in order. Zero points lie the same way by group, and
scales and zero points have room for more groups than there are.

Knows nothing of who multiplies.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar

import torch
from torch import Tensor

from headlong.errors import CheckpointError
from headlong.quant.format import Format, Part, Shape
from headlong.quant.ints import GroupedInts, ints_label, unpack_fields
from headlong.quant.parts import SCALE_BITS, Rows, check_finite, expect

WIDTH, PER_WORD = 4, 8
ROOM = {128: 1, 64: 2, 32: 4, 16: 8}
"""The words that zero points of a row take are a multiple of this, by the columns of a group."""


def words_of_groups(columns: int, group: int) -> int:
    """How many words the zero points of a row take."""
    room = ROOM.get(min(group, 128), 1)
    return ceil(ceil(columns // group / PER_WORD) / room) * room


@dataclass(frozen=True)
class AwqGemvFormat(Format):
    """How one such matrix is packed."""

    name = "awq"
    whole_numbers = True
    reads: ClassVar[frozenset[str]] = frozenset({"qweight", "qzeros", "scales"})

    group: int
    scale_bits: int = 16

    @property
    def label(self) -> str:
        return f"awq gemv {ints_label(WIDTH, self.group)}"

    @property
    def bits(self) -> float:
        return WIDTH + (self.scale_bits + WIDTH) / self.group

    @classmethod
    def detect(
        cls, parts: Mapping[str, Part], shape: Shape, hint: Mapping[str, Any]
    ) -> "AwqGemvFormat | None":
        out_features, in_features = shape
        zeros, scales = parts.get("qzeros"), parts.get("scales")
        if "qweight" not in parts or in_features % PER_WORD or zeros is None or scales is None:
            return None
        words = zeros.shape[-1] if zeros.shape else 0
        # The scales tell it from the first layout, whose words have the same shape where a matrix is square.
        if parts["qweight"].shape != (out_features, in_features // PER_WORD):
            return None
        if zeros.shape != (out_features, words) or scales.shape != (out_features, words * PER_WORD):
            return None
        if _is_gptq(parts, shape, hint):
            return None
        for name in ("qweight", "qzeros"):
            expect(parts, name, ("I32",))
        expect(parts, "scales", SCALE_BITS)
        hinted = hint.get("group_size")
        likely = [hinted] if isinstance(hinted, int) and hinted > 0 else list(ROOM)
        fitting = [
            group
            for group in likely
            if in_features % group == 0 and words_of_groups(in_features, group) == words
        ]
        if len(fitting) != 1:
            said = f"groups of {hinted}" if hinted else f"one of the groups {', '.join(map(str, ROOM))}"
            raise CheckpointError(
                f"qzeros have the shape {list(zeros.shape)}, which does not fit {said} of {in_features} input features"
            )
        return cls(fitting[0], SCALE_BITS[scales.dtype])

    def pack(self, parts: Mapping[str, Tensor], shape: Shape) -> "AwqGemvWeight":
        out_features, in_features = shape
        groups = in_features // self.group
        scales = check_finite("scales", parts["scales"])
        if bool(scales[:, groups:].ne(0).any()):
            raise CheckpointError(f"scales of groups after the {groups} that there are must be 0")
        return AwqGemvWeight(
            self,
            out_features,
            in_features,
            group=self.group,
            g_idx=None,
            qweight_OW=parts["qweight"],
            qzeros_OW=parts["qzeros"],
            scales_OG=scales,
        )


def _is_gptq(parts: Mapping[str, Part], shape: Shape, hint: Mapping[str, Any]) -> bool:
    """Whether parts that have the shapes of this layout are GPTQ's, whose four bits in groups of 8 have the same where
    there are eight inputs to an output. Only the config can tell."""
    out_features, in_features = shape
    scales, zeros = parts["scales"].shape, parts["qzeros"].shape
    if in_features != PER_WORD * out_features or zeros != (scales[0], ceil(out_features / PER_WORD)):
        return False
    method = hint.get("method")
    if method in ("awq", "gptq"):
        return method == "gptq"
    raise CheckpointError(
        f"qweight {list(parts['qweight'].shape)} of a weight of {list(shape)} is GPTQ's or AWQ's (GEMV): give "
        "`quant_method` in quantization_config"
    )


@dataclass(frozen=True, eq=False)
class AwqGemvWeight(GroupedInts):
    """One such matrix in memory."""

    qweight_OW: Tensor
    qzeros_OW: Tensor
    scales_OG: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.qweight_OW, self.qzeros_OW, self.scales_OG)

    def codes(self, rows: Rows) -> Tensor:
        return unpack_fields(self.qweight_OW[rows].view(torch.uint8), WIDTH, self.in_features)

    def zeros(self, rows: Rows) -> Tensor:
        groups = self.in_features // self.group
        return unpack_fields(self.qzeros_OW[rows].view(torch.uint8), WIDTH, groups)

    def scales(self, rows: Rows) -> Tensor:
        return self.scales_OG[rows, : self.in_features // self.group].float()
