# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
"""The attention core's kernel for prompts: a tile of queries walks all splits of its context in order.

What it adds, and in which order, is what `attend_kernel` and `combine_kernel` add: within a split block after block
from nothing, and then the split to those before it. So a token has the same bits whichever of them serves, while
nothing is left in memory to be combined and keys are read once for many more queries. That tiles of different sizes
multiply with the same bits is tried before this kernel serves (`triton.py`).

Legend: that of triton_kernels.py. E columns of a head are a program's to sum, BLOCK_E of them: registers hold the sums
of a split and, beginning with `all_`, those of all splits before it.
"""

import triton
import triton.language as tl

from headlong.ops.gated_attention.triton_kernels import (
    FIELDS,
    FIRST_TOKEN,
    LOG2_E,
    QUERY_LEN,
    START,
    add_block,
    fades,
    load_pages,
    nothing_added,
    row_of_tile,
    split_of,
    split_start,
)
from headlong.ops.linear.triton_split_k import UNSPECIALIZED, sum_partials
from headlong.ops.norm.triton import inverse_norms, load_squares_of_tokens
from headlong.ops.triton_launch import launch_dependents, wait_for_previous_kernel


@triton.jit
def add_split(all_max_M, all_total_M, all_sum_ME, max_M, total_MN, sum_ME):
    """Adds a split to those before it, as `combine_kernel` does."""
    fade_M, split_fade_M, max_M = fades(all_max_M, max_M)
    all_total_M = tl.fma(all_total_M, fade_M, tl.max(total_MN, 1) * split_fade_M)
    return max_M, all_total_M, tl.fma(all_sum_ME, fade_M[:, None], sum_ME * split_fade_M[:, None])


@triton.jit(do_not_specialize=["stride_pages", "num_rows", *UNSPECIALIZED])
def walk_kernel(
    queries_ptr, keys_ptr, values_ptr, gates_ptr, out_ptr, rows_ptr, pages_ptr, stride_pages, num_rows,
    num_tokens, num_outs, steps_per_tile, steps_per_split, squares_ptr, norm_eps, num_squares, all_tokens,
    BLOCK_N: tl.constexpr, NUM_PARTIALS: tl.constexpr, EVEN_SPLITS: tl.constexpr, BLOCK_SQUARES: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, FIRST_SPLIT: tl.constexpr, SPLITS_PER_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr, TILE_TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr, WINDOW: tl.constexpr, sinks_ptr=None,
):  # fmt: skip
    """Attends to the whole context with the queries of up to TILE_TOKENS tokens of a row that share a key head, for
    some columns of the head, and applies their gates, if any."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    # Tiles at the end of a prompt have the most to read: they are started first.
    tile, kv = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    row, index = row_of_tile(tile, rows_ptr, 0, all_tokens, num_rows, BLOCK_R, TILE_TOKENS)
    row_ptr = rows_ptr + row * FIELDS
    first = tl.load(row_ptr + FIRST_TOKEN)
    low = first + index * TILE_TOKENS
    high = tl.minimum(first + tl.load(row_ptr + QUERY_LEN), low + TILE_TOKENS)
    offset = tl.load(row_ptr + START) - first
    begin, end, split = 0, high + offset, 0
    if WINDOW is not None:
        first_seen = tl.maximum(low + offset + 1 - WINDOW, 0)
        begin, split = first_seen // BLOCK_P * BLOCK_P, split_of(first_seen, FIRST_SPLIT, SPLITS_PER_SIZE)
    split_end = split_start(split + 1, FIRST_SPLIT, SPLITS_PER_SIZE)
    row_pages_ptr = pages_ptr + row.to(tl.int64) * stride_pages
    page = load_pages(row_pages_ptr, begin, end, PAGE_SIZE, BLOCK_P)
    wait_for_previous_kernel()
    launch_dependents()
    if low >= high:
        return

    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    e = tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    token_M, head_M = low + m // GROUP, kv * GROUP + m % GROUP
    mask_M, mask_D, mask_E = (token_M < high) & (m < TILE_TOKENS * GROUP), d < HEAD_DIM, e < HEAD_DIM
    query_M = (token_M.to(tl.int64) * HEADS + head_M) * HEAD_DIM
    q_MD = tl.load(
        queries_ptr + query_M[:, None] + d[None, :], mask=mask_M[:, None] & mask_D[None, :], other=0.0
    )
    max_M, total_MN, sum_ME = nothing_added(BLOCK_M, BLOCK_E)
    all_max_M, all_total_M, all_sum_ME = max_M, tl.zeros([BLOCK_M], tl.float32), sum_ME
    for first_p in range(begin, end, BLOCK_P):
        p = first_p + tl.arange(0, BLOCK_P)
        mask_P = p < end
        page_P = (page.to(tl.int64) * KV_HEADS + kv) * (PAGE_SIZE * WIDTH)
        offset_P = p % PAGE_SIZE * WIDTH
        page = load_pages(row_pages_ptr, first_p + BLOCK_P, end, PAGE_SIZE, BLOCK_P)
        k_DP = tl.load(
            (keys_ptr + page_P)[None, :] + (offset_P[None, :] + d[:, None]),
            mask=mask_P[None, :] & mask_D[:, None],
            other=0.0,
        )
        v_PE = tl.load(
            (values_ptr + page_P)[:, None] + (offset_P[:, None] + e[None, :]),
            mask=mask_P[:, None] & mask_E[None, :],
            other=0.0,
        )
        max_M, total_MN, sum_ME = add_block(
            q_MD, k_DP, v_PE, p, token_M + offset, max_M, total_MN, sum_ME, BLOCK_P, WINDOW
        )
        # Triton 3.6 lets products run on into a branch that uses their sums. It waits for what is used before it.
        total_MN, sum_ME = tl.where(end > first_p, total_MN, 0.0), tl.where(end > first_p, sum_ME, 0.0)
        if first_p + BLOCK_P == split_end:
            all_max_M, all_total_M, all_sum_ME = add_split(
                all_max_M, all_total_M, all_sum_ME, max_M, total_MN, sum_ME
            )
            max_M, total_MN, sum_ME = nothing_added(BLOCK_M, BLOCK_E)
            split += 1
            split_end = split_start(split + 1, FIRST_SPLIT, SPLITS_PER_SIZE)
    all_max_M, all_total_M, all_sum_ME = add_split(
        all_max_M, all_total_M, all_sum_ME, max_M, total_MN, sum_ME
    )

    if sinks_ptr is not None:
        sink_M = tl.load(sinks_ptr + head_M, mask=mask_M, other=0.0) * LOG2_E
        fade_M, sink_M, all_max_M = fades(all_max_M, sink_M)
        all_total_M = tl.fma(all_total_M, fade_M, sink_M)
        all_sum_ME *= fade_M[:, None]
    result_ME = all_sum_ME / all_total_M[:, None]
    mask_ME = mask_M[:, None] & mask_E[None, :]
    if gates_ptr is not None:
        cut = (num_tokens, num_outs, steps_per_tile, steps_per_split)
        gate_outs = head_M[:, None] * HEAD_DIM + e[None, :]
        gate_ME = sum_partials(
            gates_ptr, gate_outs, mask_ME, token_M[:, None], cut, BLOCK_N, NUM_PARTIALS, EVEN_SPLITS, BLOCK_E
        )
        if squares_ptr is not None:
            squares_SM = load_squares_of_tokens(
                squares_ptr, token_M, mask_M, num_squares, BLOCK_SQUARES, BLOCK_M
            )
            gate_ME *= tl.trans(inverse_norms(squares_SM, norm_eps, BLOCK_SQUARES, BLOCK_M))
        result_ME = result_ME / (1.0 + tl.exp(-gate_ME))
    tl.store(out_ptr + query_M[:, None] + e[None, :], result_ME, mask=mask_ME)
