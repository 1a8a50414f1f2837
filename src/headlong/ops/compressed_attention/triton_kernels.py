# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false, reportOperatorIssue=false
"""The kernels of an attention over a window, compressed entries and a sink: prepare heads and the key, attend by splits
of a token's own keys, combine the splits.

A token's keys are its window, itself last, and then its entries in ascending order. They are cut into splits of SPLIT,
the window apart from the entries, and splits into tiles of BLOCK_P; which key lies in which tile its place among the
token's own keys says alone. What a token has not got adds exact zeros, and splits are added in their order, so that a
token's bits are its own.

Legend. N tokens, H heads of a tile (BLOCK_H), P keys, D columns of a head (BLOCK_D), I pairs (BLOCK_I), S splits.
  queries_ptr [N, HEADS, DIM]; keys_ptr [N, DIM]: those of this step. window_ptr: rings [slots, LENGTH, WIDTH], or,
  ON_PAGES, [pages, PAGE_SIZE, WIDTH]. entries_ptr [pages, PER_PAGE, DIM]; chosen_ptr [N, K], −1 after the last, or
  None for all.
  maxima_ptr, totals_ptr [tokens, HEADS, S], sums_ptr [tokens, HEADS, S, DIM]: what splits leave to be combined.
  sinks_ptr [HEADS]. rows_ptr, token_rows_ptr, positions_ptr, pages_ptr: as for the attention core.
"""

import triton
import triton.language as tl

from headlong.ops.gated_attention.triton_kernels import FIELDS, LOG2_E, START
from headlong.ops.rope.triton_pairs import load_turn
from headlong.ops.triton_launch import launch_dependents_and_wait


@triton.jit(do_not_specialize=["scale", "stride_turns", "first_cos", "first_sin", "first_head"])
def prepare_kernel(
    x_ptr, given_ptr, queries_ptr, keys_ptr, norm_ptr, key_eps_ptr, query_eps, scale, first_head,
    cos_ptr, sin_ptr, stride_turns, first_cos, first_sin,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr, NORMED: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Norms and turns one head's query of a token, or, after the heads, its key."""
    launch_dependents_and_wait()
    token, head = tl.program_id(0).to(tl.int64), first_head + tl.program_id(1)
    i = tl.arange(0, BLOCK_I)
    mask = 2 * i < DIM
    if head < HEADS:
        from_ptr, to_ptr = x_ptr + (token * HEADS + head) * DIM, queries_ptr + (token * HEADS + head) * DIM
    else:
        from_ptr, to_ptr = given_ptr + token * DIM, keys_ptr + token * DIM
    even = tl.load(from_ptr + 2 * i, mask=mask, other=0.0).to(tl.float32)
    odd = tl.load(from_ptr + 2 * i + 1, mask=mask, other=0.0).to(tl.float32)
    if NORMED:
        square = tl.sum(even * even + odd * odd, 0)
        if head < HEADS:
            inverse = tl.rsqrt(square / DIM + query_eps)
            even, odd = even * inverse, odd * inverse
        else:
            inverse = tl.rsqrt(square + tl.load(key_eps_ptr).to(tl.float32))
            even *= inverse * tl.load(norm_ptr + 2 * i, mask=mask, other=0.0).to(tl.float32)
            odd *= inverse * tl.load(norm_ptr + 2 * i + 1, mask=mask, other=0.0).to(tl.float32)
    cos, sin = load_turn(
        cos_ptr, sin_ptr, stride_turns, first_cos, first_sin, token, i, DIM // 2 - PAIRS, PAIRS
    )
    factor = tl.where(head < HEADS, scale, 1.0)
    one, other = (even * cos - odd * sin) * factor, (odd * cos + even * sin) * factor
    tl.store(to_ptr + 2 * i, one.to(keys_ptr.dtype.element_ty), mask=mask)
    tl.store(to_ptr + 2 * i + 1, other.to(keys_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["stride_pages"])
def page_kernel(
    keys_ptr, window_ptr, token_rows_ptr, positions_ptr, pages_ptr, stride_pages,
    DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes a token's key into its page."""
    launch_dependents_and_wait()
    token, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_D)
    position, row = tl.load(positions_ptr + token), tl.load(token_rows_ptr + token).to(tl.int64)
    page = tl.load(pages_ptr + row * stride_pages + position // PAGE_SIZE).to(tl.int64)
    key = tl.load(keys_ptr + token * DIM + d, mask=d < DIM, other=0.0)
    tl.store(window_ptr + (page * PAGE_SIZE + position % PAGE_SIZE) * WIDTH + d, key, mask=d < WIDTH)


@triton.jit
def _joined(q_HD, keys_PD, exists_P, max_H, total_H, sum_HD):
    """Attends to one tile of keys after others."""
    score_HP = tl.dot(q_HD, tl.trans(keys_PD), input_precision="ieee") * LOG2_E
    score_HP = tl.where(exists_P[None, :], score_HP, float("-inf"))
    new_max_H = tl.maximum(max_H, tl.max(score_HP, 1))
    base_H = tl.where(new_max_H == float("-inf"), 0.0, new_max_H)
    weight_HP = tl.exp2(score_HP - base_H[:, None])
    fade_H = tl.exp2(max_H - base_H)
    total_H = total_H * fade_H + tl.sum(weight_HP, 1)
    sum_HD = tl.dot(weight_HP.to(keys_PD.dtype), keys_PD, sum_HD * fade_H[:, None], input_precision="ieee")
    return new_max_H, total_H, sum_HD


@triton.jit(do_not_specialize=["stride_pages", "first_token", "num_chosen", "num_splits"])
def attend_kernel(
    queries_ptr, keys_ptr, window_ptr, entries_ptr, chosen_ptr, maxima_ptr, totals_ptr, sums_ptr, rows_ptr,
    token_rows_ptr, positions_ptr, pages_ptr, stride_pages, first_token, num_chosen, num_splits,
    HEADS: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr,
    ON_PAGES: tl.constexpr, RATIO: tl.constexpr, PAGE_SIZE: tl.constexpr, PER_PAGE: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Attends to one split of a token's keys with BLOCK_H of its heads. It stores for each head the largest score
    (times log2 e), the sum of the weights relative to it, and the weighted keys."""
    launch_dependents_and_wait()
    WINDOW_SPLITS: tl.constexpr = (WINDOW + SPLIT - 1) // SPLIT
    token, split = (first_token + tl.program_id(0)).to(tl.int64), tl.program_id(2)
    position, row = tl.load(positions_ptr + token), tl.load(token_rows_ptr + token).to(tl.int64)
    slot, start = tl.load(rows_ptr + row * FIELDS).to(tl.int64), tl.load(rows_ptr + row * FIELDS + START)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d, p = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_P)
    mask_H, mask_D = h < HEADS, d < DIM
    q_ptrs = queries_ptr + (token * HEADS + h)[:, None] * DIM + d[None, :]
    q_HD = tl.load(q_ptrs, mask=mask_H[:, None] & mask_D[None, :], other=0.0)
    max_H = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total_H = tl.zeros([BLOCK_H], tl.float32)
    sum_HD = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    if split < WINDOW_SPLITS:
        for first in range(split * SPLIT, split * SPLIT + SPLIT, BLOCK_P):
            place_P = position - WINDOW + 1 + first + p
            exists_P = (place_P >= 0) & (first + p < WINDOW)
            is_new_P = exists_P & (place_P >= start)
            at_P = tl.where(exists_P, place_P, 0)
            if ON_PAGES:
                page_P = tl.load(pages_ptr + row * stride_pages + at_P // PAGE_SIZE).to(tl.int64)
                old_P = (page_P * PAGE_SIZE + at_P % PAGE_SIZE) * WIDTH
            else:
                old_P = (slot * LENGTH + at_P % LENGTH) * WIDTH
            new_ptrs = keys_ptr + (token + place_P - position)[:, None] * DIM + d[None, :]
            keys_PD = tl.load(new_ptrs, mask=is_new_P[:, None] & mask_D[None, :], other=0.0)
            is_old_PD = (exists_P & (place_P < start))[:, None] & mask_D[None, :]
            old_PD = tl.load(window_ptr + old_P[:, None] + d[None, :], mask=is_old_PD, other=0.0)
            keys_PD += old_PD.to(q_HD.dtype)
            max_H, total_H, sum_HD = _joined(q_HD, keys_PD, exists_P, max_H, total_H, sum_HD)
    elif RATIO > 0:
        ended = (position + 1) // RATIO
        base = (split - WINDOW_SPLITS) * SPLIT
        for first in range(base, tl.minimum(base + SPLIT, ended), BLOCK_P):
            number_P = first + p
            if chosen_ptr is not None:
                is_listed_P = number_P < num_chosen
                chosen_ptrs = chosen_ptr + token * num_chosen + number_P
                number_P = tl.load(chosen_ptrs, mask=is_listed_P, other=-1).to(tl.int32)
            exists_P = (number_P >= 0) & (number_P < ended)
            at_P = tl.where(exists_P, (number_P + 1) * RATIO - 1, 0)
            page_P = tl.load(pages_ptr + row * stride_pages + at_P // PAGE_SIZE).to(tl.int64)
            entry_P = (page_P * PER_PAGE + at_P % PAGE_SIZE // RATIO) * DIM
            keys_PD = tl.load(
                entries_ptr + entry_P[:, None] + d[None, :],
                mask=exists_P[:, None] & mask_D[None, :],
                other=0.0,
            ).to(q_HD.dtype)
            max_H, total_H, sum_HD = _joined(q_HD, keys_PD, exists_P, max_H, total_H, sum_HD)
    split_H = ((token - first_token) * HEADS + h) * num_splits + split
    tl.store(maxima_ptr + split_H, max_H, mask=mask_H)
    tl.store(totals_ptr + split_H, total_H, mask=mask_H)
    tl.store(sums_ptr + split_H[:, None] * DIM + d[None, :], sum_HD, mask=mask_H[:, None] & mask_D[None, :])


@triton.jit(
    do_not_specialize=["first_token", "num_chosen", "num_splits", "stride_turns", "first_cos", "first_sin"]
)
def combine_kernel(
    maxima_ptr, totals_ptr, sums_ptr, sinks_ptr, out_ptr, positions_ptr, first_token, num_chosen, num_splits,
    cos_ptr, sin_ptr, stride_turns, first_cos, first_sin,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr, WINDOW: tl.constexpr, RATIO: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Adds the splits of one head of a token, as many as the token has, beside its sink, and turns the sum back."""
    launch_dependents_and_wait()
    own, head, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK_I)
    token = first_token + own
    mask, num_own = 2 * i < DIM, (WINDOW + SPLIT - 1) // SPLIT
    if RATIO > 0:
        seen = tl.minimum((tl.load(positions_ptr + token) + 1) // RATIO, num_chosen)
        num_own += (seen + SPLIT - 1) // SPLIT
    base = (own * HEADS + head) * num_splits
    sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
    top = sink
    for split in range(num_own):
        top = tl.maximum(top, tl.load(maxima_ptr + base + split))
    total = tl.exp2(sink - top)
    even = tl.zeros([BLOCK_I], tl.float32)
    odd = even
    for split in range(num_own):
        factor = tl.exp2(tl.load(maxima_ptr + base + split) - top)
        total += tl.load(totals_ptr + base + split) * factor
        sum_ptr = sums_ptr + (base + split) * DIM + 2 * i
        even += tl.load(sum_ptr, mask=mask, other=0.0) * factor
        odd += tl.load(sum_ptr + 1, mask=mask, other=0.0) * factor
    even, odd = even / total, odd / total
    cos, sin = load_turn(
        cos_ptr, sin_ptr, stride_turns, first_cos, first_sin, token, i, DIM // 2 - PAIRS, PAIRS
    )
    to_ptr = out_ptr + (token * HEADS + head) * DIM + 2 * i
    tl.store(to_ptr, (even * cos + odd * sin).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(to_ptr + 1, (odd * cos - even * sin).to(out_ptr.dtype.element_ty), mask=mask)
