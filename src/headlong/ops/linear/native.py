"""y = x Wᵀ by the native product: weights stay as narrow as they are stored, laid out 64 outputs side by side.

Serves float32, bfloat16 and float16, and whatever is codes with a scale by group: int8 and int4 of all makers, the
block types of GGUF files, floats of eight bits (e4m3) and all formats of four bits with a table of values. Several
weights over one input, whose outputs may be reordered, become one linear.
"""

import ctypes
from collections.abc import Sequence
from copy import copy
from itertools import groupby

import torch
from torch import Tensor

from headlong.ops import native
from headlong.ops.linear.linear import Linear
from headlong.ops.linear.native_source import (
    BF16,
    BF16_ROUNDED,
    FACTOR_DTYPES,
    NUM_FACTORS,
    PARTS,
    STORED_AS,
    WIDTH,
    PanelLayout,
    Source,
    units_each,
)
from headlong.ops.norm.normed import Normed, whole

ELEMENTS_AT_A_TIME = 2**20
POINTERS = ("codes", "scales", "offsets", "scale_factors", "offset_factors")


class MatrixStruct(ctypes.Structure):
    """Mirrors `Matrix` in csrc/matmul.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("type", "num_ins", "num_outs", "group", "factors", "span")),
        ("row_size", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in (*POINTERS, "bias", "table", "columns", "column_factors")),
    )


class Panels:
    """Consecutive outputs of one layout as the kernel reads them, from `column` of a line of outputs on."""

    def __init__(
        self, layout: PanelLayout, size: int, out_features: int, column: int, bias: Tensor | None
    ) -> None:
        self.column = column
        self.bias = bias
        self.layout = layout
        self._table = torch.tensor(layout.table)
        self._columns, self._factors = _array(layout.inputs.columns), _array(layout.inputs.factors)
        blocks, groups, count = (
            -(-out_features // WIDTH),
            size // layout.group,
            NUM_FACTORS.get(layout.type, 0),
        )
        lengths = [groups * units_each(layout) if layout.type in NUM_FACTORS else size] + count * [groups]
        dtypes = [STORED_AS[layout.type]] + count * [FACTOR_DTYPES[layout.factors]]
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
            layout.inputs.size or size,
            codes,
            *factors,
            *wholes,
            where,
            native.address(self._table) if layout.table else None,
            ctypes.addressof(self._columns) if self._columns else None,
            ctypes.addressof(self._factors) if self._factors else None,
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
        found = Panels(self.layout, struct.num_ins, len(outs_T), 0, bias)
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
        self.in_features = sources[0].in_features
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


def _array(numbers: bytes) -> "ctypes.Array[ctypes.c_char]":
    """A copy of these bytes, whose address can be asked for as long as it is held."""
    return (ctypes.c_char * len(numbers)).from_buffer_copy(numbers)


def _panels(sources: Sequence[Source], order: Tensor | None, bias: Tensor | None) -> list[Panels]:
    """Makes panels of as many outputs as follow one another and have one layout."""
    panels, first, sizes = [], 0, {source.layout: source.shape[1] for source in sources}
    for layout, count in _runs(sources, order):
        own = None if bias is None else bias[first : first + count].contiguous()
        panels.append(Panels(layout, sizes[layout], count, first, own))
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
