# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
"""The attention core's Triton kernels: prepare heads and write pages, attend by splits of the context, combine
splits.

A query's bits depend on its own past alone. Splits and the blocks inside them lie at fixed absolute positions, tiles
of queries have one size whatever they hold, and what lies past a query's own position adds exact zeros or is skipped
by position. Integers that vary between launches are not specialized on, so that one binary serves all of them.

Legend. N tokens, R rows, S splits; M queries of a tile, P positions, D columns of a head: the dimensions in the names
of tiles, of which a program has BLOCK_… at a time.
  partials_ptr: the projection's partial sums, found by the arguments of triton_split_k.py; gates_ptr likewise.
  queries_ptr [N, HEADS, HEAD_DIM]; keys_ptr and values_ptr [pages, KV_HEADS, PAGE_SIZE, WIDTH], WIDTH ≥ HEAD_DIM.
  cos_ptr, sin_ptr [N, HEAD_DIM]; norm_weight_ptr [HEADS + KV_HEADS, HEAD_DIM], norm_weight_eps_ptr: of queries and
  keys.
  rows_ptr [R, 6]: a step's table of rows (triton_step.py); token_rows_ptr, positions_ptr [N]; pages_ptr [R,
  stride_pages].
  maxima_ptr, totals_ptr [N, HEADS, S], sums_ptr [N, HEADS, S, HEAD_DIM]: what splits leave to be combined. With a
  WINDOW, which a token's positions end where its own is, S counts from the first split that the token sees.
  sinks_ptr [HEADS]: scores that take part in the softmax and have no value.
"""

import triton
import triton.language as tl

from headlong.ops.linear.triton_split_k import UNSPECIALIZED, sum_partials
from headlong.ops.norm.triton import inverse_norm, load_squares
from headlong.ops.triton_launch import launch_dependents, wait_for_previous_kernel

LOG2_E = tl.constexpr(1.4426950408889634)
FIELDS = tl.constexpr(6)
START, QUERY_LEN, FIRST_TOKEN = tl.constexpr(1), tl.constexpr(2), tl.constexpr(5)
"""Columns of a step's table of rows, of which it has FIELDS."""
TOTALS = tl.constexpr(16)
"""The fewest columns of a product."""


@triton.jit(do_not_specialize=["first_head", "stride_pages", "query_scale", "rotary_dim", *UNSPECIALIZED])
def prepare_kernel(
    partials_ptr, queries_ptr, keys_ptr, values_ptr, cos_ptr, sin_ptr, norm_weight_ptr, norm_weight_eps_ptr,
    token_rows_ptr, positions_ptr, pages_ptr, first_head, stride_pages, query_scale, rotary_dim,
    num_tokens, num_outs, steps_per_tile, steps_per_split, squares_ptr, norm_eps, num_squares,
    BLOCK_N: tl.constexpr, NUM_PARTIALS: tl.constexpr, EVEN_SPLITS: tl.constexpr, BLOCK_SQUARES: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Prepares one head of one token, whose projection comes as partial sums: normed and rotated, a query is stored
    into `queries`, and a key into its page, together with the value."""
    launch_dependents()
    token, head = tl.program_id(0).to(tl.int64), first_head + tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    mask, half = d < HEAD_DIM, rotary_dim // 2
    partner = tl.where(d < half, d + half, tl.where(d < rotary_dim, d - half, d))
    cos = tl.load(cos_ptr + token * HEAD_DIM + d, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * HEAD_DIM + d, mask=mask, other=0.0).to(tl.float32)
    position, row = tl.load(positions_ptr + token), tl.load(token_rows_ptr + token).to(tl.int64)
    page = tl.load(pages_ptr + row * stride_pages + position // PAGE_SIZE).to(tl.int64)
    if NORMED:
        weight_ptr = norm_weight_ptr + head * HEAD_DIM
        weight = tl.load(weight_ptr + d, mask=mask, other=0.0).to(tl.float32)
        other_weight = tl.load(weight_ptr + partner, mask=mask, other=0.0).to(tl.float32)
        eps = tl.load(norm_weight_eps_ptr).to(tl.float32)
    token_32, x_outs = tl.program_id(0), head * HEAD_DIM + d
    cut = (num_tokens, num_outs, steps_per_tile, steps_per_split)
    value_mask = d < tl.where(head < HEADS, 0, HEAD_DIM)  # a query has none
    wait_for_previous_kernel()
    x = sum_partials(partials_ptr, x_outs, mask, token_32, cut, BLOCK_N, NUM_PARTIALS, EVEN_SPLITS, BLOCK_D)
    partner_outs, v_outs = head * HEAD_DIM + partner, x_outs + KV_HEADS * HEAD_DIM
    other = sum_partials(
        partials_ptr, partner_outs, mask, token_32, cut, BLOCK_N, NUM_PARTIALS, EVEN_SPLITS, BLOCK_D
    )
    v = sum_partials(
        partials_ptr, v_outs, value_mask, token_32, cut, BLOCK_N, NUM_PARTIALS, EVEN_SPLITS, BLOCK_D
    )
    squares_S = load_squares(squares_ptr, token_32, num_squares, BLOCK_SQUARES)
    inverse = inverse_norm(squares_ptr, squares_S, norm_eps, BLOCK_SQUARES)
    x, other = x * inverse, other * inverse
    if NORMED:
        scale = tl.rsqrt(tl.sum(x * x, 0) + eps)
        x = x * scale * weight
        other = other * scale * other_weight
    x = x * cos + other * sin
    if head < HEADS:
        offset = (token * HEADS + head) * HEAD_DIM
        tl.store(queries_ptr + offset + d, (x * query_scale).to(queries_ptr.dtype.element_ty), mask=mask)
    else:
        kv = head - HEADS
        offset = ((page * KV_HEADS + kv) * PAGE_SIZE + position % PAGE_SIZE) * WIDTH
        tl.store(keys_ptr + offset + d, x.to(keys_ptr.dtype.element_ty), mask=d < WIDTH)
        tl.store(values_ptr + offset + d, (v * inverse).to(values_ptr.dtype.element_ty), mask=d < WIDTH)


@triton.jit
def split_start(split, FIRST_SPLIT: tl.constexpr, SPLITS_PER_SIZE: tl.constexpr):
    """The first position of a split."""
    doublings, index = split // SPLITS_PER_SIZE, split % SPLITS_PER_SIZE
    return (((SPLITS_PER_SIZE + index) << doublings) - SPLITS_PER_SIZE) * FIRST_SPLIT


@triton.jit
def split_of(position, FIRST_SPLIT: tl.constexpr, SPLITS_PER_SIZE: tl.constexpr):
    """The split that a position is in."""
    at = position // FIRST_SPLIT + SPLITS_PER_SIZE
    doublings = position * 0
    for power in tl.static_range(1, 25):
        doublings += ((at // SPLITS_PER_SIZE) >> power > 0).to(tl.int32)
    return doublings * SPLITS_PER_SIZE + (at >> doublings) - SPLITS_PER_SIZE


@triton.jit
def row_of_tile(
    tile, rows_ptr, first_token, num_tokens, num_rows, BLOCK_R: tl.constexpr, TILE: tl.constexpr,
    PER_TOKEN: tl.constexpr = 1,
):  # fmt: skip
    """Which row a tile belongs to, and which of the row's tiles it is, in a launch that takes only some tokens. A tile
    has TILE queries, PER_TOKEN of each token.

    A row of n queries has ⌈n / TILE⌉ tiles, or one more that stays empty: a row begins at a tile that is known from the
    tokens and rows before it alone.
    """
    found, begin = 0, 0
    for base in range(0, num_rows, BLOCK_R):
        row = base + tl.arange(0, BLOCK_R)
        first = tl.load(rows_ptr + row * FIELDS + FIRST_TOKEN, mask=row < num_rows, other=0)
        before = tl.minimum(tl.maximum(first - first_token, 0), num_tokens)
        begins = (before * PER_TOKEN + row * (TILE - 1)) // TILE
        reached = (row < num_rows) & (begins <= tile)
        found += tl.sum(reached.to(tl.int32), 0)
        begin = tl.maximum(begin, tl.max(tl.where(reached, begins, 0), 0))
    return found - 1, tile - begin


@triton.jit
def load_pages(pages_ptr, begin, end, PAGE_SIZE: tl.constexpr, BLOCK_P: tl.constexpr):
    """Loads the page of a block of positions, or one for each of them where a block may lie in several."""
    if PAGE_SIZE % BLOCK_P == 0:
        position = begin + tl.zeros([1], tl.int32)
        return tl.load(pages_ptr + position // PAGE_SIZE, mask=position < end, other=0)
    else:
        position = begin + tl.arange(0, BLOCK_P)
        return tl.load(pages_ptr + position // PAGE_SIZE, mask=position < end, other=0)


@triton.jit
def nothing_added(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """The largest scores, the totals and the sums of a tile of queries that have attended to nothing yet."""
    return (
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M, TOTALS], tl.float32),
        tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
    )


@triton.jit
def add_block(
    q_MD, k_DP, v_PD, p, last_M, max_M, total_MN, sum_MD, BLOCK_P: tl.constexpr, WINDOW: tl.constexpr
):
    """Attends to a block of positions `p`, with queries that see positions up to `last_M`. Where a query sees none of
    them, its numbers stay as they are.

    Weights are summed by a product with ones, whose TOTALS columns are all the same: in the order of the products
    beside it, which is one whatever the size of the tile, and in the precision that weights have there."""
    score_MP = tl.dot(q_MD, k_DP, input_precision="ieee")
    score_MP = tl.where(p[None, :] <= last_M[:, None], score_MP, float("-inf"))
    if WINDOW is not None:
        score_MP = tl.where(p[None, :] > last_M[:, None] - WINDOW, score_MP, float("-inf"))
    new_max_M = tl.maximum(max_M, tl.max(score_MP, 1) * LOG2_E)
    base_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
    weight_MP = tl.exp2(tl.fma(score_MP, LOG2_E, -base_M[:, None])).to(v_PD.dtype)
    fade_M = tl.exp2(max_M - base_M)
    one_PN = tl.full([BLOCK_P, TOTALS], 1.0, v_PD.dtype)
    # Both fade before either is added to: nothing may come between two products that are to overlap.
    total_MN, sum_MD = total_MN * fade_M[:, None], sum_MD * fade_M[:, None]
    total_MN = tl.dot(weight_MP, one_PN, total_MN, input_precision="ieee")
    sum_MD = tl.dot(weight_MP, v_PD, sum_MD, input_precision="ieee")
    return new_max_M, total_MN, sum_MD


@triton.jit
def fades(maximum, split_maximum):
    """Computes what the numbers added so far, and those of a split, are multiplied with, so that both are relative to
    the larger of their maxima; and that maximum."""
    new_maximum = tl.maximum(maximum, split_maximum)
    base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    return tl.exp2(maximum - base), tl.exp2(split_maximum - base), new_maximum


@triton.jit(do_not_specialize=["stride_pages", "first_token", "num_tokens", "num_rows", "num_splits"])
def attend_kernel(
    queries_ptr, keys_ptr, values_ptr, maxima_ptr, totals_ptr, sums_ptr, rows_ptr, pages_ptr,
    stride_pages, first_token, num_tokens, num_rows, num_splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, FIRST_SPLIT: tl.constexpr, SPLITS_PER_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr, TILE_TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Attends to one split of the context with the queries of up to TILE_TOKENS tokens of a row that share a key head.

    It stores for each query the largest score (times log2 e), the sum of the weights relative to it, and the weighted
    values. With a WINDOW programs begin at the first split that the tile's first token sees, and each token has room
    for `num_splits` from its own first one on."""
    tile, kv = tl.program_id(0), tl.program_id(1)
    split = num_splits - 1 - tl.program_id(2)  # the longest are started first
    row, index = row_of_tile(tile, rows_ptr, first_token, num_tokens, num_rows, BLOCK_R, TILE_TOKENS)
    row_ptr = rows_ptr + row * FIELDS
    first = tl.load(row_ptr + FIRST_TOKEN)
    low = tl.maximum(first, first_token) + index * TILE_TOKENS
    high = tl.minimum(first + tl.load(row_ptr + QUERY_LEN), first_token + num_tokens)
    high = tl.minimum(high, low + TILE_TOKENS)
    offset = tl.load(row_ptr + START) - first
    if WINDOW is None:
        begin = split_start(split, FIRST_SPLIT, SPLITS_PER_SIZE)
    else:
        first_seen = tl.maximum(low + offset + 1 - WINDOW, 0)
        split = split_of(first_seen, FIRST_SPLIT, SPLITS_PER_SIZE) + tl.program_id(2)
        # Blocks lie at fixed positions; one that a query sees nothing of leaves its sums as they are.
        begin = tl.maximum(split_start(split, FIRST_SPLIT, SPLITS_PER_SIZE), first_seen // BLOCK_P * BLOCK_P)
    end = tl.minimum(split_start(split + 1, FIRST_SPLIT, SPLITS_PER_SIZE), high + offset)
    row_pages_ptr = pages_ptr + row.to(tl.int64) * stride_pages
    page = load_pages(row_pages_ptr, begin, end, PAGE_SIZE, BLOCK_P)
    wait_for_previous_kernel()
    launch_dependents()
    if (low >= high) | (begin >= end):
        return

    GROUP: tl.constexpr = HEADS // KV_HEADS
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    token_M = low + m // GROUP
    mask_M, mask_D = token_M < high, d < HEAD_DIM
    query_M = token_M.to(tl.int64) * HEADS + kv * GROUP + m % GROUP
    q_MD = tl.load(
        queries_ptr + query_M[:, None] * HEAD_DIM + d[None, :],
        mask=mask_M[:, None] & mask_D[None, :],
        other=0.0,
    )
    max_M, total_MN, sum_MD = nothing_added(BLOCK_M, BLOCK_D)
    for first_p in range(begin, end, BLOCK_P):
        p = first_p + tl.arange(0, BLOCK_P)
        mask_P = p < end
        page_P = (page.to(tl.int64) * KV_HEADS + kv) * (PAGE_SIZE * WIDTH)
        offset_P = p % PAGE_SIZE * WIDTH
        # Pages are known a block ahead, so that keys and values can be fetched ahead.
        page = load_pages(row_pages_ptr, first_p + BLOCK_P, end, PAGE_SIZE, BLOCK_P)
        k_DP = tl.load(
            (keys_ptr + page_P)[None, :] + (offset_P[None, :] + d[:, None]),
            mask=mask_P[None, :] & mask_D[:, None],
            other=0.0,
        )
        v_PD = tl.load(
            (values_ptr + page_P)[:, None] + (offset_P[:, None] + d[None, :]),
            mask=mask_P[:, None] & mask_D[None, :],
            other=0.0,
        )
        max_M, total_MN, sum_MD = add_block(
            q_MD, k_DP, v_PD, p, token_M + offset, max_M, total_MN, sum_MD, BLOCK_P, WINDOW
        )

    total_M = tl.max(total_MN, 1)
    split_M = (query_M - first_token.to(tl.int64) * HEADS) * num_splits + split
    if WINDOW is not None:
        first_M = split_of(tl.maximum(token_M + offset + 1 - WINDOW, 0), FIRST_SPLIT, SPLITS_PER_SIZE)
        split_M -= first_M
        mask_M = mask_M & (split >= first_M) & (split - first_M < num_splits)
    tl.store(maxima_ptr + split_M, max_M, mask=mask_M)
    tl.store(totals_ptr + split_M, total_M, mask=mask_M)
    tl.store(
        sums_ptr + split_M[:, None] * HEAD_DIM + d[None, :], sum_MD, mask=mask_M[:, None] & mask_D[None, :]
    )


@triton.jit(do_not_specialize=["first_token", "num_splits", *UNSPECIALIZED])
def combine_kernel(
    maxima_ptr, totals_ptr, sums_ptr, gates_ptr, out_ptr, positions_ptr, first_token, num_splits,
    num_tokens, num_outs, steps_per_tile, steps_per_split, squares_ptr, norm_eps, num_squares,
    BLOCK_N: tl.constexpr, NUM_PARTIALS: tl.constexpr, EVEN_SPLITS: tl.constexpr, BLOCK_SQUARES: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    FIRST_SPLIT: tl.constexpr, SPLITS_PER_SIZE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr = None, sinks_ptr=None,
):  # fmt: skip
    """Computes a part of one head of one token: adds its splits in blocks of BLOCK_S, in order, and its sink at last,
    and applies its gates, if any."""
    launch_dependents()
    index, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = first_token + index
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask, position = d < HEAD_DIM, tl.load(positions_ptr + token)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head) * LOG2_E
    wait_for_previous_kernel()
    if gates_ptr is not None:
        cut = (num_tokens, num_outs, steps_per_tile, steps_per_split)
        gate_outs = head * HEAD_DIM + d
        gate = sum_partials(
            gates_ptr, gate_outs, mask, token, cut, BLOCK_N, NUM_PARTIALS, EVEN_SPLITS, BLOCK_D
        )
        squares_S = load_squares(squares_ptr, token, num_squares, BLOCK_SQUARES)
    first_split = (index * HEADS + head) * num_splits
    seen = split_of(position, FIRST_SPLIT, SPLITS_PER_SIZE) + 1
    if WINDOW is not None:
        seen -= split_of(tl.maximum(position + 1 - WINDOW, 0), FIRST_SPLIT, SPLITS_PER_SIZE)
    maximum, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    sum_D = tl.zeros([BLOCK_D], tl.float32)
    for base in range(0, num_splits, BLOCK_S):
        # Written out, so that the loads of a block are on their way before the first is added.
        for i in tl.static_range(BLOCK_S):
            exists, split = base + i < seen, first_split + base + i
            split_max = tl.load(maxima_ptr + split, mask=exists, other=float("-inf"))
            split_total = tl.load(totals_ptr + split, mask=exists, other=0.0)
            split_D = tl.load(
                sums_ptr + split * HEAD_DIM + d, mask=d < tl.where(exists, HEAD_DIM, 0), other=0.0
            )
            fade, split_fade, maximum = fades(maximum, split_max)
            total = tl.fma(total, fade, split_total * split_fade)
            sum_D = tl.fma(sum_D, fade, split_D * split_fade)
    if sinks_ptr is not None:
        fade, sink_weight, maximum = fades(maximum, sink)
        total = tl.fma(total, fade, sink_weight)
        sum_D *= fade
    result = sum_D / total
    if gates_ptr is not None:
        gate *= inverse_norm(squares_ptr, squares_S, norm_eps, BLOCK_SQUARES)
        result = result / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + (token * HEADS + head) * HEAD_DIM + d, result, mask=mask)
