# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
"""A token for each row of logits on a GPU: temperature, top-k, top-p and min-p, as sampling/processors.py has them, and
a draw.

Parts of a row put its tokens into bins, and list those of the bins that its filters may end in. Of a top-k that is not
more than there are parts, bins know nothing that the parts' best tokens do not tell. One program finds in the list
the last token that stays, and parts draw among all down to that. Of more tokens than a list has room for it is searched
in the whole row, which takes long and is hardly ever needed: thousands of equal ones, or a top-k of thousands with
a top-p.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.ops.argmax.triton import first_best
from headlong.ops.draw.triton import BLOCK as DRAWN
from headlong.ops.draw.triton import best_of_drawn, noise, room_for_parts
from headlong.ops.draw.triton_top_k_top_p import (
    ALL,
    BINS,
    FINENESS,
    below_top,
    bin_of,
    cut_ranked,
    cut_searched,
    order_of,
    reach,
    weight_of,
)
from headlong.ops.triton_launch import LAUNCH_OPTIONS, launch_dependents_and_wait

BLOCK, NUM_WARPS = 2048, 8
"""Tokens of a part that is counted, and who counts them."""
UNTOLD = tl.constexpr(float("inf"))
"""Instead of the least logit that a top-k may end with."""
LINE = tl.constexpr(32)
"""Tokens that lie side by side in a part."""
USUAL_BITS = 18
"""Of a token's index: smaller vocabularies are taken for as large, so that all have the same kernels."""
MOST, FEW, FEWER = tl.constexpr(4096), tl.constexpr(128), tl.constexpr(32)
"""Tokens that are listed; of up to FEW each is compared with each, of up to FEWER with less to do."""
_LEAST = tl.constexpr(math.exp(-BINS.value / FINENESS.value))
"""Of the best token's probability, what bins reach to."""


@triton.jit
def _top(tops, row, parts, PARTS: tl.constexpr):
    """The best logit of a row, NaN if it has one."""
    part = tl.arange(0, PARTS)
    inside = part < parts
    top, _ = first_best(tl.load(tops + row * parts + part, mask=inside, other=0.0), part, inside)
    return top


@triton.jit
def _filters(filters, row, top, size):
    """Temperature, top-k, top-p, and which of the two there are: none over logits that are no numbers."""
    top_k, top_p = tl.load(filters + row * 4 + 1), tl.load(filters + row * 4 + 2)
    sound = tl.abs(top) < float("inf")
    return tl.load(filters + row * 4), top_k, top_p, sound & (top_k > 0) & (top_k < size), sound & (top_p < 1)


@triton.jit
def _tokens(part, parts, BLOCK: tl.constexpr):
    """Which ones are a part's. Parts take lines in turn: in most vocabularies the likely tokens are close together."""
    place = tl.arange(0, BLOCK)
    index = (place // LINE * parts + part) * LINE + place % LINE
    return tl.max_contiguous(tl.multiple_of(index, LINE), LINE)


@triton.jit
def _shortcut(tops, row, parts, top, temperature, top_k, PARTS: tl.constexpr):
    """A logit that no token of a row's top-k is below, since as many parts have one that is not. UNTOLD where that says
    little: of a top-k of more than there are parts, or where most tokens are banned."""
    least = UNTOLD
    if top_k <= parts:
        part = tl.arange(0, PARTS)
        inside = part < parts
        top_P = tl.load(tops + row * parts + part, mask=inside, other=float("-inf"))
        # The same, along the other dimension.
        other_P = tl.load(tops + row * parts + part, mask=inside, other=float("-inf"))
        rank_P = tl.sum((other_P[None, :] > top_P[:, None]).to(tl.int32), 1)
        least = tl.min(tl.where(inside & (rank_P < top_k), top_P, UNTOLD), 0)
        least = tl.where(bin_of(below_top(least, top, temperature)) < BINS - 1, least, UNTOLD)
    return least


@triton.jit
def _begin(
    logits, stride, tops, counts, weights, numbers, size, BLOCK: tl.constexpr, CLEARED: tl.constexpr
):  # fmt: skip
    """The best of each part; and nothing is counted yet."""
    launch_dependents_and_wait()
    part, row, parts = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    index = _tokens(part, parts, BLOCK)
    inside = index < size
    x = tl.load(logits + row * stride + index, mask=inside, other=0.0)
    top, _ = first_best(x, index, inside)
    tl.store(tops + row * parts + part, top)
    bin = part * CLEARED + tl.arange(0, CLEARED)
    tl.store(counts + row * BINS + bin, tl.zeros([CLEARED], tl.int32), mask=bin < BINS)
    tl.store(weights + row * BINS + bin, tl.zeros([CLEARED], tl.int64), mask=bin < BINS)
    tl.store(numbers + row, 0, mask=part == 0)


@triton.jit
def _count(
    logits, stride, filters, tops, leasts, counts, weights, size,
    SCALE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Tokens into bins, where the best of parts do not tell enough."""
    launch_dependents_and_wait()
    part, row, parts = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    top = _top(tops, row, parts, PARTS)
    temperature, top_k, _, by_count, by_weight = _filters(filters, row, top, size)
    least = UNTOLD
    if by_count:
        least = _shortcut(tops, row, parts, top, temperature, top_k, PARTS)
    tl.store(leasts + row, least, mask=part == 0)
    if (by_count | by_weight) & (least == UNTOLD):
        index = _tokens(part, parts, BLOCK)
        x = tl.load(logits + row * stride + index, mask=index < size, other=float("-inf"))
        below = below_top(x, top, temperature)
        bin = bin_of(below)
        near = bin < BINS - 1
        tl.atomic_add(counts + row * BINS + bin, 1, mask=near, sem="relaxed")
        if by_weight:
            tl.atomic_add(weights + row * BINS + bin, weight_of(below, SCALE), mask=near, sem="relaxed")


@triton.jit
def _list(
    logits, stride, filters, tops, leasts, counts, weights, numbers, orders, size,
    BITS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The tokens that are to be compared, in any order."""
    launch_dependents_and_wait()
    part, row, parts = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    top = _top(tops, row, parts, PARTS)
    temperature, top_k, top_p, by_count, by_weight = _filters(filters, row, top, size)
    best = tl.load(tops + row * parts + part)
    nearest = bin_of(below_top(best, top, temperature))
    least = tl.load(leasts + row)
    first, last, listing = 0, BINS - 2, (least < UNTOLD) & (best >= least)
    if (by_count | by_weight) & (least == UNTOLD) & (nearest < BINS - 1):
        first, last, number, _, _, _, _ = reach(counts, weights, row, top_k, top_p, by_count, by_weight)
        least, listing = float("-inf"), (number <= MOST) & (nearest <= last)
    if listing:
        index = _tokens(part, parts, BLOCK)
        x = tl.load(logits + row * stride + index, mask=index < size, other=float("-inf"))
        bin = bin_of(below_top(x, top, temperature))
        listed = (x >= least) & (bin >= first) & (bin <= last)
        place = tl.atomic_add(numbers + row, tl.sum(listed.to(tl.int32), 0), sem="relaxed")
        place += tl.cumsum(listed.to(tl.int32), 0) - 1
        tl.store(orders + row * MOST + place, order_of(x, index, BITS), mask=listed & (place < MOST))


@triton.jit
def _cut(
    logits, stride, filters, tops, leasts, counts, weights, numbers, orders, cuts, floors, size, parts,
    SCALE: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Of each row the order of the last token that top-k and top-p leave, and the least score that may be drawn."""
    launch_dependents_and_wait()
    row = tl.program_id(0).to(tl.int64)
    top = _top(tops, row, parts, PARTS)
    temperature, top_k, top_p, by_count, by_weight = _filters(filters, row, top, size)
    cut = tl.full([], ALL, tl.int64)
    if by_count | by_weight:
        number, num_before = tl.load(numbers + row), tl.full([], 0, tl.int32)
        weight_before, weight = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
        if tl.load(leasts + row) == UNTOLD:
            _, _, number, num_before, weight_before, weight, by_count = reach(
                counts, weights, row, top_k, top_p, by_count, by_weight
            )
        listed = orders + row * MOST
        if number > MOST:
            cut = cut_searched(
                logits + row * stride, size, 0, 0, weight, top, temperature,
                top_k, top_p, by_count, by_weight, SCALE, BITS, BLOCK, False,
            )  # fmt: skip
        elif number > FEW:
            cut = cut_searched(
                listed, number, num_before, weight_before, weight, top, temperature,
                top_k, top_p, by_count, by_weight, SCALE, BITS, BLOCK, True,
            )  # fmt: skip
        elif number > FEWER:
            cut = cut_ranked(
                listed, number, num_before, weight_before, weight, top, temperature,
                top_k, top_p, by_count, by_weight, SCALE, BITS, FEW,
            )  # fmt: skip
        elif number > 0:
            cut = cut_ranked(
                listed, number, num_before, weight_before, weight, top, temperature,
                top_k, top_p, by_count, by_weight, SCALE, BITS, FEWER,
            )  # fmt: skip
    tl.store(cuts + row, cut)
    min_p = tl.maximum(tl.load(filters + row * 4 + 3), _LEAST)
    tl.store(floors + row, top.to(tl.float64) / temperature + tl.log(min_p))


@triton.jit
def _draw_of_part(
    logits, stride, filters, keys, cuts, floors, tops, indices, size, BITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    launch_dependents_and_wait()
    part, row, parts = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    index = part * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    x = tl.load(logits + row * stride + index, mask=inside, other=float("-inf"))
    score = x.to(tl.float64) / tl.load(filters + row * 4)
    # What is no number is not cut: it is to be found.
    cut = (order_of(x, index, BITS) < tl.load(cuts + row)) | (score < tl.load(floors + row))
    score = tl.where(cut, float("-inf"), score)
    if tl.min(cut.to(tl.int32), 0) == 0:
        score += noise(keys + row * 4, part, BLOCK)
    top, first = first_best(score, index, inside)
    tl.store(tops + row * parts + part, top)
    tl.store(indices + row * parts + part, first)


def sample(logits_MV: Tensor, filters_M4: Tensor, keys_M4: Tensor) -> Tensor:
    """`filters_M4` are temperature, top-k, top-p and min-p of each row, float64; 0, 1 and 0 are no filters."""
    assert logits_MV.dtype == torch.float32 and logits_MV.stride(1) == 1
    assert filters_M4.dtype == torch.float64 and keys_M4.dtype == torch.long
    filters_M4, keys_M4 = filters_M4.contiguous(), keys_M4.contiguous()
    (rows, size), stride, empty = logits_MV.shape, logits_MV.stride(0), logits_MV.new_empty
    bits = max(USUAL_BITS, (size - 1).bit_length())
    parts = triton.cdiv(size, BLOCK)
    tops_MP, leasts_M, floors_M = empty(rows, parts), empty(rows), empty(rows, dtype=torch.float64)
    counts_MB = empty(rows, BINS.value, dtype=torch.int32)
    weights_MB, cuts_M = empty(rows, BINS.value, dtype=torch.long), empty(rows, dtype=torch.long)
    numbers_M, orders_MC = empty(rows, dtype=torch.int32), empty(rows, MOST.value, dtype=torch.long)
    drawn_MP, indices_MP = room_for_parts(rows, size, logits_MV.device)
    options = {"num_warps": NUM_WARPS, **LAUNCH_OPTIONS}
    # Sums of all a row's weights are numbers of 63 bits.
    scale, blocks = 2.0 ** (62 - bits), {"BLOCK": BLOCK, "PARTS": triton.cdiv(1 << bits, BLOCK)}
    cleared = triton.next_power_of_2(triton.cdiv(BINS.value, parts))
    given = (logits_MV, stride, filters_M4, tops_MP, leasts_M, counts_MB, weights_MB)
    _begin[(parts, rows)](
        logits_MV, stride, tops_MP, counts_MB, weights_MB, numbers_M, size,
        BLOCK=BLOCK, CLEARED=cleared, **options,
    )  # fmt: skip
    _count[(parts, rows)](*given, size, SCALE=scale, **blocks, **options)
    _list[(parts, rows)](*given, numbers_M, orders_MC, size, BITS=bits, **blocks, **options)
    _cut[(rows,)](
        *given, numbers_M, orders_MC, cuts_M, floors_M, size, parts,
        SCALE=scale, BITS=bits, **blocks, **options,
    )  # fmt: skip
    _draw_of_part[(drawn_MP.shape[1], rows)](
        logits_MV, stride, filters_M4, keys_M4, cuts_M, floors_M, drawn_MP, indices_MP, size,
        BITS=bits, BLOCK=DRAWN, **LAUNCH_OPTIONS,
    )  # fmt: skip
    return best_of_drawn(drawn_MP, indices_MP)
