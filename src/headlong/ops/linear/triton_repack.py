"""Repacks a checkpoint's weights as the GPU's kernels read them: those of one layout become one `GemmWeight`, their
rows in the order of the outputs. What is packed is laid out anew; floats that need no order stay where they are.

Legend. O outputs, R rows of a weight, C its columns, G groups of columns that share a scale, W words.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from headlong.errors import CheckpointError
from headlong.ops.linear.triton_lookup import FP4_UNIT
from headlong.ops.linear.triton_unpack import E2M1, E4M3, FLOAT, FP4, INTEGER, NF4, NIBBLE
from headlong.ops.linear.triton_weight import (
    COLUMNS,
    DTYPES,
    INTERLEAVE,
    GemmWeight,
    WeightLayout,
    interleaved,
)
from headlong.ops.triton_launch import CONVERTS_E4M3
from headlong.quant.bitsandbytes import FP4_TABLE, NF4_TABLE, Bnb4Weight
from headlong.quant.format import PackedWeight, Weight
from headlong.quant.fp8 import Fp8Weight, decode_fp8
from headlong.quant.ints import split_nibbles
from headlong.quant.mx import GROUP, Mxfp4Weight
from headlong.quant.nvfp4 import Nvfp4Weight
from headlong.quant.plain import PlainWeight

LOADED_ROWS = 1024
"""The number of rows of a weight that are laid out at a time, so that little of it is held twice."""
NOWHERE = -1
"""The place of a row that is left out."""


class Rows(NamedTuple):
    """Some rows of a weight, ready to be laid out."""

    codes_RC: Tensor
    scales_RG: Tensor | None = None
    offsets_RG: Tensor | None = None
    row_scales_R: Tensor | None = None

    def where(self, wanted_R: Tensor) -> "Rows":
        rest = [None if part is None else _rows(part, wanted_R) for part in self[1:]]
        return Rows(_rows(self.codes_RC, wanted_R), *rest)


def layout_of(weight: Weight) -> WeightLayout | str:
    """The layout that a weight is repacked into, or the reason why no kernel can multiply it."""
    if isinstance(weight, PlainWeight):
        weight = weight.weight_OD
    if isinstance(weight, Tensor):
        if weight.dtype not in DTYPES:
            return f"it does not multiply {weight.dtype}"
        return WeightLayout(FLOAT, weight.dtype, 8 * weight.element_size())
    if isinstance(weight, Fp8Weight):
        rows, columns = weight.block
        if weight.weight_OD.dtype != torch.float8_e4m3fn:
            return f"it does not multiply {weight.weight_OD.dtype}"
        if columns >= weight.in_features and rows in (1, weight.out_features):
            return WeightLayout(E4M3, torch.int16, 8, has_row_scales=True)
        layout = WeightLayout(E4M3, torch.int16, 8, columns, rows)
    elif isinstance(weight, Mxfp4Weight):
        layout = WeightLayout(E2M1, torch.uint8, 4, GROUP)
    elif isinstance(weight, Nvfp4Weight):
        layout = WeightLayout(E2M1, torch.uint8, 4, weight.group, has_row_scales=True)
    elif isinstance(weight, Bnb4Weight):
        layout = _table_layout(weight)
    else:
        layout = _integer_layout(weight)
    if (
        isinstance(layout, WeightLayout)
        and layout.group_size % COLUMNS
        and (layout.group_size < 1 or COLUMNS % layout.group_size)
    ):
        return f"groups of {layout.group_size} columns do not fit its steps of {COLUMNS}"
    return layout


def _integer_layout(weight: PackedWeight) -> WeightLayout | str:
    grouping = weight.grouping()
    if grouping is None:
        return f"{weight.format.label} weights are not whole numbers by even groups"
    lowest, highest = grouping.lowest, grouping.highest
    if lowest >= -8 and highest <= (7 if lowest < 0 else 15):
        code, stored, bits, zero = NIBBLE, torch.uint8, 4, 8 if lowest < 0 else 0
    elif lowest >= -128 and highest <= (127 if lowest < 0 else 255):
        code, stored, bits, zero = INTEGER, torch.int16, 8, 0 if lowest < 0 else -128
    else:
        return f"codes from {lowest} to {highest} do not fit a byte"
    if grouping.group >= weight.in_features and not grouping.has_offsets:
        return WeightLayout(code, stored, bits, zero_point=zero, has_row_scales=True)
    whole = -(-grouping.group // COLUMNS) * COLUMNS
    group = whole if grouping.group >= weight.in_features else grouping.group
    return WeightLayout(code, stored, bits, group, zero_point=zero, has_offsets=grouping.has_offsets)


def _table_layout(weight: Bnb4Weight) -> WeightLayout | str:
    for encoding, numbers in ((NF4, NF4_TABLE), (FP4, FP4_TABLE)):
        if torch.allclose(torch.tensor(weight.table), torch.tensor(numbers), rtol=2.0**-22, atol=0.0):
            return WeightLayout(encoding, torch.uint8, 4, weight.float_coding().group)
    return f"the table of this {weight.format.label} weight is not the usual one"


def rows_of(weight: Weight, layout: WeightLayout, first: int, last: int) -> Rows:
    """The rows [first, last) as the kernels read them."""
    if isinstance(weight, PlainWeight):
        weight = weight.weight_OD
    if isinstance(weight, Tensor):
        return Rows(weight[first:last])
    if isinstance(weight, Fp8Weight):
        places = torch.arange(first, last, device=weight.device) // weight.block[0]
        scales_RG = weight.scale_RC.float()[places]
        codes = pair_codes(_numbers(weight.weight_OD[first:last]), 8)
        return Rows(codes, None, None, scales_RG[:, 0]) if layout.has_row_scales else Rows(codes, scales_RG)
    if isinstance(weight, Nvfp4Weight):
        whole = weight.global_scale.reciprocal() if weight.divides else weight.global_scale
        packed, scales_RG = weight.codes_OB[first:last], weight.scale_OG[first:last]
        return Rows(
            pair_codes(split_nibbles(packed), 4),
            scales_RG if CONVERTS_E4M3.value else scales_RG.bfloat16(),  # which has every e4m3
            None,
            whole.expand(last - first),
        )
    if isinstance(weight, Mxfp4Weight):
        # bfloat16 has every power of two that may be one of these.
        scales_RG = decode_fp8(weight.scale_OG[first:last]).bfloat16()
        return Rows(pair_codes(split_nibbles(weight.codes_OB[first:last]), 4), scales_RG)
    if isinstance(weight, Bnb4Weight):
        codes, scales_RG = weight.grouped(first, last)[:2]
        return Rows(pair_codes(codes, 4), scales_RG / (FP4_UNIT if layout.encoding == FP4 else 1))
    codes, scales, offsets, scale_wholes, offset_wholes = weight.grouped(first, last)
    scales, offsets = _whole(scales, scale_wholes), _whole(offsets, offset_wholes)
    codes = pair_codes((codes.int() + layout.zero_point & 255).to(torch.uint8), layout.bits)
    assert scales is not None
    return Rows(codes, None, None, scales[:, 0]) if layout.has_row_scales else Rows(codes, scales, offsets)


def _whole(parts_RG: Tensor | None, wholes_RW: Tensor | None) -> Tensor | None:
    """Returns factors in float32; those made of parts are multiplied with what some of them share."""
    if parts_RG is None or wholes_RW is None:
        return None if parts_RG is None else parts_RG.float()
    span = parts_RG.shape[1] // wholes_RW.shape[1]
    return parts_RG.float() * wholes_RW.float().repeat_interleave(span, dim=1)


def pair_codes(codes_RD: Tensor, bits: int) -> Tensor:
    """Two codes to a word: those of a step's first columns in the low halves, those of the others in the high ones."""
    missing = -codes_RD.shape[1] % (2 * COLUMNS)
    steps_RS2C = torch.nn.functional.pad(codes_RD, (0, missing)).unflatten(1, (-1, 2, COLUMNS))
    words_RS2C = steps_RS2C if bits == 4 else steps_RS2C.to(torch.int16)
    return (words_RS2C[:, :, 0] | words_RS2C[:, :, 1] << bits).flatten(1)


def _numbers(weight_RD: Tensor) -> Tensor:
    """Returns the bytes of e4m3, and refuses its NaN (127 and 255), which the kernels do not know."""
    codes = weight_RD.view(torch.uint8)
    if bool(((codes & 127) == 127).any()):
        raise CheckpointError("an FP8 weight has values that are no numbers")
    return codes


def shape_of(weight: Weight) -> tuple[int, int]:
    if isinstance(weight, Tensor):
        return weight.shape[0], weight.shape[1]
    return weight.out_features, weight.in_features


def repack(weights: Sequence[Weight], order: Tensor | None, dtype: torch.dtype) -> list[GemmWeight]:
    """Repacks weights into one `GemmWeight` for each layout, its rows in the order of their outputs; rows that are not
    in the order are left out."""
    sizes = [shape_of(weight)[0] for weight in weights]
    order = torch.arange(sum(sizes)) if order is None else order.cpu()
    out_R = torch.full((sum(sizes),), NOWHERE).scatter_(0, order, torch.arange(len(order)))
    parts = [
        (weight, layout_of(weight), out_R)
        for weight, out_R in zip(weights, out_R.split(sizes), strict=True)
        if bool((out_R != NOWHERE).any())
    ]
    repacked = []
    for layout in dict.fromkeys(layout for _, layout, _ in parts):
        assert isinstance(layout, WeightLayout), layout
        own = [(weight, out_R) for weight, other, out_R in parts if other == layout]
        columns_O = torch.cat([out_R[out_R != NOWHERE] for _, out_R in own]).sort().values
        places = [
            torch.where(out_R == NOWHERE, NOWHERE, torch.searchsorted(columns_O, out_R)) for _, out_R in own
        ]
        mixed = columns_O if len(columns_O) < len(order) else None
        repacked.append(_lay_out(layout, [weight for weight, _ in own], places, len(columns_O), mixed, dtype))
    return repacked


def _lay_out(
    layout: WeightLayout,
    weights: list[Weight],
    places: Sequence[Tensor],
    outs: int,
    columns_O: Tensor | None,
    dtype: torch.dtype,
) -> GemmWeight:
    """Lays out rows: row r of a weight becomes row `place[r]` of the matrix, if it has a place."""
    ins = shape_of(weights[0])[1]
    if not all(_keeps_blocks(place_R, layout.scale_rows) for place_R in places):
        layout = layout._replace(scale_rows=1)
    in_order = len(weights) == 1 and torch.equal(places[0], torch.arange(outs))
    as_is = in_order and layout.encoding == FLOAT
    sample = rows_of(weights[0], layout, 0, outs if as_is else 1)
    codes = sample.codes_RC.contiguous()
    if not as_is:
        codes = codes.new_zeros(_codes_shape(layout, outs, ins), dtype=layout.storage)
    groups = triton.cdiv(layout.padded(ins), layout.group_size or 1)
    scales_OG = _zeros(sample.scales_RG, triton.cdiv(outs, layout.scale_rows), groups)
    offsets_OG = _zeros(sample.offsets_RG, outs, groups)
    row_scales_O = _zeros(sample.row_scales_R, outs)
    for weight, place_R in zip(weights, places, strict=True):
        for begin in range(0, len(place_R), LOADED_ROWS):
            at = place_R[begin : begin + LOADED_ROWS]
            wanted = at != NOWHERE
            if not wanted.any():
                continue
            rows, at = rows_of(weight, layout, begin, begin + len(at)), at.to(weight.device)
            if not wanted.all():
                wanted = wanted.to(weight.device)
                rows, at = rows.where(wanted), at[wanted]
            if not as_is:
                _put_codes(codes, rows.codes_RC, at)
            first_of_block = at % layout.scale_rows == 0
            if rows.scales_RG is not None:
                _put(scales_OG, rows.scales_RG[first_of_block], at[first_of_block] // layout.scale_rows)
            _put(offsets_OG, rows.offsets_RG, at)
            _put(row_scales_O, rows.row_scales_R, at)
    columns = None if columns_O is None else columns_O.to(codes.device, torch.int32)
    dtype = layout.storage if layout.encoding == FLOAT else dtype
    scales = scales_OG if layout.scale_rows > 1 else _across(scales_OG)
    return GemmWeight(layout, dtype, outs, ins, codes, scales, _across(offsets_OG), row_scales_O, columns)


def select_outputs(whole: GemmWeight, outs_T: Tensor) -> GemmWeight:
    """Returns the weight with these outputs alone. Where outputs shared a scale, each has its own now."""

    def across(factors_OG: Tensor | None, outs_T: Tensor) -> Tensor | None:
        return None if factors_OG is None else _across(_rows(factors_OG, outs_T))

    rows, scales, offsets_GO = whole.layout.scale_rows, whole.scales, whole.offsets_GO
    return replace(
        whole,
        layout=whole.layout._replace(scale_rows=1),
        num_outs=len(outs_T),
        codes=_select_codes(whole.codes, outs_T),
        scales=across(scales if scales is None or rows > 1 else scales.t(), outs_T // rows),
        offsets_GO=across(None if offsets_GO is None else offsets_GO.t(), outs_T),
        row_scales_O=None if whole.row_scales_O is None else whole.row_scales_O[outs_T],
    )


def _codes_shape(layout: WeightLayout, outs: int, ins: int) -> tuple[int, ...]:
    if layout.interleave == 1:
        return outs, layout.words(ins)
    return triton.cdiv(outs, INTERLEAVE), layout.words(ins) // COLUMNS, INTERLEAVE, COLUMNS


def _put_codes(codes: Tensor, rows_RC: Tensor, at: Tensor) -> None:
    if codes.ndim == 2:
        codes[at] = rows_RC
    else:
        codes[at // INTERLEAVE, :, at % INTERLEAVE] = rows_RC.unflatten(1, (-1, COLUMNS))


def _select_codes(codes: Tensor, outs_T: Tensor) -> Tensor:
    if codes.ndim == 2:
        return codes[outs_T]
    return interleaved(codes[outs_T // INTERLEAVE, :, outs_T % INTERLEAVE].flatten(1))


def _rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """Returns a copy of some rows, by number or by mask; not every device can index float8."""
    if tensor.dtype != torch.float8_e4m3fn:
        return tensor[rows]
    return tensor.view(torch.uint8)[rows].view(tensor.dtype)


def _keeps_blocks(place_R: Tensor, rows: int) -> bool:
    """Whether rows that share a scale stay together, or are all left out, and lie where such a block may begin."""
    row_R = torch.arange(len(place_R))
    begin_R = place_R[row_R // rows * rows]
    together = torch.where(begin_R == NOWHERE, NOWHERE, begin_R + row_R % rows)
    return torch.equal(place_R, together) and not bool((begin_R[begin_R != NOWHERE] % rows).any())


def _zeros(like: Tensor | None, *shape: int) -> Tensor | None:
    """Returns zeros of this shape and the dtype of `like`; None where there is no such part."""
    return None if like is None else like.new_zeros(shape)


def _put(room: Tensor | None, rows: Tensor | None, at: Tensor) -> None:
    if room is None or rows is None:
        return
    if room.dtype == torch.float8_e4m3fn:
        # Not every device can index float8.
        room, rows = room.view(torch.uint8), rows.view(torch.uint8)
    room = room[:, : rows.shape[1]] if rows.ndim == 2 else room
    room[at] = rows.to(room.dtype)


def _across(factors_OG: Tensor | None) -> Tensor | None:
    """Transposes factors, so that those of neighbouring outputs lie side by side."""
    return None if factors_OG is None else factors_OG.t().contiguous()
