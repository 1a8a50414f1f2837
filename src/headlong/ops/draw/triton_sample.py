# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
"""A token for each row of logits on a GPU: temperature, top-k, top-p and min-p, as sampling/processors.py has them,
and a draw.

Parts of a row put its tokens into bins, and list those of the bins that its filters may end in. Of a top-k that is
not more than there are parts, bins know nothing that the parts' best tokens do not tell. One program finds in the
list the last token that stays, and parts draw among all down to that. Of more tokens than a list has room for it is
searched in the whole row, which takes long and is hardly ever needed: thousands of equal ones, or a top-k of
thousands with a top-p.

Legend. M rows of V logits, P parts of BLOCK tokens. logits_ptr [rows, size], stride_logits from row to row;
filters_ptr [rows, 4]: temperature, top-k, top-p and min-p; keys_ptr [rows, 4]: see draw/triton.py.
  maxima_ptr [rows, parts]: the largest logit of each part, or later its largest noisy score; leasts_ptr [rows]: a
  logit that no token of the top-k is below. counts_ptr, weights_ptr [rows, BINS]: the bins; numbers_ptr [rows]: how
  many tokens are listed in orders_ptr [rows, MOST]; cuts_ptr, floors_ptr [rows]: the last order, and the least score,
  that stay.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.ops.argmax.triton import block_argmax
from headlong.ops.draw.triton import BLOCK as DRAWN
from headlong.ops.draw.triton import argmax_of_drawn, empty_parts, noise
from headlong.ops.draw.triton_top_k_top_p import (
    ALL,
    BINS,
    FINENESS,
    below_top,
    bin_of,
    bins_to_compare,
    cut_by_ranks,
    cut_by_search,
    order_of,
    weight_of,
)
from headlong.ops.triton_launch import LAUNCH_OPTIONS, launch_dependents_and_wait

BLOCK, NUM_WARPS = 2048, 8
"""The number of tokens of a part that is counted, and of the warps that count them."""
NO_BOUND = tl.constexpr(float("inf"))
"""The lower bound of a top-k where nothing is known about it."""
LINE = tl.constexpr(32)
"""The number of tokens that lie side by side in a part."""
USUAL_BITS = 18
"""Bits of a token's index: smaller vocabularies are taken for as large, so that all have the same kernels."""
MOST, FEW, FEWER = tl.constexpr(4096), tl.constexpr(128), tl.constexpr(32)
"""The most tokens that are listed; up to FEW of them are compared each with each, and up to FEWER by a smaller
kernel."""
_LEAST = tl.constexpr(math.exp(-BINS.value / FINENESS.value))
"""The share of the best token's probability that bins reach down to."""


@triton.jit
def _load_maximum(maxima_ptr, row, num_parts, PARTS: tl.constexpr):
    """The largest logit of a row, or NaN if it has one."""
    part = tl.arange(0, PARTS)
    mask = part < num_parts
    top, _ = block_argmax(tl.load(maxima_ptr + row * num_parts + part, mask=mask, other=0.0), part, mask)
    return top


@triton.jit
def _load_filters(filters_ptr, row, top, size):
    """Loads temperature, top-k, top-p, and which of the last two there are: neither over logits that are not finite."""
    top_k, top_p = tl.load(filters_ptr + row * 4 + 1), tl.load(filters_ptr + row * 4 + 2)
    sound = tl.abs(top) < float("inf")
    return (
        tl.load(filters_ptr + row * 4),
        top_k,
        top_p,
        sound & (top_k > 0) & (top_k < size),
        sound & (top_p < 1),
    )


@triton.jit
def _tokens_of_part(part, num_parts, BLOCK: tl.constexpr):
    """The tokens that are a part's. Parts take lines in turn: in most vocabularies the likely tokens are close
    together."""
    place = tl.arange(0, BLOCK)
    index = (place // LINE * num_parts + part) * LINE + place % LINE
    return tl.max_contiguous(tl.multiple_of(index, LINE), LINE)


@triton.jit
def _least_of_top_k(maxima_ptr, row, num_parts, top, temperature, top_k, PARTS: tl.constexpr):
    """A logit that no token of a row's top-k is below, since as many parts have one that is not. NO_BOUND where that
    says little: for a top-k of more than there are parts, or where most tokens are banned."""
    least = NO_BOUND
    if top_k <= num_parts:
        part = tl.arange(0, PARTS)
        mask = part < num_parts
        top_P = tl.load(maxima_ptr + row * num_parts + part, mask=mask, other=float("-inf"))
        # The same maxima along the other dimension.
        other_P = tl.load(maxima_ptr + row * num_parts + part, mask=mask, other=float("-inf"))
        rank_P = tl.sum((other_P[None, :] > top_P[:, None]).to(tl.int32), 1)
        least = tl.min(tl.where(mask & (rank_P < top_k), top_P, NO_BOUND), 0)
        least = tl.where(bin_of(below_top(least, top, temperature)) < BINS - 1, least, NO_BOUND)
    return least


@triton.jit
def _maxima_kernel(
    logits_ptr, stride_logits, maxima_ptr, counts_ptr, weights_ptr, numbers_ptr, size,
    BLOCK: tl.constexpr, CLEARED: tl.constexpr,
):  # fmt: skip
    """Computes the largest logit of each part; and clears CLEARED numbers for each part where tokens are counted
    next."""
    launch_dependents_and_wait()
    part, row, num_parts = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    index = _tokens_of_part(part, num_parts, BLOCK)
    mask = index < size
    x = tl.load(logits_ptr + row * stride_logits + index, mask=mask, other=0.0)
    top, _ = block_argmax(x, index, mask)
    tl.store(maxima_ptr + row * num_parts + part, top)
    bin = part * CLEARED + tl.arange(0, CLEARED)
    tl.store(counts_ptr + row * BINS + bin, tl.zeros([CLEARED], tl.int32), mask=bin < BINS)
    tl.store(weights_ptr + row * BINS + bin, tl.zeros([CLEARED], tl.int64), mask=bin < BINS)
    tl.store(numbers_ptr + row, 0, mask=part == 0)


@triton.jit
def _count_kernel(
    logits_ptr, stride_logits, filters_ptr, maxima_ptr, leasts_ptr, counts_ptr, weights_ptr, size,
    SCALE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Counts and weighs tokens by bins, where the parts' maxima do not tell enough."""
    launch_dependents_and_wait()
    part, row, num_parts = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    top = _load_maximum(maxima_ptr, row, num_parts, PARTS)
    temperature, top_k, _, by_count, by_weight = _load_filters(filters_ptr, row, top, size)
    least = NO_BOUND
    if by_count:
        least = _least_of_top_k(maxima_ptr, row, num_parts, top, temperature, top_k, PARTS)
    tl.store(leasts_ptr + row, least, mask=part == 0)
    if (by_count | by_weight) & (least == NO_BOUND):
        index = _tokens_of_part(part, num_parts, BLOCK)
        x = tl.load(logits_ptr + row * stride_logits + index, mask=index < size, other=float("-inf"))
        below = below_top(x, top, temperature)
        bin = bin_of(below)
        near = bin < BINS - 1
        tl.atomic_add(counts_ptr + row * BINS + bin, 1, mask=near, sem="relaxed")
        if by_weight:
            tl.atomic_add(weights_ptr + row * BINS + bin, weight_of(below, SCALE), mask=near, sem="relaxed")


@triton.jit
def _list_kernel(
    logits_ptr, stride_logits, filters_ptr, maxima_ptr, leasts_ptr, counts_ptr, weights_ptr,
    numbers_ptr, orders_ptr, size,
    BITS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Lists the tokens that are to be compared, in any order."""
    launch_dependents_and_wait()
    part, row, num_parts = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    top = _load_maximum(maxima_ptr, row, num_parts, PARTS)
    temperature, top_k, top_p, by_count, by_weight = _load_filters(filters_ptr, row, top, size)
    best = tl.load(maxima_ptr + row * num_parts + part)
    nearest = bin_of(below_top(best, top, temperature))
    least = tl.load(leasts_ptr + row)
    first, last, listing = 0, BINS - 2, (least < NO_BOUND) & (best >= least)
    if (by_count | by_weight) & (least == NO_BOUND) & (nearest < BINS - 1):
        first, last, number, _, _, _, _ = bins_to_compare(
            counts_ptr, weights_ptr, row, top_k, top_p, by_count, by_weight
        )
        least, listing = float("-inf"), (number <= MOST) & (nearest <= last)
    if listing:
        index = _tokens_of_part(part, num_parts, BLOCK)
        x = tl.load(logits_ptr + row * stride_logits + index, mask=index < size, other=float("-inf"))
        bin = bin_of(below_top(x, top, temperature))
        listed = (x >= least) & (bin >= first) & (bin <= last)
        place = tl.atomic_add(numbers_ptr + row, tl.sum(listed.to(tl.int32), 0), sem="relaxed")
        place += tl.cumsum(listed.to(tl.int32), 0) - 1
        tl.store(orders_ptr + row * MOST + place, order_of(x, index, BITS), mask=listed & (place < MOST))


@triton.jit
def _cut_kernel(
    logits_ptr, stride_logits, filters_ptr, maxima_ptr, leasts_ptr, counts_ptr, weights_ptr,
    numbers_ptr, orders_ptr, cuts_ptr, floors_ptr, size, num_parts,
    SCALE: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Finds, for each row, the order of the last token that top-k and top-p leave, and the least score that may be
    drawn."""
    launch_dependents_and_wait()
    row = tl.program_id(0).to(tl.int64)
    top = _load_maximum(maxima_ptr, row, num_parts, PARTS)
    temperature, top_k, top_p, by_count, by_weight = _load_filters(filters_ptr, row, top, size)
    cut = tl.full([], ALL, tl.int64)
    if by_count | by_weight:
        number, num_before = tl.load(numbers_ptr + row), tl.full([], 0, tl.int32)
        weight_before, weight = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
        if tl.load(leasts_ptr + row) == NO_BOUND:
            _, _, number, num_before, weight_before, weight, by_count = bins_to_compare(
                counts_ptr, weights_ptr, row, top_k, top_p, by_count, by_weight
            )
        listed_ptr = orders_ptr + row * MOST
        if number > MOST:
            cut = cut_by_search(
                logits_ptr + row * stride_logits, size, 0, 0, weight, top, temperature,
                top_k, top_p, by_count, by_weight, SCALE, BITS, BLOCK, False,
            )  # fmt: skip
        elif number > FEW:
            cut = cut_by_search(
                listed_ptr, number, num_before, weight_before, weight, top, temperature,
                top_k, top_p, by_count, by_weight, SCALE, BITS, BLOCK, True,
            )  # fmt: skip
        elif number > FEWER:
            cut = cut_by_ranks(
                listed_ptr, number, num_before, weight_before, weight, top, temperature,
                top_k, top_p, by_count, by_weight, SCALE, BITS, FEW,
            )  # fmt: skip
        elif number > 0:
            cut = cut_by_ranks(
                listed_ptr, number, num_before, weight_before, weight, top, temperature,
                top_k, top_p, by_count, by_weight, SCALE, BITS, FEWER,
            )  # fmt: skip
    tl.store(cuts_ptr + row, cut)
    min_p = tl.maximum(tl.load(filters_ptr + row * 4 + 3), _LEAST)
    tl.store(floors_ptr + row, top.to(tl.float64) / temperature + tl.log(min_p))


@triton.jit
def _draw_of_part_kernel(
    logits_ptr, stride_logits, filters_ptr, keys_ptr, cuts_ptr, floors_ptr, maxima_ptr, indices_ptr, size,
    BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draws from a part: the largest noisy score of its tokens that the filters leave, and which token has it."""
    launch_dependents_and_wait()
    part, row, num_parts = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    index = part * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    x = tl.load(logits_ptr + row * stride_logits + index, mask=mask, other=float("-inf"))
    score = x.to(tl.float64) / tl.load(filters_ptr + row * 4)
    # What is no number is not cut: it is to be found.
    cut = (order_of(x, index, BITS) < tl.load(cuts_ptr + row)) | (score < tl.load(floors_ptr + row))
    score = tl.where(cut, float("-inf"), score)
    if tl.min(cut.to(tl.int32), 0) == 0:
        score += noise(keys_ptr + row * 4, part, BLOCK)
    top, first = block_argmax(score, index, mask)
    tl.store(maxima_ptr + row * num_parts + part, top)
    tl.store(indices_ptr + row * num_parts + part, first)


def sample(logits_MV: Tensor, filters_M4: Tensor, keys_M4: Tensor) -> Tensor:
    """Draws a token of each row. `filters_M4` are temperature, top-k, top-p and min-p of each row, float64; 0, 1 and 0
    filter nothing."""
    assert logits_MV.dtype == torch.float32 and logits_MV.stride(1) == 1
    assert filters_M4.dtype == torch.float64 and keys_M4.dtype == torch.long
    filters_M4, keys_M4 = filters_M4.contiguous(), keys_M4.contiguous()
    (rows, size), stride, empty = logits_MV.shape, logits_MV.stride(0), logits_MV.new_empty
    bits = max(USUAL_BITS, (size - 1).bit_length())
    num_parts = triton.cdiv(size, BLOCK)
    maxima_MP, leasts_M, floors_M = empty(rows, num_parts), empty(rows), empty(rows, dtype=torch.float64)
    counts_MB = empty(rows, BINS.value, dtype=torch.int32)
    weights_MB, cuts_M = empty(rows, BINS.value, dtype=torch.long), empty(rows, dtype=torch.long)
    numbers_M, orders_MC = empty(rows, dtype=torch.int32), empty(rows, MOST.value, dtype=torch.long)
    drawn_MP, indices_MP = empty_parts(rows, size, logits_MV.device)
    options = {"num_warps": NUM_WARPS, **LAUNCH_OPTIONS}
    # Sums of all a row's weights are numbers of 63 bits.
    scale, blocks = 2.0 ** (62 - bits), {"BLOCK": BLOCK, "PARTS": triton.cdiv(1 << bits, BLOCK)}
    cleared = triton.next_power_of_2(triton.cdiv(BINS.value, num_parts))
    given = (logits_MV, stride, filters_M4, maxima_MP, leasts_M, counts_MB, weights_MB)
    _maxima_kernel[(num_parts, rows)](
        logits_MV, stride, maxima_MP, counts_MB, weights_MB, numbers_M, size,
        BLOCK=BLOCK, CLEARED=cleared, **options,
    )  # fmt: skip
    _count_kernel[(num_parts, rows)](*given, size, SCALE=scale, **blocks, **options)
    _list_kernel[(num_parts, rows)](*given, numbers_M, orders_MC, size, BITS=bits, **blocks, **options)
    _cut_kernel[(rows,)](
        *given, numbers_M, orders_MC, cuts_M, floors_M, size, num_parts,
        SCALE=scale, BITS=bits, **blocks, **options,
    )  # fmt: skip
    _draw_of_part_kernel[(drawn_MP.shape[1], rows)](
        logits_MV, stride, filters_M4, keys_M4, cuts_M, floors_M, drawn_MP, indices_MP, size,
        BITS=bits, BLOCK=DRAWN, **LAUNCH_OPTIONS,
    )  # fmt: skip
    return argmax_of_drawn(drawn_MP, indices_MP)
