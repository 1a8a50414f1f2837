"""y = x Wᵀ by the native product: weights stay as narrow as they are stored, laid out 64 outputs side by side.

Serves float32, bfloat16 and float16, and whatever is whole numbers with a scale by group: int8 and int4 of all makers,
and the block types of GGUF files. Several weights over one input, whose outputs may be reordered, become one linear.
"""

import ctypes
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from headlong.ops import native
from headlong.ops.linear.linear import Linear
from headlong.ops.norm.normed import Normed, whole
from headlong.quant.format import Weight
from headlong.quant.gguf import GgufWeight
from headlong.quant.plain import PlainWeight

WIDTH, PIECE = 64, 32
"""The number of outputs that lie side by side; and the number of codes of a group that lie together."""
F32, F16, BF16, BF16_ROUNDED, I8, I8_OFFSET, U4, U4_OFFSET = range(8)
FLOAT, HALF, PARTS = range(3)
"""How scales and offsets are stored, in the order of csrc/matmul.h."""
_FACTORS = {"float32": FLOAT, "float16": HALF, "parts": PARTS}
_FACTOR_DTYPES = {FLOAT: torch.float32, HALF: torch.float16, PARTS: torch.int8}
FLOATS = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16}
_STORED_AS = {
    F32: torch.float32,
    F16: torch.float16,
    BF16: torch.bfloat16,
    BF16_ROUNDED: torch.bfloat16,
    I8: torch.int32,
    I8_OFFSET: torch.int32,
    U4: torch.int32,
    U4_OFFSET: torch.int32,
}
"""The C types of codes, which are packed by fours or by eights."""
_NUM_FACTORS = {I8: 1, I8_OFFSET: 2, U4: 1, U4_OFFSET: 2}
"""How many factors a group of codes has: a scale, and an offset where there is one."""
ELEMENTS_AT_A_TIME = 2**20
LAID_OUT_WHOLE = ("Q8_0", "Q4_0", "Q4_1")
"""The block types that the kernel lays out as they are in the file."""
POINTERS = ("codes", "scales", "offsets", "scale_factors", "offset_factors")


class MatrixStruct(ctypes.Structure):
    """Mirrors `Matrix` in csrc/matmul.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("type", "num_ins", "num_outs", "group", "factors", "span")),
        *((name, ctypes.c_void_p) for name in (*POINTERS, "bias")),
    )


class PanelLayout(NamedTuple):
    """How outputs lie in memory: outputs of one layout may lie side by side."""

    type: int
    group: int
    factors: int = FLOAT
    """How scales and offsets are stored: FLOAT, HALF or PARTS."""
    span: int = 1
    """The number of groups that share the factor that PARTS are multiplied with."""


@dataclass(frozen=True)
class Source:
    """A matrix that can be laid out, some rows at a time, so that little of it is held twice."""

    weight: Weight
    layout: PanelLayout

    @classmethod
    def of(cls, weight: Weight, *, rounding: bool = False) -> "Source | None":
        """Makes a source of a weight, or None if the kernel does not know its format or shape: codes and bfloat16 are
        taken two at a time. `rounding` says that activations that meet bfloat16 may be rounded to it."""
        if isinstance(weight, PlainWeight):
            weight = weight.weight_OD
        if isinstance(weight, Tensor):
            stored = FLOATS.get(weight.dtype)
            if stored is None or (stored == BF16 and weight.shape[1] % 2):
                return None
            return cls(
                weight, PanelLayout(BF16_ROUNDED if stored == BF16 and rounding else stored, weight.shape[1])
            )
        grouping = weight.grouping()
        if grouping is None or grouping.group % 2:
            return None
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
    def shape(self) -> tuple[int, int]:
        if isinstance(self.weight, Tensor):
            return self.weight.shape[0], self.weight.shape[1]
        return self.weight.out_features, self.weight.in_features

    def rows(self, first: int, last: int) -> list[Tensor]:
        """Returns what is to be laid out of these rows: floats; codes, scales and, where the layout has them, offsets;
        or whole blocks."""
        if isinstance(self.weight, Tensor):
            return [self.weight[first:last]]
        if isinstance(self.weight, GgufWeight) and self.weight.format.label in LAID_OUT_WHOLE:
            return [self.weight.data[first:last]]
        codes, scales, offsets, *wholes = self.weight.grouped(first, last)
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
        dtype = _FACTOR_DTYPES[self.layout.factors]
        factors = [part.to(dtype) for part in (scales, offsets) if part is not None]
        return [
            _units(codes, self.layout),
            *factors,
            *(whole.half() for whole in wholes if whole is not None),
        ]


def _units_each(layout: PanelLayout) -> int:
    """Units of memory that a group takes, which has room for a multiple of eight codes."""
    eights = -(-layout.group // 8)
    return eights if layout.type in (U4, U4_OFFSET) else 2 * eights


def _units(codes_RD: Tensor, layout: PanelLayout) -> Tensor:
    """Returns rows of codes as csrc/matmul.h wants each group of them."""
    codes_RGC = codes_RD.unflatten(1, (-1, layout.group))
    if layout.group % 8:
        codes_RGC = pad(codes_RGC, (0, -layout.group % 8))
    if layout.type in (U4, U4_OFFSET):
        halves = (piece.chunk(2, -1) for piece in codes_RGC.split(PIECE, -1))
        codes_RGC = torch.cat([low | high << 4 for low, high in halves], -1)
    return codes_RGC.contiguous().view(torch.int32).flatten(1)


class Panels:
    """Consecutive outputs of one layout as the kernel reads them, from `column` of a line of outputs on."""

    def __init__(
        self, layout: PanelLayout, size: int, out_features: int, column: int, bias: Tensor | None
    ) -> None:
        self.column = column
        self.bias = bias
        blocks, groups, count = (
            -(-out_features // WIDTH),
            size // layout.group,
            _NUM_FACTORS.get(layout.type, 0),
        )
        lengths = [groups * _units_each(layout) if layout.type in _NUM_FACTORS else size] + count * [groups]
        dtypes = [_STORED_AS[layout.type]] + count * [_FACTOR_DTYPES[layout.factors]]
        if layout.factors == PARTS:
            lengths += count * [groups // layout.span]
            dtypes += count * [torch.float16]
        self._in_pairs = layout.type in (BF16, BF16_ROUNDED)
        self.tensors = [torch.empty(blocks, n, WIDTH, dtype=d) for n, d in zip(lengths, dtypes, strict=True)]
        if out_features % WIDTH:
            for tensor in self.tensors:  # lanes past the last output are multiplied too, and must be numbers
                tensor[-1].zero_()
        codes, *rest = (tensor.data_ptr() for tensor in self.tensors)
        factors, wholes = rest[:count] + [None] * (2 - count), rest[count:]
        wholes += [None] * (2 - len(wholes))
        where = None if bias is None else native.address(bias)
        self.struct = MatrixStruct(
            layout.type,
            size,
            out_features,
            layout.group,
            layout.factors,
            layout.span,
            codes,
            *factors,
            *wholes,
            where,
        )

    def put(self, parts: list[Tensor], outs: Tensor) -> None:
        """Lays out rows of a source as the outputs `outs`, counted from the first of these panels."""
        threads = native.num_threads()
        if len(parts) < len(self.tensors):
            (blocks,) = (part.contiguous() for part in parts)
            lay_out = native.kernel("headlong_lay_out_blocks")
            lay_out(blocks.data_ptr(), outs.data_ptr(), len(blocks), ctypes.addressof(self.struct), threads)
            return
        lay_out = native.kernel("headlong_lay_out")
        for number, (part, tensor) in enumerate(zip(parts, self.tensors, strict=True)):
            part = part.contiguous()
            together = 2 if self._in_pairs and number == 0 else 1
            unit = part.element_size() * together
            lay_out(
                part.data_ptr(),
                outs.data_ptr(),
                len(part),
                part.shape[1] // together,
                unit,
                tensor.data_ptr(),
                threads,
            )

    def part(self, first: int, last: int) -> tuple[MatrixStruct, int]:
        """Returns whole blocks that hold at least the outputs [first, last) of the line, as far as these panels have
        them, and the column they begin at."""
        begin = max(first - self.column, 0) // WIDTH
        end = -(-(min(last - self.column, self.struct.num_outs)) // WIDTH)
        part = MatrixStruct.from_buffer_copy(self.struct)
        part.num_outs = max(0, min(end * WIDTH, self.struct.num_outs) - begin * WIDTH)
        names = [name for name in POINTERS if getattr(part, name) is not None]
        for name, tensor in zip(names, self.tensors, strict=True):
            setattr(part, name, tensor[begin:].data_ptr() if part.num_outs else None)
        if self.bias is not None:
            part.bias += 4 * begin * WIDTH
        return part, self.column + begin * WIDTH

    def picked(self, outs_T: Tensor) -> "Panels":
        """Returns these outputs, counted from the first of these panels, as panels of their own."""
        struct = self.struct
        bias = None if self.bias is None else self.bias[outs_T]
        layout = PanelLayout(struct.type, struct.group, struct.factors, struct.span)
        found = Panels(layout, struct.num_ins, len(outs_T), 0, bias)
        rows = []
        for number, tensor in enumerate(self.tensors):
            together = 2 if self._in_pairs and number == 0 else 1
            blocks = tensor.view(len(tensor), -1, WIDTH, together)
            rows.append(blocks[outs_T // WIDTH, :, outs_T % WIDTH].flatten(1))
        found.put(rows, torch.arange(len(outs_T)))
        return found


class NativeLinear(Linear):
    name = "native"

    def __init__(
        self, sources: Sequence[Source], order: Tensor | None = None, bias: Tensor | None = None
    ) -> None:
        """Output i is row `order[i]` of the sources one below the other, plus `bias[i]`."""
        self.in_features = sources[0].shape[1]
        self.out_features = sum(source.shape[0] for source in sources)
        self.panels = _panels(sources, order, bias)

    def __call__(self, given: Normed) -> Tensor:
        x = whole(given).to(torch.float32).contiguous()
        out = x.new_empty(x.shape[0], self.out_features)
        multiply, threads = native.kernel("headlong_matmul"), native.num_threads()
        for panels in self.panels:
            place = out.data_ptr() + panels.column * out.element_size()
            multiply(ctypes.addressof(panels.struct), x.data_ptr(), len(x), place, self.out_features, threads)
        return out

    def picked(self, outs_T: Tensor) -> "NativeLinear | None":
        """Returns a linear with a copy of these outputs; None where they lie in several panels."""
        if len(self.panels) > 1:
            return None
        linear = copy(self)
        linear.panels, linear.out_features = [self.panels[0].picked(outs_T)], len(outs_T)
        return linear


def _panels(sources: Sequence[Source], order: Tensor | None, bias: Tensor | None) -> list[Panels]:
    """Makes panels of as many outputs as follow one another and have one layout."""
    panels, first = [], 0
    for layout, count in _runs(sources, order):
        own = None if bias is None else bias[first : first + count].contiguous()
        panels.append(Panels(layout, sources[0].shape[1], count, first, own))
        first += count
    place_O = torch.arange(first)
    if order is not None:
        place_O = torch.empty_like(order).scatter_(0, order, place_O)
    before, at_a_time = 0, max(1, ELEMENTS_AT_A_TIME // sources[0].shape[1])
    for source in sources:
        for begin in range(0, source.shape[0], at_a_time):
            end = min(begin + at_a_time, source.shape[0])
            _put(source.rows(begin, end), place_O[before + begin : before + end], panels)
        before += source.shape[0]
    return panels


def _runs(sources: Sequence[Source], order: Tensor | None) -> list[tuple[PanelLayout, int]]:
    """Yields layouts in the order of the outputs, each with how many outputs of it follow one another."""
    if order is None:
        runs = groupby(sources, key=lambda source: source.layout)
        return [(layout, sum(source.shape[0] for source in own)) for layout, own in runs]
    layouts = sorted({source.layout for source in sources})
    layout_O = torch.cat([torch.full((source.shape[0],), layouts.index(source.layout)) for source in sources])
    numbers, counts = torch.unique_consecutive(layout_O[order], return_counts=True)
    return [(layouts[number], count) for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)]


def _put(parts: list[Tensor], place_R: Tensor, panels: list[Panels]) -> None:
    """Lays rows out in the panels that their outputs belong to, which may be several."""
    if len(panels) == 1:
        panels[0].put(parts, place_R)
        return
    for own in panels:
        outs = place_R - own.column
        inside = (outs >= 0) & (outs < own.struct.num_outs)
        if bool(inside.all()):
            own.put(parts, outs)
        elif bool(inside.any()):
            own.put([part[inside] for part in parts], outs[inside])
