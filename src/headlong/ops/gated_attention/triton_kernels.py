# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
"""The attention core's Triton kernels: prepare heads and write pages, attend by splits of the context, combine splits.

A query's bits depend on its own past alone. Splits and the blocks inside them lie at fixed absolute positions, tiles of
queries have one size whatever they hold, and what lies past a query's own position adds exact zeros or is skipped by
position. Integers that vary between launches are not specialized on, so that one binary serves all of them.
"""

import triton
import triton.language as tl

from headlong.ops.linear.triton_split_k import CUT, sum_pieces
from headlong.ops.norm.triton import inverse_length, squares_of
from headlong.ops.triton_launch import launch_dependents, wait_for_previous_kernel

LOG2_E = tl.constexpr(1.4426950408889634)
FIELDS = tl.constexpr(6)
START, QUERY_LEN, FIRST_TOKEN = tl.constexpr(1), tl.constexpr(2), tl.constexpr(5)
"""Columns of a step's table of rows."""


@triton.jit(do_not_specialize=["first_head", "most_pages", "query_scale", "rotary_dim", *CUT])
def prepare_kernel(
    projected, queries, keys, values, cos_ND, sin_ND, norm_HD, norm_eps, row_N, position_N, pages_RP,
    first_head, most_pages, query_scale, rotary_dim,
    num_tokens, num_outs, num_steps, steps_each, squares, length_eps, length_parts,
    B: tl.constexpr, PIECES: tl.constexpr, EVENLY: tl.constexpr, LENGTH: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """One head of one token, `projected` in pieces: a query is left in `queries`, a key in its page, and with it the
    value."""
    launch_dependents()
    token, head = tl.program_id(0).to(tl.int64), first_head + tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    inside, half = d < HEAD_DIM, rotary_dim // 2
    partner = tl.where(d < half, d + half, tl.where(d < rotary_dim, d - half, d))
    cos = tl.load(cos_ND + token * HEAD_DIM + d, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ND + token * HEAD_DIM + d, mask=inside, other=0.0).to(tl.float32)
    position, row = tl.load(position_N + token), tl.load(row_N + token).to(tl.int64)
    page = tl.load(pages_RP + row * most_pages + position // PAGE_SIZE).to(tl.int64)
    if NORMED:
        weight_ptr = norm_HD + head * HEAD_DIM
        weight = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32)
        other_weight = tl.load(weight_ptr + partner, mask=inside, other=0.0).to(tl.float32)
        eps = tl.load(norm_eps).to(tl.float32)
    one, x_at = tl.program_id(0), head * HEAD_DIM + d
    cut = (num_tokens, num_outs, num_steps, steps_each)
    has_v = d < tl.where(head < HEADS, 0, HEAD_DIM)  # a query has none
    wait_for_previous_kernel()
    x = sum_pieces(projected, x_at, inside, one, cut, B, PIECES, EVENLY, BLOCK_D)
    other = sum_pieces(projected, head * HEAD_DIM + partner, inside, one, cut, B, PIECES, EVENLY, BLOCK_D)
    v = sum_pieces(projected, x_at + KV_HEADS * HEAD_DIM, has_v, one, cut, B, PIECES, EVENLY, BLOCK_D)
    squares_P = squares_of(squares, one, length_parts, LENGTH)
    inverse = inverse_length(squares, squares_P, length_eps, LENGTH)
    x, other = x * inverse, other * inverse
    if NORMED:
        scale = tl.rsqrt(tl.sum(x * x, 0) + eps)
        x = x * scale * weight
        other = other * scale * other_weight
    x = x * cos + other * sin
    if head < HEADS:
        place = (token * HEADS + head) * HEAD_DIM
        tl.store(queries + place + d, (x * query_scale).to(queries.dtype.element_ty), mask=inside)
    else:
        kv = head - HEADS
        place = ((page * KV_HEADS + kv) * PAGE_SIZE + position % PAGE_SIZE) * WIDTH
        tl.store(keys + place + d, x.to(keys.dtype.element_ty), mask=d < WIDTH)
        tl.store(values + place + d, (v * inverse).to(values.dtype.element_ty), mask=d < WIDTH)


@triton.jit
def split_start(split, FIRST_SPLIT: tl.constexpr, SPLITS_PER_SIZE: tl.constexpr):
    """The first position of a split."""
    doublings, index = split // SPLITS_PER_SIZE, split % SPLITS_PER_SIZE
    return (((SPLITS_PER_SIZE + index) << doublings) - SPLITS_PER_SIZE) * FIRST_SPLIT


@triton.jit
def place_of_tile(
    tile, table_R6, first_token, num_tokens, num_rows, ROWS: tl.constexpr, TOKENS: tl.constexpr
):
    """Which row a tile belongs to, and which of the row's tiles it is, in a launch that takes only some tokens.

    A row of n tokens has ⌈n / TOKENS⌉ tiles, or one more that stays empty: a row begins at a tile that is known from
    the tokens and rows before it alone.
    """
    found, begin = 0, 0
    for base in range(0, num_rows, ROWS):
        row = base + tl.arange(0, ROWS)
        first = tl.load(table_R6 + row * FIELDS + FIRST_TOKEN, mask=row < num_rows, other=0)
        before = tl.minimum(tl.maximum(first - first_token, 0), num_tokens)
        begins = (before + row * (TOKENS - 1)) // TOKENS
        reached = (row < num_rows) & (begins <= tile)
        found += tl.sum(reached.to(tl.int32), 0)
        begin = tl.maximum(begin, tl.max(tl.where(reached, begins, 0), 0))
    return found - 1, tile - begin


@triton.jit
def page_of(pages, at, end, PAGE_SIZE: tl.constexpr, BLOCK_P: tl.constexpr):
    """The page of a block of positions, or one for each of them where a block may lie in several."""
    if PAGE_SIZE % BLOCK_P == 0:
        return tl.load(pages + at // PAGE_SIZE, mask=at < end, other=0)
    else:
        position = at + tl.arange(0, BLOCK_P)
        return tl.load(pages + position // PAGE_SIZE, mask=position < end, other=0)


@triton.jit(do_not_specialize=["most_pages", "first_token", "num_tokens", "num_rows", "num_splits"])
def attend_kernel(
    queries, keys, values, tops, totals, sums, table_R6, pages_RP,
    most_pages, first_token, num_tokens, num_rows, num_splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, FIRST_SPLIT: tl.constexpr, SPLITS_PER_SIZE: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """One split of the context for the queries of up to TOKENS tokens of a row that share a key head.

    Of each query: the largest score (times log2 e), the sum of the weights relative to it, and the weighted values.
    """
    tile, kv = tl.program_id(0), tl.program_id(1)
    split = num_splits - 1 - tl.program_id(2)  # the longest are started first
    row, index = place_of_tile(tile, table_R6, first_token, num_tokens, num_rows, ROWS, TOKENS)
    entry = table_R6 + row * FIELDS
    first = tl.load(entry + FIRST_TOKEN)
    low = tl.maximum(first, first_token) + index * TOKENS
    high = tl.minimum(first + tl.load(entry + QUERY_LEN), first_token + num_tokens)
    high = tl.minimum(high, low + TOKENS)
    offset = tl.load(entry + START) - first
    begin = split_start(split, FIRST_SPLIT, SPLITS_PER_SIZE)
    end = tl.minimum(split_start(split + 1, FIRST_SPLIT, SPLITS_PER_SIZE), high + offset)
    pages = pages_RP + row.to(tl.int64) * most_pages
    page = page_of(pages, begin, end, PAGE_SIZE, BLOCK_P)
    wait_for_previous_kernel()
    launch_dependents()
    if (low >= high) | (begin >= end):
        return

    GROUP: tl.constexpr = HEADS // KV_HEADS
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    token_M = low + m // GROUP
    asks_M, inside = token_M < high, d < HEAD_DIM
    query_M = token_M.to(tl.int64) * HEADS + kv * GROUP + m % GROUP
    q_MD = tl.load(
        queries + query_M[:, None] * HEAD_DIM + d[None, :], mask=asks_M[:, None] & inside[None, :], other=0.0
    )
    top_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    sum_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for at in range(begin, end, BLOCK_P):
        p = at + tl.arange(0, BLOCK_P)
        written = p < end
        place = ((page.to(tl.int64) * KV_HEADS + kv) * PAGE_SIZE + p % PAGE_SIZE) * WIDTH
        # Pages are known a block ahead, so that keys and values can be fetched ahead.
        page = page_of(pages, at + BLOCK_P, end, PAGE_SIZE, BLOCK_P)
        k_DP = tl.load(keys + place[None, :] + d[:, None], mask=written[None, :] & inside[:, None], other=0.0)
        score_MP = tl.dot(q_MD, k_DP, input_precision="ieee") * LOG2_E
        score_MP = tl.where(p[None, :] <= token_M[:, None] + offset, score_MP, float("-inf"))
        new_top_M = tl.maximum(top_M, tl.max(score_MP, 1))
        base_M = tl.where(new_top_M == float("-inf"), 0.0, new_top_M)
        weight_MP = tl.exp2(score_MP - base_M[:, None])
        fade_M = tl.exp2(top_M - base_M)
        total_M = total_M * fade_M + tl.sum(weight_MP, 1)
        v_PD = tl.load(
            values + place[:, None] + d[None, :], mask=written[:, None] & inside[None, :], other=0.0
        )
        sum_MD = tl.dot(weight_MP.to(v_PD.dtype), v_PD, sum_MD * fade_M[:, None], input_precision="ieee")
        top_M = new_top_M

    part_M = (query_M - first_token.to(tl.int64) * HEADS) * num_splits + split
    tl.store(tops + part_M, top_M, mask=asks_M)
    tl.store(totals + part_M, total_M, mask=asks_M)
    tl.store(sums + part_M[:, None] * HEAD_DIM + d[None, :], sum_MD, mask=asks_M[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["first_token", "num_splits", *CUT])
def combine_kernel(
    tops, totals, sums, gates, out, position_N, first_token, num_splits,
    num_tokens, num_outs, num_steps, steps_each, squares, length_eps, length_parts,
    B: tl.constexpr, PIECES: tl.constexpr, EVENLY: tl.constexpr, LENGTH: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    FIRST_SPLIT: tl.constexpr, SPLITS_PER_SIZE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Part of one head of one token: its splits in blocks of BLOCK_S, added in order, and its gates, if any."""
    launch_dependents()
    index, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = first_token + index
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside, position = d < HEAD_DIM, tl.load(position_N + token)
    wait_for_previous_kernel()
    if gates is not None:
        cut = (num_tokens, num_outs, num_steps, steps_each)
        gate = sum_pieces(gates, head * HEAD_DIM + d, inside, token, cut, B, PIECES, EVENLY, BLOCK_D)
        squares_P = squares_of(squares, token, length_parts, LENGTH)
    parts = (index * HEADS + head) * num_splits
    top, total = float("-inf"), 0.0
    sum_D = tl.zeros([BLOCK_D], tl.float32)
    for base in range(0, num_splits, BLOCK_S):
        s = base + tl.arange(0, BLOCK_S)
        seen = split_start(s, FIRST_SPLIT, SPLITS_PER_SIZE) <= position
        top_S = tl.load(tops + parts + s, mask=seen, other=float("-inf"))
        total_S = tl.load(totals + parts + s, mask=seen, other=0.0)
        sum_ptr = sums + (parts + s)[:, None] * HEAD_DIM + d[None, :]
        sum_SD = tl.load(sum_ptr, mask=seen[:, None] & inside[None, :], other=0.0)
        new_top = tl.maximum(top, tl.max(top_S, 0))
        fade, fade_S = tl.exp2(top - new_top), tl.exp2(top_S - new_top)
        total = total * fade + tl.sum(fade_S * total_S, 0)
        sum_D = sum_D * fade + tl.sum(fade_S[:, None] * sum_SD, 0)
        top = new_top
    result = sum_D / total
    if gates is not None:
        gate *= inverse_length(squares, squares_P, length_eps, LENGTH)
        result = result / (1.0 + tl.exp(-gate))
    tl.store(out + (token * HEADS + head) * HEAD_DIM + d, result, mask=inside)
