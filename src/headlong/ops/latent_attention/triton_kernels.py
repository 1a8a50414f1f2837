# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
"""The latent attention core's Triton kernels: rotate and write latents, bring queries to latents, attend by splits of
the context, bring sums of latents to values. The splits are combined by the attention core's kernel.

A query's bits depend on its own past alone: splits and the blocks inside them lie at fixed absolute positions, tiles
have one size whatever they hold, and what lies past a query's own position adds exact zeros.

Legend. N tokens, R rows, S splits; M queries of a tile, P positions, D columns of a latent, E columns of its rotary
part, O outputs, I inputs: the dimensions in the names of tiles, of which a program has BLOCK_… at a time.
  plain_ptr [N, HEADS, PLAIN + ROPE]: queries as they were projected; given_ptr [N, RANK + ROPE]: latents likewise.
  queries_ptr [N, HEADS, RANK + ROPE]: queries that latents are compared with.
  latents_ptr [pages, PAGE_SIZE, WIDTH], WIDTH ≥ RANK + ROPE. cos_ptr, sin_ptr [N, ROPE]. norm_ptr [RANK].
  rows_ptr, token_rows_ptr, positions_ptr, pages_ptr, maxima_ptr, totals_ptr, sums_ptr: as for the attention core.
"""

import triton
import triton.language as tl

from headlong.ops.gated_attention.triton_kernels import (
    FIELDS,
    FIRST_TOKEN,
    LOG2_E,
    QUERY_LEN,
    START,
    load_pages,
    row_of_tile,
    split_start,
)
from headlong.ops.triton_launch import launch_dependents, wait_for_previous_kernel


@triton.jit(do_not_specialize=["first_head", "stride_pages", "scale"])
def rotate_kernel(
    plain_ptr, given_ptr, queries_ptr, latents_ptr, cos_ptr, sin_ptr, norm_ptr, eps_ptr, token_rows_ptr,
    positions_ptr, pages_ptr, first_head, stride_pages, scale,
    HEADS: tl.constexpr, PLAIN: tl.constexpr, ROPE: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Rotates the rotary part of one head's query of a token, or, after the heads, writes the token's latent, normed,
    and its rotary part."""
    launch_dependents()
    token, head = tl.program_id(0).to(tl.int64), first_head + tl.program_id(1)
    e, half = tl.arange(0, BLOCK_E), ROPE // 2
    mask_E, in_first = e < ROPE, e < half
    pair = tl.where(in_first, e, e - half)
    if INTERLEAVED:
        own, partner = tl.where(in_first, 2 * pair, 2 * pair + 1), tl.where(in_first, 2 * pair + 1, 2 * pair)
    else:
        own, partner = e, tl.where(in_first, e + half, pair)
    cos = tl.load(cos_ptr + token * ROPE + e, mask=mask_E, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * ROPE + e, mask=mask_E, other=0.0).to(tl.float32)
    if head < HEADS:
        x_ptr = plain_ptr + (token * HEADS + head) * (PLAIN + ROPE) + PLAIN
    else:
        x_ptr = given_ptr + token * (RANK + ROPE) + RANK
    position, row = tl.load(positions_ptr + token), tl.load(token_rows_ptr + token).to(tl.int64)
    page = tl.load(pages_ptr + row * stride_pages + position // PAGE_SIZE).to(tl.int64)
    wait_for_previous_kernel()
    x = tl.load(x_ptr + own, mask=mask_E, other=0.0).to(tl.float32)
    other = tl.load(x_ptr + partner, mask=mask_E, other=0.0).to(tl.float32)
    rotated = x * cos + other * sin
    if head < HEADS:
        query_ptr = queries_ptr + (token * HEADS + head) * (RANK + ROPE) + RANK
        tl.store(query_ptr + e, (rotated * scale).to(queries_ptr.dtype.element_ty), mask=mask_E)
    else:
        d = tl.arange(0, BLOCK_D)
        mask_D = d < RANK
        weight = tl.load(norm_ptr + d, mask=mask_D, other=0.0).to(tl.float32)
        latent = tl.load(given_ptr + token * (RANK + ROPE) + d, mask=mask_D, other=0.0).to(tl.float32)
        latent = latent * tl.rsqrt(tl.sum(latent * latent, 0) + tl.load(eps_ptr).to(tl.float32)) * weight
        latent_ptr = latents_ptr + (page * PAGE_SIZE + position % PAGE_SIZE) * WIDTH
        tl.store(latent_ptr + d, latent.to(latents_ptr.dtype.element_ty), mask=mask_D)
        tl.store(latent_ptr + RANK + e, rotated.to(latents_ptr.dtype.element_ty), mask=mask_E)


@triton.jit(do_not_specialize=["num_tokens", "scale"])
def heads_kernel(
    x_ptr, weights_ptr, out_ptr, num_tokens, scale,
    HEADS: tl.constexpr, NUM_INS: tl.constexpr, NUM_OUTS: tl.constexpr, STRIDE_X: tl.constexpr,
    STRIDE_OUT: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_O: tl.constexpr, STRIDE_I: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Multiplies one head of some tokens, x [N, HEADS, STRIDE_X], by the head's own matrix, into out [N, HEADS,
    STRIDE_OUT]."""
    launch_dependents()
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1).to(tl.int64)
    o, i = tl.program_id(2) * BLOCK_O + tl.arange(0, BLOCK_O), tl.arange(0, BLOCK_I)
    mask_M, mask_O = m < num_tokens, o < NUM_OUTS
    line_M = m.to(tl.int64) * HEADS + head
    weight_ptrs = weights_ptr + head * STRIDE_H + o[None, :] * STRIDE_O + i[:, None] * STRIDE_I
    x_ptrs = x_ptr + line_M[:, None] * STRIDE_X + i[None, :]
    sum_MO = tl.zeros([BLOCK_M, BLOCK_O], tl.float32)
    wait_for_previous_kernel()
    for first in range(0, NUM_INS, BLOCK_I):
        mask_I = first + i < NUM_INS
        w_IO = tl.load(weight_ptrs + first * STRIDE_I, mask=mask_I[:, None] & mask_O[None, :], other=0.0)
        x_MI = tl.load(x_ptrs + first, mask=mask_M[:, None] & mask_I[None, :], other=0.0)
        sum_MO = tl.dot(x_MI.to(w_IO.dtype), w_IO, sum_MO, input_precision="ieee")
    out_ptrs = out_ptr + line_M[:, None] * STRIDE_OUT + o[None, :]
    tl.store(out_ptrs, (sum_MO * scale).to(out_ptr.dtype.element_ty), mask=mask_M[:, None] & mask_O[None, :])


@triton.jit(do_not_specialize=["stride_pages", "first_token", "num_tokens", "num_rows", "num_splits"])
def attend_kernel(
    queries_ptr, latents_ptr, maxima_ptr, totals_ptr, sums_ptr, rows_ptr, pages_ptr,
    stride_pages, first_token, num_tokens, num_rows, num_splits,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, FIRST_SPLIT: tl.constexpr, SPLITS_PER_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Attends to one split of the context with BLOCK_M queries of a row: the heads of its tokens, one after the other.

    It stores for each query the largest score (times log2 e), the sum of the weights relative to it, and the weighted
    latents."""
    tile, split = tl.program_id(0), num_splits - 1 - tl.program_id(1)  # the longest are started first
    row, index = row_of_tile(
        tile, rows_ptr, first_token, num_tokens, num_rows, BLOCK_R, BLOCK_M, PER_TOKEN=HEADS
    )
    row_ptr = rows_ptr + row * FIELDS
    first = tl.load(row_ptr + FIRST_TOKEN)
    low = tl.maximum(first, first_token) * HEADS + index * BLOCK_M
    high = tl.minimum(first + tl.load(row_ptr + QUERY_LEN), first_token + num_tokens) * HEADS
    high = tl.minimum(high, low + BLOCK_M)
    offset = tl.load(row_ptr + START) - first
    begin = split_start(split, FIRST_SPLIT, SPLITS_PER_SIZE)
    end = tl.minimum(split_start(split + 1, FIRST_SPLIT, SPLITS_PER_SIZE), (high - 1) // HEADS + 1 + offset)
    row_pages_ptr = pages_ptr + row.to(tl.int64) * stride_pages
    page = load_pages(row_pages_ptr, begin, end, PAGE_SIZE, BLOCK_P)
    wait_for_previous_kernel()
    launch_dependents()
    if (low >= high) | (begin >= end):
        return

    query_M = low + tl.arange(0, BLOCK_M)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    mask_M, mask_D, mask_E = query_M < high, d < RANK, e < ROPE
    last_M = query_M // HEADS + offset
    query_ptrs = queries_ptr + query_M.to(tl.int64)[:, None] * (RANK + ROPE)
    q_MD = tl.load(query_ptrs + d[None, :], mask=mask_M[:, None] & mask_D[None, :], other=0.0)
    q_ME = tl.load(query_ptrs + RANK + e[None, :], mask=mask_M[:, None] & mask_E[None, :], other=0.0)
    max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    sum_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first_p in range(begin, end, BLOCK_P):
        p = first_p + tl.arange(0, BLOCK_P)
        mask_P = p < end
        latent_P = latents_ptr + (page.to(tl.int64) * PAGE_SIZE + p % PAGE_SIZE) * WIDTH
        # Pages are known a block ahead, so that latents can be fetched ahead.
        page = load_pages(row_pages_ptr, first_p + BLOCK_P, end, PAGE_SIZE, BLOCK_P)
        c_PD = tl.load(latent_P[:, None] + d[None, :], mask=mask_P[:, None] & mask_D[None, :], other=0.0)
        r_EP = tl.load(
            latent_P[None, :] + RANK + e[:, None], mask=mask_P[None, :] & mask_E[:, None], other=0.0
        )
        score_MP = tl.dot(q_ME, r_EP, input_precision="ieee")
        score_MP = tl.dot(q_MD, tl.trans(c_PD), score_MP, input_precision="ieee") * LOG2_E
        score_MP = tl.where(p[None, :] <= last_M[:, None], score_MP, float("-inf"))
        new_max_M = tl.maximum(max_M, tl.max(score_MP, 1))
        base_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
        weight_MP = tl.exp2(score_MP - base_M[:, None])
        fade_M = tl.exp2(max_M - base_M)
        total_M = total_M * fade_M + tl.sum(weight_MP, 1)
        sum_MD = tl.dot(weight_MP.to(c_PD.dtype), c_PD, sum_MD * fade_M[:, None], input_precision="ieee")
        max_M = new_max_M

    split_M = (query_M.to(tl.int64) - first_token.to(tl.int64) * HEADS) * num_splits + split
    tl.store(maxima_ptr + split_M, max_M, mask=mask_M)
    tl.store(totals_ptr + split_M, total_M, mask=mask_M)
    tl.store(sums_ptr + split_M[:, None] * RANK + d[None, :], sum_MD, mask=mask_M[:, None] & mask_D[None, :])
