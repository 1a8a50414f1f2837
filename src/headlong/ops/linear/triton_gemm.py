"""The GEMM kernel y = x Wᵀ for few tokens: weights are streamed once, as narrow as they are stored.

Split-K: all K steps of a weight, output tile by output tile and along each from its first input columns to its last,
are one line that is cut into equal splits, one for each program (known as stream-K). Where a split ends inside a
tile, each program leaves a partial sum; triton_split_k.py adds these in their order and computes the epilogue. A
weight with few columns is cut between tiles alone, and its epilogue is part of this kernel. Tiles, splits and partial
sums are cut the same whatever the number of tokens (triton_weight.py). How many tokens are multiplied at once depends
on their number, but only where the device gives each the same bits (triton_block_m.py); so a token's bits do not
depend on its company.

Legend. M tokens, N outputs and K inputs, as of every GEMM: a tile has BLOCK_N outputs, a step BLOCK_K input columns
of each of its halves, a program BLOCK_M tokens; tiles' names end in the letters of their dimensions, as acc_NM.
  x_ptr [num_tokens, num_ins]; codes_ptr: the weight as `CodeLayout` says; scales_ptr, offsets_ptr: a factor and a
  summand for each group of columns; row_scales_ptr [num_outs]; bias_ptr [num_outs]; residual_ptr and out_ptr
  [num_tokens, stride_out]; columns_ptr [num_outs]: which column of `out` an output is, if they are not in order.
  squares_ptr [num_tokens, num_squares], norm_eps: the inputs' norms, by which sums are divided (ops/norm/triton.py).
  stride_codes, stride_scales: from one output (or block of outputs) to the next, in words and in scales.
  steps_per_tile, steps_per_split, total_steps: of one tile, one program and all tiles.
Pointers that may be None stand for what a weight or a layer does not have.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false
# Triton's own types describe neither its kernels nor their launch.

from typing import NamedTuple

import triton
import triton.language as tl

from headlong.ops.linear.triton_unpack import INTERPRETED, decode
from headlong.ops.norm.triton import inverse_norms, load_squares_of_tokens
from headlong.ops.silu_mul.triton import silu_gated
from headlong.ops.triton_launch import (
    launch_dependents,
    wait_for_previous_kernel,
    zero_after_previous_kernel,
)


class CodeLayout(NamedTuple):
    """The part of a weight's layout that kernels are compiled for: how its codes lie in memory and which of them share
    scales."""

    encoding: int
    """The encoding of its codes, one of those that triton_unpack.py names."""
    zero_point: int
    """The code of 0."""
    codes_per_word: int
    """2 where a word holds a code of the first half of a step's columns and one of the second; 1 for floats."""
    group_size: int
    """Columns that share a scale; 0 if none do."""
    scale_rows: int
    """Outputs that share a scale."""
    interleave: int
    """Outputs whose codes lie together step by step; 1 where weights lie row by row."""


@triton.jit
def dot(w_NK, x_KM, acc_NM):
    """Returns the accumulator plus a product of tiles, in float32."""
    w_NK = w_NK.to(x_KM.dtype)
    if INTERPRETED:  # which takes the bits of bfloat16 for whole numbers
        w_NK, x_KM = w_NK.to(tl.float32), x_KM.to(tl.float32)
    return tl.dot(w_NK, x_KM, acc_NM, input_precision="ieee")


@triton.jit
def group_factor_ptr(factors_ptr, outs, group, stride, SCALE_ROWS: tl.constexpr):
    """Where the factors of a group of columns lie: side by side for outputs that have each its own, [groups, N]. Where
    SCALE_ROWS outputs share one, those of a program's steps are side by side, [N / SCALE_ROWS, groups]: most steps then
    find theirs next to the last one's, in the nearest cache, and need not wait for it."""
    if SCALE_ROWS > 1:
        return factors_ptr + (outs // SCALE_ROWS).to(tl.int64) * stride + group
    else:
        return factors_ptr + group.to(tl.int64) * stride + outs


@triton.jit
def load_factors_by_column(
    factors_ptr, outs_N, first_column, stride,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_SIZE: tl.constexpr, SCALE_ROWS: tl.constexpr,
):  # fmt: skip
    """Factors of groups that are shorter than a step, one for each weight of a tile, [BLOCK_N, BLOCK_K]."""
    groups = first_column // GROUP_SIZE + tl.arange(0, BLOCK_K // GROUP_SIZE)
    factors_ptrs = group_factor_ptr(factors_ptr, outs_N[:, None], groups[None, :], stride, SCALE_ROWS)
    factors_NG = tl.load(factors_ptrs).to(tl.float32)
    return tl.broadcast_to(factors_NG[:, :, None], (BLOCK_N, BLOCK_K // GROUP_SIZE, GROUP_SIZE)).reshape(
        BLOCK_N, BLOCK_K
    )


@triton.jit
def code_offsets(outs, stride_codes, INTERLEAVE: tl.constexpr, BLOCK_K: tl.constexpr):
    """Where the codes of outputs begin. INTERLEAVE of these lie step by step, the BLOCK_K words of one behind those of
    another."""
    return (outs // INTERLEAVE).to(tl.int64) * (INTERLEAVE * stride_codes) + outs % INTERLEAVE * BLOCK_K


@triton.jit
def gemm_step(
    acc_NM, x_ptrs_KM, codes_NK, scales_ptr, offsets_ptr, outs_N, is_token_M, step, num_outs, num_ins, stride_scales,
    DTYPE: tl.constexpr, LAYOUT: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Returns the accumulator plus the product of one step's columns, one half after the other."""
    HALVES: tl.constexpr = LAYOUT.codes_per_word
    GROUP_SIZE: tl.constexpr = LAYOUT.group_size
    SCALE_ROWS: tl.constexpr = LAYOUT.scale_rows
    SHARED: tl.constexpr = (
        1 if GROUP_SIZE % (HALVES * BLOCK_K) else HALVES
    )  # halves that have a scale together
    scale_N = tl.zeros((BLOCK_N,), tl.float32)
    if scales_ptr is not None and GROUP_SIZE >= BLOCK_K:  # on its way while the columns are multiplied
        group = step * HALVES * BLOCK_K // GROUP_SIZE
        scale_N = tl.load(group_factor_ptr(scales_ptr, outs_N, group, stride_scales, SCALE_ROWS)).to(
            tl.float32
        )
    part_NM, x_sum_M = tl.zeros((BLOCK_N, BLOCK_M), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    for half in tl.static_range(HALVES):
        first_column = (step * HALVES + half) * BLOCK_K
        if EVEN_K:
            x_KM = tl.load(x_ptrs_KM + first_column, mask=is_token_M[None, :], other=0.0).to(DTYPE)
        else:
            mask = is_token_M[None, :] & (first_column + tl.arange(0, BLOCK_K) < num_ins)[:, None]
            x_KM = tl.load(x_ptrs_KM + first_column, mask=mask, other=0.0).to(DTYPE)
        w_NK = decode(codes_NK, half, LAYOUT.encoding, LAYOUT.zero_point, DTYPE)
        if scales_ptr is None:
            acc_NM = dot(w_NK, x_KM, acc_NM)
        elif GROUP_SIZE < BLOCK_K:
            w_NK = w_NK.to(tl.float32) * load_factors_by_column(
                scales_ptr, outs_N, first_column, stride_scales, BLOCK_N, BLOCK_K, GROUP_SIZE, SCALE_ROWS
            )
            if offsets_ptr is not None:
                w_NK += load_factors_by_column(
                    offsets_ptr, outs_N, first_column, num_outs, BLOCK_N, BLOCK_K, GROUP_SIZE, 1
                )
            acc_NM = dot(w_NK, x_KM, acc_NM)
        else:
            if half % SHARED == 0:
                part_NM, x_sum_M = tl.zeros((BLOCK_N, BLOCK_M), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
            part_NM = dot(w_NK, x_KM, part_NM)
            if offsets_ptr is not None:
                x_sum_M += tl.sum(x_KM.to(tl.float32), 0)
            group = first_column // GROUP_SIZE
            if SHARED < HALVES and half > 0:
                scale_N = tl.load(group_factor_ptr(scales_ptr, outs_N, group, stride_scales, SCALE_ROWS)).to(
                    tl.float32
                )
            if half % SHARED == SHARED - 1:
                acc_NM += scale_N[:, None] * part_NM
                if offsets_ptr is not None:
                    offset_N = tl.load(group_factor_ptr(offsets_ptr, outs_N, group, num_outs, 1))
                    acc_NM += offset_N[:, None] * x_sum_M[None, :]
    return acc_NM


@triton.jit
def load_codes(
    code_ptrs_NK, step, column_K, num_ins, LAYOUT: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Loads the codes of a step; those past the last input are 0."""
    if EVEN_K or LAYOUT.codes_per_word == 2:
        return tl.load(code_ptrs_NK + step * (LAYOUT.interleave * BLOCK_K))
    else:
        is_column_K = step * BLOCK_K + column_K < num_ins
        return tl.load(code_ptrs_NK + step * BLOCK_K, mask=is_column_K[None, :], other=0.0)


@triton.jit
def load_columns(columns_ptr, outs, is_out):
    """Loads which columns of the result outputs are."""
    if columns_ptr is None:
        return outs
    else:
        return tl.load(columns_ptr + outs, mask=is_out, other=0)


@triton.jit
def store_epilogue(sums, columns, tokens, is_out, mask, bias_ptr, residual_ptr, out_ptr, stride_out):
    """Adds the bias, then the residual; stores the result and returns it."""
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + columns, mask=is_out, other=0.0).to(tl.float32)
    offsets = tokens.to(tl.int64) * stride_out + columns
    if residual_ptr is not None:
        sums += tl.load(residual_ptr + offsets, mask=mask, other=0.0)
    tl.store(out_ptr + offsets, sums, mask=mask)
    return sums


@triton.jit
def store_gated_epilogue(
    acc_NM,
    outs,
    tokens,
    is_out,
    mask,
    bias_ptr,
    out_ptr,
    num_gated,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Stores silu(gate) · up. In the tile each gate is followed by the up it belongs to."""
    gate, up = tl.split(acc_NM.reshape(BLOCK_N // 2, 2, BLOCK_M).permute(0, 2, 1))
    if bias_ptr is not None:
        gate += tl.load(bias_ptr + outs, mask=is_out, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + num_gated + outs, mask=is_out, other=0.0).to(tl.float32)
    tl.store(out_ptr + tokens.to(tl.int64) * num_gated + outs, silu_gated(gate, up), mask=mask)


@triton.jit
def gemm_split(
    split, x_ptr, codes_ptr, scales_ptr, offsets_ptr, row_scales_ptr, out_ptr, bias_ptr, residual_ptr, columns_ptr,
    squares_ptr, norm_eps, num_squares,
    num_tokens, num_outs, num_ins, stride_codes, stride_scales,
    steps_per_tile, steps_per_split, total_steps, stride_out,
    DTYPE: tl.constexpr, LAYOUT: tl.constexpr, EVEN_K: tl.constexpr,
    SPLIT_K: tl.constexpr, PARTS: tl.constexpr, INPUTS_READY: tl.constexpr, BLOCK_SQUARES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr = 1,
):  # fmt: skip
    """One split of the GEMM, as `gemm_kernel` describes it."""
    INTERLEAVE: tl.constexpr = LAYOUT.interleave
    token_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_token_M = token_M < num_tokens
    first = split * steps_per_split
    last = tl.minimum(first + steps_per_split, total_steps)
    column_K = tl.arange(0, BLOCK_K)
    x_ptrs_KM = x_ptr + token_M.to(tl.int64)[None, :] * (GROUPS * num_ins) + column_K[:, None]
    # A gate and the up it belongs to lie side by side in a tile.
    part_outs, row_N = num_outs // PARTS, tl.arange(0, BLOCK_N)
    for tile in range(first // steps_per_tile, (last - 1) // steps_per_tile + 1):
        # Outputs past the last are computed from the last one's weights and not stored.
        outs_N = (
            tl.minimum(tile * (BLOCK_N // PARTS) + row_N // PARTS, part_outs - 1) + row_N % PARTS * part_outs
        )
        code_ptrs_NK = (
            codes_ptr + code_offsets(outs_N, stride_codes, INTERLEAVE, BLOCK_K)[:, None] + column_K[None, :]
        )
        tile_ptrs_KM = x_ptrs_KM
        if GROUPS > 1:
            tile_ptrs_KM += tile * BLOCK_N // (num_outs // GROUPS) * num_ins
        acc_NM = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        begin = tl.maximum(first - tile * steps_per_tile, 0)
        end = tl.minimum(last - tile * steps_per_tile, steps_per_tile)
        for step in range(begin, end):
            codes_NK = load_codes(code_ptrs_NK, step, column_K, num_ins, LAYOUT, EVEN_K, BLOCK_K)
            acc_NM = gemm_step(
                acc_NM, tile_ptrs_KM + (0 if INPUTS_READY else zero_after_previous_kernel(step)), codes_NK,
                scales_ptr, offsets_ptr, outs_N, is_token_M, step, num_outs, num_ins, stride_scales,
                DTYPE, LAYOUT, EVEN_K, BLOCK_N, BLOCK_K, BLOCK_M,
            )  # fmt: skip
        if not INPUTS_READY:
            wait_for_previous_kernel()
        if row_scales_ptr is not None:
            acc_NM *= tl.load(row_scales_ptr + outs_N)[:, None]
        if squares_ptr is not None:
            squares_SM = load_squares_of_tokens(
                squares_ptr, token_M, is_token_M, num_squares, BLOCK_SQUARES, BLOCK_M
            )
            acc_NM *= inverse_norms(squares_SM, norm_eps, BLOCK_SQUARES, BLOCK_M)
        outs = tile * (BLOCK_N // PARTS) + tl.arange(0, BLOCK_N // PARTS)[:, None]
        tokens, mask = token_M[None, :], (outs < part_outs) & is_token_M[None, :]
        if PARTS == 2:
            store_gated_epilogue(
                acc_NM, outs, tokens, outs < part_outs, mask, bias_ptr, out_ptr, part_outs, BLOCK_N, BLOCK_M
            )
        else:
            if SPLIT_K:  # the partial sums of a tile lie one behind another, [partial, token, output]
                tokens += (split - tile * steps_per_tile // steps_per_split) * num_tokens
            columns, is_out = load_columns(columns_ptr, outs, outs < part_outs), outs < part_outs
            store_epilogue(acc_NM, columns, tokens, is_out, mask, bias_ptr, residual_ptr, out_ptr, stride_out)


@triton.jit(
    do_not_specialize=["num_tokens", "steps_per_tile", "steps_per_split", "total_steps", "num_squares"]
)
def gemm_kernel(
    x_ptr, codes_ptr, scales_ptr, offsets_ptr, row_scales_ptr, out_ptr, bias_ptr, residual_ptr, columns_ptr,
    squares_ptr, norm_eps, num_squares,
    num_tokens, num_outs, num_ins, stride_codes, stride_scales,
    steps_per_tile, steps_per_split, total_steps, stride_out,
    DTYPE: tl.constexpr, LAYOUT: tl.constexpr, EVEN_K: tl.constexpr,
    SPLIT_K: tl.constexpr, PARTS: tl.constexpr, INPUTS_READY: tl.constexpr, BLOCK_SQUARES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr = 1,
):  # fmt: skip
    """A program multiplies BLOCK_M tokens with its split of the steps. With SPLIT_K it stores partial sums, without
    it the epilogue's result. Two PARTS mean that the first half of the outputs are gates of the second half, and
    silu(gate) · up is stored. LAYOUT is a `CodeLayout`, DTYPE what is multiplied in, and EVEN_K says that steps end
    where the inputs end. Outputs may fall into GROUPS of whole tiles, each with `num_ins` inputs of its own, which lie
    one group after the other.

    INPUTS_READY promises that the inputs were written before the kernel before this one began, that the kernel before
    waited before it launched its dependents, and that this kernel's output overlaps nothing that is still in use.
    Then nothing has to be waited for, except by one program on behalf of what comes later: the others make room for
    more of them.
    """
    launch_dependents()
    gemm_split(
        tl.program_id(1), x_ptr, codes_ptr, scales_ptr, offsets_ptr, row_scales_ptr, out_ptr,
        bias_ptr, residual_ptr, columns_ptr, squares_ptr, norm_eps, num_squares,
        num_tokens, num_outs, num_ins, stride_codes, stride_scales,
        steps_per_tile, steps_per_split, total_steps, stride_out,
        DTYPE, LAYOUT, EVEN_K, SPLIT_K, PARTS, INPUTS_READY, BLOCK_SQUARES, BLOCK_N, BLOCK_K, BLOCK_M, GROUPS,
    )  # fmt: skip
    if INPUTS_READY:
        last = tl.program_id(0) == tl.num_programs(0) - 1
        if last & (tl.program_id(1) == tl.num_programs(1) - 1):
            wait_for_previous_kernel()
