"""MX formats: floats of four or eight bits times a power of two (e8m0) for each 32 columns; and MLX's own names of
such parts.

gpt-oss calls them blocks and scales, compressed-tensors weight_packed and weight_scale, modelopt and Quark weight and
weight_scale, DeepSeek-V4 weight and scale; MLX keeps codes in 32-bit words. The low half of a byte comes first in all.
Knows nothing of who multiplies.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from headlong.errors import CheckpointError
from headlong.quant.format import Format, Grouped, Grouping, PackedWeight, Part, Shape
from headlong.quant.fp8 import Fp8Weight, decode_fp8
from headlong.quant.ints import lookup_nibbles, split_nibbles
from headlong.quant.nvfp4 import E2M1, Nvfp4Weight
from headlong.quant.parts import ACTIVATION_PARTS, POWERS, Rows, RowWeight, by_group, check_finite, expect

GROUP = 32
Kind = Literal["mxfp4", "mxfp8", "nvfp4"]
_BITS: dict[str, int] = {"mxfp4": 4, "mxfp8": 8, "nvfp4": 4}
_GROUPS: dict[str, int] = {"mxfp4": GROUP, "mxfp8": GROUP, "nvfp4": 16}
_DOUBLED = tuple(int(2 * value) for value in E2M1)


class _Spelling(NamedTuple):
    """What one tool calls the codes and the scales, and how it stores the codes of `kind`."""

    codes: str
    scales: str
    kind: Kind
    dtype: str

    def codes_shape(self, shape: Shape) -> Shape:
        out_features, in_features = shape
        if self.codes == "blocks":
            return out_features, in_features // GROUP, GROUP // 2
        per_unit = {"U8": 8, "U32": 32}.get(self.dtype, 8) // _BITS[self.kind]
        return out_features, in_features // per_unit


_SPELLINGS = (
    _Spelling("weight_packed", "weight_scale", "mxfp4", "U8"),
    _Spelling("weight", "weight_scale", "mxfp4", "U8"),
    _Spelling("weight", "scale", "mxfp4", "I8"),
    _Spelling("weight", "scale", "mxfp4", "U8"),
    _Spelling("blocks", "scales", "mxfp4", "U8"),
    _Spelling("weight", "weight_scale", "mxfp8", "F8_E4M3"),
    _Spelling("weight", "scales", "mxfp4", "U32"),
    _Spelling("weight", "scales", "mxfp8", "U32"),
    _Spelling("weight", "scales", "nvfp4", "U32"),
)


@dataclass(frozen=True)
class MxFormat(Format):
    """How one matrix of such floats is packed."""

    name = "mx"
    unused: ClassVar[Mapping[str, str]] = ACTIVATION_PARTS

    kind: Kind
    codes_name: str
    scales_name: str

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({self.codes_name, self.scales_name})

    @property
    def label(self) -> str:
        return self.kind

    @property
    def bits(self) -> float:
        return _BITS[self.kind] + 8 / _GROUPS[self.kind]

    @property
    def whole_numbers(self) -> bool:  # type: ignore[override]
        """Four-bit floats are halves of whole numbers."""
        return self.kind == "mxfp4"

    @property
    def has_float_coding(self) -> bool:
        return self.kind != "mxfp4"

    @classmethod
    def detect(cls, parts: Mapping[str, Part], shape: Shape, hint: Mapping[str, Any]) -> "MxFormat | None":
        out_features, in_features = shape
        alone = parts["weight"] if parts.keys() == {"weight"} else None
        if alone == Part("I8", (out_features, in_features // 2)):
            raise CheckpointError("codes of four bits, two to a byte, need scale beside them")
        for codes, scales, kind, dtype in _SPELLINGS:
            spelling = _Spelling(codes, scales, kind, dtype)
            if codes not in parts or scales not in parts or parts[codes].dtype != dtype:
                continue
            if parts[scales].dtype not in POWERS or parts.keys() & {"weight_scale_2", "weight_global_scale"}:
                continue
            group = _GROUPS[kind]
            fits = (
                in_features % group == 0
                and parts[codes].shape == spelling.codes_shape(shape)
                and parts[scales].shape == (out_features, in_features // group)
            )
            if fits and hint.get("mode") in (None, kind):
                return cls(kind, codes, scales)
            # A float of eight bits may have powers of two in blocks of any shape.
            if codes in ("blocks", "weight_packed") or dtype in ("U8", "I8"):
                wanted = spelling.codes_shape(shape)
                expect(parts, codes, (dtype,), wanted)
                expect(parts, scales, POWERS, (out_features, in_features // group))
        return None

    def pack(self, parts: Mapping[str, Tensor], shape: Shape) -> PackedWeight:
        out_features, in_features = shape
        stored = parts[self.codes_name].view(torch.uint8).view(out_features, -1)
        if self.kind == "nvfp4":
            scales = check_finite(self.scales_name, parts[self.scales_name].view(torch.float8_e4m3fn))
            whole = torch.ones((), device=stored.device)
            return Nvfp4Weight(
                self, out_features, in_features, _GROUPS["nvfp4"], False, stored, scales, whole
            )
        scales = check_finite(self.scales_name, parts[self.scales_name].view(torch.float8_e8m0fnu))
        if self.kind == "mxfp8":
            codes = stored.view(torch.float8_e4m3fn)
            return Fp8Weight(self, out_features, in_features, (1, GROUP), codes, scales)
        return Mxfp4Weight(self, out_features, in_features, stored, scales)


@dataclass(frozen=True, eq=False)
class Mxfp4Weight(RowWeight):
    """One matrix of four-bit floats in memory."""

    codes_OB: Tensor
    """The codes, two to a byte."""
    scale_OG: Tensor
    """The powers of two, one byte each."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.codes_OB, self.scale_OG)

    def grouping(self) -> Grouping:
        lowest, highest, distinct = min(_DOUBLED), max(_DOUBLED), tuple(set(_DOUBLED))
        return Grouping(GROUP, lowest, highest, has_offsets=False, factors="float32", distinct=distinct)

    def grouped(self, first: int, last: int) -> Grouped:
        rows = slice(first, last)
        doubled = lookup_nibbles(self.codes_OB[rows], tuple(float(code) for code in _DOUBLED))
        return Grouped(doubled.to(torch.int8), decode_fp8(self.scale_OG[rows]).mul_(0.5), None)

    def blocks(self, first: int, last: int) -> Tensor:
        """The rows [first, last) as the blocks of GGUF files: a power of two, then codes, of which the first half are
        the low halves of bytes."""
        codes_RG2 = split_nibbles(self.codes_OB[first:last]).unflatten(1, (-1, 2, GROUP // 2))
        bytes_RGB = codes_RG2[:, :, 0] | codes_RG2[:, :, 1] << 4
        powers_RG = self.scale_OG[first:last].view(torch.uint8)
        return torch.cat([powers_RG[..., None], bytes_RGB], -1).flatten(1)

    def unpack(self, rows: Rows) -> Tensor:
        scales_RG = decode_fp8(self.scale_OG[rows])
        values_RD = lookup_nibbles(self.codes_OB[rows], E2M1)
        for values, scales in by_group(values_RD, scales_RG, GROUP):
            values.mul_(scales)
        return values_RD
