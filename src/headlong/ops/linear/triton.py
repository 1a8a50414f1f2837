"""y = x Wᵀ on a GPU, for few tokens at the speed of its memory: each weight is read once, as narrow as it is stored.

Serves floats, FP8, NVFP4, and whole numbers with a scale by group. Several weights over one input, whose outputs may be
reordered, become one linear: those of one kind lie in one matrix, in the order of their outputs. A token's bits depend
on its own row alone.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from headlong.errors import CheckpointError
from headlong.ops.best.triton import best
from headlong.ops.linear import triton_pieces
from headlong.ops.linear.triton_matrix import COLUMNS, DTYPES, Kind, Matrix
from headlong.ops.linear.triton_unpack import E2M1, E4M3, FLOAT, INTEGER, NIBBLE
from headlong.ops.linear.triton_widths import SURE, width_for
from headlong.ops.silu_mul.triton import silu_mul
from headlong.quant.format import PackedWeight, Weight
from headlong.quant.fp8 import Fp8Weight
from headlong.quant.nvfp4 import Nvfp4Weight
from headlong.quant.plain import PlainWeight

WORKSPACE = 1 << 26
"""Numbers that pieces of sums may take; more tokens go in several launches."""
LOADED_ROWS = 1024
"""Of a weight that is laid out anew, so that little of it is held twice."""


class Rows(NamedTuple):
    """Some rows of a weight, ready to be laid out."""

    codes_RC: Tensor
    scales_RG: Tensor | None = None
    offsets_RG: Tensor | None = None
    row_scales_R: Tensor | None = None


def kind_of(weight: Weight) -> Kind | str:
    """Or the reason why no kernel can multiply it."""
    if isinstance(weight, PlainWeight):
        weight = weight.weight_OD
    if isinstance(weight, Tensor):
        if weight.dtype not in DTYPES:
            return f"it does not multiply {weight.dtype}"
        return Kind(FLOAT, weight.dtype, 8 * weight.element_size())
    if isinstance(weight, Fp8Weight):
        rows, columns = weight.block
        if weight.weight_OD.dtype != torch.float8_e4m3fn:
            return f"it does not multiply {weight.weight_OD.dtype}"
        if columns >= weight.in_features and rows in (1, weight.out_features):
            return Kind(E4M3, torch.int16, 8, row_scaled=True)
        kind = Kind(E4M3, torch.int16, 8, columns, rows)
    elif isinstance(weight, Nvfp4Weight):
        kind = Kind(E2M1, torch.uint8, 4, weight.group, row_scaled=True)
    else:
        kind = _whole_numbers(weight)
    if isinstance(kind, Kind) and kind.group % COLUMNS and (kind.group < 1 or COLUMNS % kind.group):
        return f"groups of {kind.group} columns do not fit its steps of {COLUMNS}"
    return kind


def _whole_numbers(weight: PackedWeight) -> Kind | str:
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
        return Kind(code, stored, bits, zero=zero, row_scaled=True)
    whole = -(-grouping.group // COLUMNS) * COLUMNS
    group = whole if grouping.group >= weight.in_features else grouping.group
    return Kind(code, stored, bits, group, zero=zero, has_offsets=grouping.has_offsets)


def rows_of(weight: Weight, kind: Kind, first: int, last: int) -> Rows:
    """The rows [first, last) as the kernels read them."""
    if isinstance(weight, PlainWeight):
        weight = weight.weight_OD
    if isinstance(weight, Tensor):
        return Rows(weight[first:last])
    if isinstance(weight, Fp8Weight):
        places = torch.arange(first, last, device=weight.device) // weight.block[0]
        scales_RG = weight.scale_RC.float()[places]
        codes = by_halves(_numbers(weight.weight_OD[first:last]), 8)
        return Rows(codes, None, None, scales_RG[:, 0]) if kind.row_scaled else Rows(codes, scales_RG)
    if isinstance(weight, Nvfp4Weight):
        whole = weight.global_scale.reciprocal() if weight.divides else weight.global_scale
        packed = weight.codes_OB[first:last]
        codes = torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)
        return Rows(by_halves(codes, 4), weight.scale_OG[first:last], None, whole.expand(last - first))
    codes, scales, offsets, scale_wholes, offset_wholes = weight.grouped(first, last)
    scales, offsets = _whole(scales, scale_wholes), _whole(offsets, offset_wholes)
    codes = by_halves((codes.int() + kind.zero & 255).to(torch.uint8), kind.bits)
    assert scales is not None
    return Rows(codes, None, None, scales[:, 0]) if kind.row_scaled else Rows(codes, scales, offsets)


def _whole(parts_RG: Tensor | None, wholes_RW: Tensor | None) -> Tensor | None:
    """Factors in float32; those made of parts are multiplied with what some of them share."""
    if parts_RG is None or wholes_RW is None:
        return None if parts_RG is None else parts_RG.float()
    span = parts_RG.shape[1] // wholes_RW.shape[1]
    return parts_RG.float() * wholes_RW.float().repeat_interleave(span, dim=1)


def by_halves(codes_RD: Tensor, bits: int) -> Tensor:
    """Two codes to a word: those of a step's first columns in the low halves, those of the others in the high ones."""
    missing = -codes_RD.shape[1] % (2 * COLUMNS)
    steps_RS2C = torch.nn.functional.pad(codes_RD, (0, missing)).unflatten(1, (-1, 2, COLUMNS))
    words_RS2C = steps_RS2C if bits == 4 else steps_RS2C.to(torch.int16)
    return (words_RS2C[:, :, 0] | words_RS2C[:, :, 1] << bits).flatten(1)


def _numbers(weight_RD: Tensor) -> Tensor:
    """The bytes of e4m3, of which 127 and 255 are no numbers: the kernels do not know these."""
    codes = weight_RD.view(torch.uint8)
    if bool(((codes & 127) == 127).any()):
        raise CheckpointError("an FP8 weight has values that are no numbers")
    return codes


class TritonLinear:
    name = "triton"

    def __init__(
        self,
        weights: Sequence[Weight],
        order: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Output i is row `order[i]` of the weights one below the other, plus `bias[i]`. Packed weights are multiplied
        in `dtype`, others in their own."""
        self.in_features = _shape(weights[0])[1]
        self.out_features = sum(_shape(weight)[0] for weight in weights)
        self.bias = None if bias is None else bias.to(weights[0].device).contiguous()
        self.matrices = _matrices(weights, order, dtype)
        self._dtype = self.matrices[0].dtype
        most = max(matrix.num_pieces * matrix.outs for matrix in self.matrices)
        self._tokens_at_once = min(max(WORKSPACE // most, SURE), 1 << 15)

    @staticmethod
    def supports(weight: Weight) -> str | None:
        """None if it can be among the weights, else the reason why not."""
        if weight.device.type == "meta":
            return "the weight is not there"
        kind = kind_of(weight)
        return kind if isinstance(kind, str) else None

    def __call__(self, x_ND: Tensor, add_to: Tensor | None = None) -> Tensor:
        """float32 [N, out]; plus `add_to`, of the same shape and dtype."""
        out_NO = x_ND.new_empty((len(x_ND), self.out_features), dtype=torch.float32)
        residual_NO = None if add_to is None else add_to.contiguous()
        for part, x in self._launches(x_ND):
            residual = None if residual_NO is None else residual_NO[part]
            for matrix in self.matrices:
                triton_pieces.add(matrix, x, width_for(len(x), matrix), self.bias, residual, out_NO[part])
        return out_NO

    def plus(self, x_ND: Tensor, to_ND: Tensor) -> Tensor:
        """The product added to `to_ND`, in one go."""
        return self(x_ND, to_ND)

    def gated(self, x_ND: Tensor, dtype: torch.dtype) -> Tensor:
        """silu(first half of the outputs) · second half."""
        whole = self._whole
        if whole is None:
            return silu_mul(self(x_ND), dtype)
        out_NI = x_ND.new_empty((len(x_ND), self.out_features // 2), dtype=dtype)
        for part, x in self._launches(x_ND):
            triton_pieces.gate(whole, x, width_for(len(x), whole), self.bias, out_NI[part])
        return out_NI

    def best(self, x_ND: Tensor) -> Tensor:
        """Which output is the largest, for each token; of equal ones the first, and what is no number wins."""
        whole = self._whole
        if whole is None:
            return best(self(x_ND))
        found_N = x_ND.new_empty(len(x_ND), dtype=torch.long)
        for part, x in self._launches(x_ND):
            triton_pieces.best(whole, x, width_for(len(x), whole), self.bias, found_N[part])
        return found_N

    def _launches(self, x_ND: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The tokens that go at once, and what they are multiplied as."""
        x_ND = x_ND.to(self._dtype).contiguous()
        for first in range(0, len(x_ND), self._tokens_at_once):
            part = slice(first, first + self._tokens_at_once)
            yield part, x_ND[part]

    @property
    def _whole(self) -> Matrix | None:
        """The matrix that has all outputs, one beside the other."""
        return self.matrices[0] if len(self.matrices) == 1 else None

    def picked(self, outs_T: Tensor) -> "TritonLinear | None":
        """These outputs alone, from a copy of their weights; None where they lie in several matrices."""
        if len(self.matrices) > 1:
            return None
        linear, whole = copy(self), self.matrices[0]
        outs_T = outs_T.to(whole.codes_OC.device)
        linear.matrices = [_picked(whole, outs_T)]
        linear.bias = None if self.bias is None else self.bias[outs_T]
        linear.out_features = len(outs_T)
        return linear


def _shape(weight: Weight) -> tuple[int, int]:
    if isinstance(weight, Tensor):
        return weight.shape[0], weight.shape[1]
    return weight.out_features, weight.in_features


def _matrices(weights: Sequence[Weight], order: Tensor | None, dtype: torch.dtype) -> list[Matrix]:
    """One for each kind, its rows in the order of their outputs."""
    sizes = [_shape(weight)[0] for weight in weights]
    place_O = torch.arange(sum(sizes)) if order is None else order.cpu().argsort()
    kinds = [kind_of(weight) for weight in weights]
    parts = list(zip(weights, place_O.split(sizes), kinds, strict=True))
    matrices = []
    for kind in dict.fromkeys(kinds):
        assert isinstance(kind, Kind), kind
        own = [weight for weight, _, other in parts if other == kind]
        columns_O, rows_O = torch.cat([place for _, place, other in parts if other == kind]).sort()
        places = rows_O.argsort().split([_shape(weight)[0] for weight in own])
        mixed = columns_O if len(columns_O) < len(place_O) else None
        matrices.append(_lay_out(kind, own, places, mixed, dtype))
    return matrices


def _lay_out(
    kind: Kind, weights: list[Weight], places: Sequence[Tensor], columns_O: Tensor | None, dtype: torch.dtype
) -> Matrix:
    """Row r of a weight becomes row `place[r]` of the matrix."""
    ins, outs = _shape(weights[0])[1], sum(map(len, places))
    if not all(_keeps_blocks(place_R, kind.rows) for place_R in places):
        kind = kind._replace(rows=1)
    in_order = len(weights) == 1 and torch.equal(places[0], torch.arange(outs))
    as_is = in_order and kind.code == FLOAT
    sample = rows_of(weights[0], kind, 0, outs if as_is else 1)
    codes_OC = sample.codes_RC.contiguous()
    if not as_is:
        codes_OC = codes_OC.new_zeros((outs, codes_OC.shape[1]), dtype=kind.stored)
    groups = triton.cdiv(kind.padded(ins), kind.group or 1)
    scales_OG = _room(sample.scales_RG, triton.cdiv(outs, kind.rows), groups)
    offsets_OG = _room(sample.offsets_RG, outs, groups)
    row_scales_O = _room(sample.row_scales_R, outs)
    for weight, place_R in zip(weights, places, strict=True):
        for begin in range(0, len(place_R), LOADED_ROWS):
            at = place_R[begin : begin + LOADED_ROWS].to(weight.device)
            rows = rows_of(weight, kind, begin, begin + len(at))
            if not as_is:
                _put(codes_OC, rows.codes_RC, at)
            first_of_block = at % kind.rows == 0
            if rows.scales_RG is not None:
                _put(scales_OG, rows.scales_RG[first_of_block], at[first_of_block] // kind.rows)
            _put(offsets_OG, rows.offsets_RG, at)
            _put(row_scales_O, rows.row_scales_R, at)
    columns = None if columns_O is None else columns_O.to(codes_OC.device, torch.int32)
    dtype = kind.stored if kind.code == FLOAT else dtype
    return Matrix(kind, dtype, ins, codes_OC, _across(scales_OG), _across(offsets_OG), row_scales_O, columns)


def _picked(whole: Matrix, outs_T: Tensor) -> Matrix:
    """Of outputs that shared a scale each has its own now."""

    def across(factors_GO: Tensor | None, outs_T: Tensor) -> Tensor | None:
        return None if factors_GO is None else _rows(factors_GO.t(), outs_T).t().contiguous()

    return replace(
        whole,
        kind=whole.kind._replace(rows=1),
        codes_OC=_rows(whole.codes_OC, outs_T),
        scales_GO=across(whole.scales_GO, outs_T // whole.kind.rows),
        offsets_GO=across(whole.offsets_GO, outs_T),
        row_scales_O=None if whole.row_scales_O is None else whole.row_scales_O[outs_T],
    )


def _rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """A copy of some rows, also of float8, of which not every device can pick any."""
    if tensor.dtype != torch.float8_e4m3fn:
        return tensor[rows]
    return tensor.view(torch.uint8)[rows].view(tensor.dtype)


def _keeps_blocks(place_R: Tensor, rows: int) -> bool:
    """Whether rows that share a scale stay together, and lie where such a block may begin."""
    row_R = torch.arange(len(place_R))
    begin_R = place_R[row_R // rows * rows]
    return bool((place_R == begin_R + row_R % rows).all()) and not bool((begin_R % rows).any())


def _room(like: Tensor | None, *shape: int) -> Tensor | None:
    """Zeros, where there is such a part at all."""
    return None if like is None else like.new_zeros(shape)


def _put(room: Tensor | None, rows: Tensor | None, at: Tensor) -> None:
    if room is None or rows is None:
        return
    if room.dtype == torch.float8_e4m3fn:
        # Of which not every device can pick rows.
        room, rows = room.view(torch.uint8), rows.view(torch.uint8)
    room = room[:, : rows.shape[1]] if rows.ndim == 2 else room
    room[at] = rows.to(room.dtype)


def _across(factors_OG: Tensor | None) -> Tensor | None:
    """So that those of neighbouring outputs lie side by side."""
    return None if factors_OG is None else factors_OG.t().contiguous()
