"""What of a weight the native GEMM can be given, and as what: its numbers as csrc/matmul.h wants them, rows at a time.

Knows formats by how they are made of codes, not by name; nothing of where outputs lie.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from headlong.quant.format import PackedWeight, Weight
from headlong.quant.gguf import GgufWeight
from headlong.quant.plain import PlainWeight

WIDTH, PIECE = 64, 32
"""The number of outputs that lie side by side; and the number of codes of a group that lie together."""
F32, F16, BF16, BF16_ROUNDED, I8, I8_OFFSET, E4M3, E5M2, U4, U4_OFFSET, U4_TABLE = range(11)
FOUR_BITS = (U4, U4_OFFSET, U4_TABLE)
FLOAT, HALF, PARTS = range(3)
"""How scales and offsets are stored, in the order of csrc/matmul.h."""
_FACTORS = {"float32": FLOAT, "float16": HALF, "parts": PARTS}
FACTOR_DTYPES = {FLOAT: torch.float32, HALF: torch.float16, PARTS: torch.int8}
FLOATS = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16}
STORED_AS = {
    F32: torch.float32,
    F16: torch.float16,
    BF16: torch.bfloat16,
    BF16_ROUNDED: torch.bfloat16,
    I8: torch.int32,
    I8_OFFSET: torch.int32,
    E4M3: torch.int32,
    E5M2: torch.int32,
    U4: torch.int32,
    U4_OFFSET: torch.int32,
    U4_TABLE: torch.int32,
}
"""The C types of codes, which are packed by fours or by eights."""
NUM_FACTORS = {I8: 1, I8_OFFSET: 2, E4M3: 1, E5M2: 1, U4: 1, U4_OFFSET: 2, U4_TABLE: 1}
"""How many factors a group of codes has: a scale, and an offset where there is one."""
FLOATS_OF_EIGHT_BITS = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}
LAID_OUT_WHOLE = ("Q8_0", "Q4_0", "Q4_1")
"""The block types that the kernel lays out as they are in the file."""


class Inputs(NamedTuple):
    """How rows of activations are gathered before they are multiplied: `csrc/matmul.h` has the definition."""

    size: int = 0
    """How many numbers a row has; 0 where rows are multiplied as they are."""
    columns: bytes = b""
    """The number of a row that each input is, int32."""
    factors: bytes = b""
    """What inputs are multiplied with, float32; empty where they are not."""


class PanelLayout(NamedTuple):
    """How outputs lie in memory: outputs of one layout may lie side by side."""

    type: int
    group: int
    factors: int = FLOAT
    """How scales and offsets are stored: FLOAT, HALF or PARTS."""
    span: int = 1
    """The number of groups that share the factor that PARTS are multiplied with."""
    table: tuple[float, ...] = ()
    """What the codes of U4_TABLE stand for."""
    inputs: Inputs = Inputs()


@dataclass(frozen=True)
class Source:
    """A matrix that can be laid out, some rows at a time, so that little of it is held twice."""

    weight: Weight
    layout: PanelLayout

    @classmethod
    def of(cls, weight: Weight, *, rounding: bool = False) -> "Source | None":
        """Makes a source of a weight, or None if the kernel does not know its format or shape: codes are taken two at
        a time. `rounding` says that activations that meet bfloat16 may be rounded to it."""
        if isinstance(weight, PlainWeight):
            weight = weight.weight_OD
        if isinstance(weight, Tensor):
            return cls._of_floats(weight, rounding=rounding)
        if (found := weight.gathered()) is None:
            return cls._of_codes(weight)
        inner = cls.of(found.weight, rounding=rounding)
        if inner is None or inner.layout.inputs.size:
            return None
        factors = b"" if found.factors_K is None else found.factors_K.float().numpy().tobytes()
        inputs = Inputs(weight.in_features, found.columns_K.int().numpy().tobytes(), factors)
        return cls(inner.weight, inner.layout._replace(inputs=inputs))

    @classmethod
    def _of_floats(cls, weight: Tensor, *, rounding: bool) -> "Source | None":
        stored = FLOATS.get(weight.dtype)
        if stored is None:
            return None
        if stored == BF16:
            # Numbers of bfloat16 are taken two at a time, and an odd number of them as what they are in float32.
            stored = F32 if weight.shape[1] % 2 else BF16_ROUNDED if rounding else BF16
        return cls(weight, PanelLayout(stored, weight.shape[1]))

    @classmethod
    def _of_codes(cls, weight: PackedWeight) -> "Source | None":
        if (coding := weight.float_coding()) is not None:
            type = FLOATS_OF_EIGHT_BITS[coding.dtype] if coding.values is None else U4_TABLE
            layout = PanelLayout(type, coding.group, table=coding.values or ())
            return None if coding.group % 2 else cls(weight, layout)
        grouping = weight.grouping()
        if grouping is None or grouping.group % 2:
            return None
        if grouping.distinct:
            table = tuple(float(code) for code in grouping.distinct) + (0.0,) * (16 - len(grouping.distinct))
            return cls(weight, PanelLayout(U4_TABLE, grouping.group, table=table))
        lowest, highest, offsets = grouping.lowest, grouping.highest, grouping.has_offsets
        as_stored = (grouping.group, _FACTORS[grouping.factors], grouping.span)
        # Codes that are moved into range move their offsets, which then need all of a float.
        moved = (grouping.group, FLOAT, 1)
        if lowest >= -8 and highest <= 7 and not offsets:
            return cls(weight, PanelLayout(U4, *as_stored))
        if lowest >= 0 and highest <= 15 and offsets:
            return cls(weight, PanelLayout(U4_OFFSET, *as_stored))
        if lowest >= -8 and highest <= 7 and grouping.factors != "parts":
            return cls(weight, PanelLayout(U4_OFFSET, *moved))
        if lowest < -128 or highest > 255 or (highest > 127 and lowest < 0):
            return None
        if highest > 127:
            return cls(weight, PanelLayout(I8_OFFSET, *moved))
        return cls(weight, PanelLayout(I8_OFFSET if offsets else I8, *as_stored))

    @property
    def in_features(self) -> int:
        """How many numbers a row of activations has."""
        return self.layout.inputs.size or self.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs, and inputs as they are multiplied."""
        if isinstance(self.weight, Tensor):
            return self.weight.shape[0], self.weight.shape[1]
        return self.weight.out_features, self.weight.in_features

    def rows(self, first: int, last: int) -> list[Tensor]:
        """Returns what is to be laid out of these rows: floats; codes, scales and, where the layout has them, offsets;
        or whole blocks."""
        if isinstance(self.weight, Tensor):
            return [self.weight[first:last].to(STORED_AS[self.layout.type])]
        if isinstance(self.weight, GgufWeight) and self.weight.format.label in LAID_OUT_WHOLE:
            return [self.weight.data[first:last]]
        codes, scales, offsets, *wholes = self.weight.grouped(first, last)
        if self.layout.type == U4_TABLE and codes.dtype == torch.int8:
            codes = self._numbers_of(codes)
        if self.layout.type in (E4M3, E5M2, U4_TABLE):
            return [_units(codes, self.layout), scales.float()]
        grouping = self.weight.grouping()
        assert grouping is not None
        if self.layout.type in (U4, U4_OFFSET):
            if self.layout.type == U4 or grouping.lowest < 0:
                codes = (codes + 8).view(torch.uint8)
                offsets = None if offsets is None else offsets - 8.0 * scales
        elif grouping.highest > 127:
            moved = 128.0 * scales
            offsets = moved if offsets is None else offsets + moved
        else:
            codes = codes.view(torch.uint8) ^ 128
        dtype = FACTOR_DTYPES[self.layout.factors]
        factors = [part.to(dtype) for part in (scales, offsets) if part is not None]
        return [
            _units(codes, self.layout),
            *factors,
            *(whole.half() for whole in wholes if whole is not None),
        ]

    def _numbers_of(self, codes_RD: Tensor) -> Tensor:
        """The places in the table of whole numbers."""
        places = torch.zeros(256, dtype=torch.uint8)
        for place, value in reversed(list(enumerate(self.layout.table))):
            places[int(value) & 255] = place
        flat = codes_RD.contiguous().view(torch.uint8).view(-1)
        return places.index_select(0, flat.int()).view(codes_RD.shape)


def units_each(layout: PanelLayout) -> int:
    """Units of memory that a group takes, which has room for a multiple of eight codes."""
    eights = -(-layout.group // 8)
    return eights if layout.type in FOUR_BITS else 2 * eights


def _units(codes_RD: Tensor, layout: PanelLayout) -> Tensor:
    """Returns rows of codes as csrc/matmul.h wants each group of them."""
    codes_RGC = codes_RD.unflatten(1, (-1, layout.group))
    if layout.group % 8:
        codes_RGC = pad(codes_RGC, (0, -layout.group % 8))
    if layout.type in FOUR_BITS:
        halves = (piece.chunk(2, -1) for piece in codes_RGC.split(PIECE, -1))
        codes_RGC = torch.cat([low | high << 4 for low, high in halves], -1)
    return codes_RGC.contiguous().view(torch.int32).flatten(1)
