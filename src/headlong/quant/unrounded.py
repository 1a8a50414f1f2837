"""compressed-tensors before compression: float weights with the scales that they are to be rounded by.

What such a model computes with is the rounded weights, so they are rounded as they are loaded, by the config's word:
tensors alone do not say to how many bits. Knows nothing of who multiplies.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from headlong.errors import CheckpointError
from headlong.quant.compressed import CompressedInts
from headlong.quant.format import Format, PackedWeight, Part, Shape
from headlong.quant.fp8 import FP8_MAX, Fp8Format
from headlong.quant.parts import ACTIVATION_PARTS, FLOAT_BITS, expect

ROWS_AT_A_TIME = 1024


@dataclass(frozen=True)
class Unrounded(Format):
    """Floats that are to be rounded to `inner`."""

    name: ClassVar[str] = "compressed-tensors"
    whole_numbers = True
    unused = ACTIVATION_PARTS
    reads: ClassVar[frozenset[str]] = frozenset({"weight", "weight_scale", "weight_zero_point"})

    inner: CompressedInts | Fp8Format
    width: int
    stored_bits: int

    @property
    def label(self) -> str:
        _, _, rest = self.inner.label.partition(" ")
        return (
            f"{'fp8' if isinstance(self.inner, Fp8Format) else f'int{self.width}'} {rest} (not yet rounded)"
        )

    @property
    def bits(self) -> float:
        return self.stored_bits + self.inner.bits - 8

    @classmethod
    def detect(cls, parts: Mapping[str, Part], shape: Shape, hint: Mapping[str, Any]) -> "Unrounded | None":
        weights = hint.get("weights")
        if "weight" not in parts or "weight_scale" not in parts or not isinstance(weights, Mapping):
            return None
        if parts["weight"].dtype not in FLOAT_BITS:
            return None
        weight = expect(parts, "weight", FLOAT_BITS, shape)
        bits, kind = weights.get("num_bits"), weights.get("type")
        as_rounded = {name: part for name, part in parts.items() if name != "weight"}
        inner: Format | None = None
        if kind == "float" and bits == 8:
            inner = Fp8Format.detect(as_rounded | {"weight": Part("F8_E4M3", shape)}, shape, hint)
        elif kind in ("int", None) and isinstance(bits, int) and 2 <= bits <= 8:
            zeros = parts.get("weight_zero_point")
            if zeros is not None:
                as_rounded["weight_zero_point"] = Part("I8", zeros.shape)
            inner = CompressedInts.detect(as_rounded | {"weight": Part("I8", shape)}, shape, hint)
        if not isinstance(inner, CompressedInts | Fp8Format):
            raise CheckpointError(
                f"a float weight with scales that the config rounds to {kind} of {bits!r} bits cannot be read"
            )
        return cls(inner, bits or 8, FLOAT_BITS[weight.dtype])

    def pack(self, parts: Mapping[str, Tensor], shape: Shape) -> PackedWeight:
        weight_OD, scale, zeros = parts["weight"], parts["weight_scale"], parts.get("weight_zero_point")
        is_float = isinstance(self.inner, Fp8Format)
        dtype = torch.float8_e4m3fn if is_float else torch.int8
        half = 1 << (self.width - 1)
        lowest, highest = (-FP8_MAX, FP8_MAX) if is_float else (-half, half - 1)
        codes_OD = torch.empty(weight_OD.shape, dtype=dtype, device=weight_OD.device)
        for first in range(0, len(weight_OD), ROWS_AT_A_TIME):
            rows = slice(first, first + ROWS_AT_A_TIME)
            # In the dtypes that are stored, as compressed-tensors computes.
            rows_RD = weight_OD[rows] / self._of_columns(scale, rows, shape)
            if zeros is not None and not is_float:
                rows_RD += self._of_columns(zeros, rows, shape).to(rows_RD.dtype)
            rows_RD = rows_RD.clamp_(lowest, highest)
            codes_OD[rows] = (rows_RD if is_float else rows_RD.round_()).to(dtype)
        rounded = {"weight": codes_OD, "weight_scale": scale}
        if zeros is not None and not is_float:
            rounded["weight_zero_point"] = zeros.to(torch.int8)
        return self.inner.pack(rounded, shape)

    def _of_columns(self, factors: Tensor, rows: slice, shape: Shape) -> Tensor:
        """The factor of each element of these rows, or what broadcasts to it."""
        if factors.numel() == 1:
            return factors.view(1, 1)
        if isinstance(self.inner, Fp8Format):
            height, width = self.inner.block
            each = factors.view(-(-shape[0] // height), -1).repeat_interleave(height, 0)[rows]
        else:
            width = self.inner.group
            each = factors.view(shape[0], -1)[rows]
        return each.repeat_interleave(width, 1)[:, : shape[1]]
