"""The kernels of y = x Wᵀ for few tokens: weights are streamed once, as narrow as they are stored.

All steps of a matrix, tile of outputs by tile and along each from its first columns to its last, are one line that is
cut into equal shares, one for each program. Where a share ends inside a tile, each program leaves a piece of the sum;
triton_split_k.py adds them in their order. A matrix with few columns is cut between tiles alone, and what becomes of a
sum is done at once. Tiles, shares and pieces are cut the same whatever the number of tokens (triton_weight.py). How
many of these are multiplied at once depends on their number, but only where the device gives each the same bits
(triton_block_m.py); so a token's bits do not depend on its company.

N tokens, D inputs, O outputs; a tile has B outputs, a step C columns, a program M tokens.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# Triton's own types describe neither its kernels nor their launch.

import triton
import triton.language as tl

from headlong.ops.linear.triton_unpack import INTERPRETED, decode
from headlong.ops.norm.triton import inverse_lengths, squares_of_tokens
from headlong.ops.silu_mul.triton import gated
from headlong.ops.triton_launch import launch_dependents, wait_for_previous_kernel, zero_after_previous_kernel


@triton.jit
def dot(w_BC, x_CM, acc_BM):
    w_BC = w_BC.to(x_CM.dtype)
    if INTERPRETED:  # which takes the bits of bfloat16 for whole numbers
        w_BC, x_CM = w_BC.to(tl.float32), x_CM.to(tl.float32)
    return tl.dot(w_BC, x_CM, acc_BM, input_precision="ieee")


@triton.jit
def factor_at(factors, outs, group, stride, ROWS: tl.constexpr):
    """Where the factors of a group of columns lie: side by side for outputs that have each its own, [groups, O]. Where
    ROWS outputs share one, those of a program's steps are side by side, [O / ROWS, groups]: most steps then find theirs
    next to the last one's, in the nearest cache, and need not wait for it."""
    if ROWS > 1:
        return factors + (outs // ROWS).to(tl.int64) * stride + group
    else:
        return factors + group.to(tl.int64) * stride + outs


@triton.jit
def by_column(
    factors, outs_B, first_column, stride,
    B: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Factors of groups shorter than a step, one for each weight of a tile."""
    groups = first_column // GROUP + tl.arange(0, C // GROUP)
    factors_BG = tl.load(factor_at(factors, outs_B[:, None], groups[None, :], stride, ROWS)).to(tl.float32)
    return tl.broadcast_to(factors_BG[:, :, None], (B, C // GROUP, GROUP)).reshape(B, C)


@triton.jit
def at_rows(outs, row_stride, TOGETHER: tl.constexpr, C: tl.constexpr):
    """Where the codes of outputs begin. TOGETHER of these lie step by step, the C words of one behind another's."""
    return (outs // TOGETHER).to(tl.int64) * (TOGETHER * row_stride) + outs % TOGETHER * C


@triton.jit
def add_step(
    acc_BM, x_CM_at, codes_BC, scales, offsets, outs_B, there_M, step, num_outs, num_ins, scale_stride,
    DTYPE: tl.constexpr, CODE: tl.constexpr, ZERO: tl.constexpr, HALVES: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr,
    B: tl.constexpr, C: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """The sum, and the product of a step's columns, one half after the other. `ROWS` outputs have one scale."""
    SHARED: tl.constexpr = 1 if GROUP % (HALVES * C) else HALVES  # halves that have a scale together
    scale_B = tl.zeros((B,), tl.float32)
    if scales is not None and GROUP >= C:  # on its way while the columns are multiplied
        group = step * HALVES * C // GROUP
        scale_B = tl.load(factor_at(scales, outs_B, group, scale_stride, ROWS)).to(tl.float32)
    part_BM, total_M = tl.zeros((B, M), tl.float32), tl.zeros((M,), tl.float32)
    for half in tl.static_range(HALVES):
        first_column = (step * HALVES + half) * C
        if EVEN:
            x_CM = tl.load(x_CM_at + first_column, mask=there_M[None, :], other=0.0).to(DTYPE)
        else:
            inside = there_M[None, :] & (first_column + tl.arange(0, C) < num_ins)[:, None]
            x_CM = tl.load(x_CM_at + first_column, mask=inside, other=0.0).to(DTYPE)
        w_BC = decode(codes_BC, half, CODE, ZERO, DTYPE)
        if scales is None:
            acc_BM = dot(w_BC, x_CM, acc_BM)
        elif GROUP < C:
            w_BC = w_BC.to(tl.float32) * by_column(
                scales, outs_B, first_column, scale_stride, B, C, GROUP, ROWS
            )
            if offsets is not None:
                w_BC += by_column(offsets, outs_B, first_column, num_outs, B, C, GROUP, 1)
            acc_BM = dot(w_BC, x_CM, acc_BM)
        else:
            if half % SHARED == 0:
                part_BM, total_M = tl.zeros((B, M), tl.float32), tl.zeros((M,), tl.float32)
            part_BM = dot(w_BC, x_CM, part_BM)
            if offsets is not None:
                total_M += tl.sum(x_CM.to(tl.float32), 0)
            group = first_column // GROUP
            if SHARED < HALVES and half > 0:
                scale_B = tl.load(factor_at(scales, outs_B, group, scale_stride, ROWS)).to(tl.float32)
            if half % SHARED == SHARED - 1:
                acc_BM += scale_B[:, None] * part_BM
                if offsets is not None:
                    acc_BM += (
                        tl.load(factor_at(offsets, outs_B, group, num_outs, 1))[:, None] * total_M[None, :]
                    )
    return acc_BM


@triton.jit
def placed(outs, is_out, columns):
    """Where outputs go, if not side by side."""
    if columns is None:
        return outs
    else:
        return tl.load(columns + outs, mask=is_out, other=0)


@triton.jit
def put(total, outs, token, is_out, inside, bias, residual, out, num_columns):
    """Sums, plus the bias, then what they are added to, which it returns."""
    if bias is not None:
        total += tl.load(bias + outs, mask=is_out, other=0.0).to(tl.float32)
    at = token.to(tl.int64) * num_columns + outs
    if residual is not None:
        total += tl.load(residual + at, mask=inside, other=0.0)
    tl.store(out + at, total, mask=inside)
    return total


@triton.jit
def put_gated(acc_BM, outs, token, is_out, inside, bias, out, size, B: tl.constexpr, M: tl.constexpr):
    """Sums of gates, each followed by what it is the gate of."""
    gate, up = tl.split(acc_BM.reshape(B // 2, 2, M).permute(0, 2, 1))
    if bias is not None:
        gate += tl.load(bias + outs, mask=is_out, other=0.0).to(tl.float32)
        up += tl.load(bias + size + outs, mask=is_out, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * size + outs, gated(gate, up), mask=inside)


@triton.jit
def multiply_share(
    share, x_ND, codes, scales, offsets, row_scales, out, bias, residual, columns, squares, length_eps, length_parts,
    num_tokens, num_outs, num_ins, row_stride, scale_stride, num_steps, steps_each, all_steps, num_columns,
    DTYPE: tl.constexpr, CODE: tl.constexpr, ZERO: tl.constexpr, HALVES: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr, TOGETHER: tl.constexpr,
    WHOLE: tl.constexpr, PARTS: tl.constexpr, KNOWN: tl.constexpr, LENGTH: tl.constexpr,
    B: tl.constexpr, C: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """What `multiply` says, of this share."""
    tokens_M = tl.program_id(0) * M + tl.arange(0, M)
    there_M = tokens_M < num_tokens
    first = share * steps_each
    last = tl.minimum(first + steps_each, all_steps)
    columns_C = tl.arange(0, C)
    x_CM_at = x_ND + tokens_M.to(tl.int64)[None, :] * num_ins + columns_C[:, None]
    # A gate and what it is the gate of lie side by side in a tile.
    size, row_B = num_outs // PARTS, tl.arange(0, B)
    for tile in range(first // num_steps, (last - 1) // num_steps + 1):
        # Outputs past the last are computed from the last one's weights and not stored.
        outs_B = tl.minimum(tile * (B // PARTS) + row_B // PARTS, size - 1) + row_B % PARTS * size
        codes_at = codes + at_rows(outs_B, row_stride, TOGETHER, C)[:, None] + columns_C[None, :]
        acc_BM = tl.zeros((B, M), tl.float32)
        begin = tl.maximum(first - tile * num_steps, 0)
        end = tl.minimum(last - tile * num_steps, num_steps)
        for step in range(begin, end):
            if EVEN or HALVES == 2:
                codes_BC = tl.load(codes_at + step * (TOGETHER * C))
            else:
                codes_BC = tl.load(
                    codes_at + step * C, mask=(step * C + columns_C < num_ins)[None, :], other=0.0
                )
            acc_BM = add_step(
                acc_BM, x_CM_at + (0 if KNOWN else zero_after_previous_kernel(step)), codes_BC, scales, offsets,
                outs_B, there_M, step, num_outs, num_ins, scale_stride,
                DTYPE, CODE, ZERO, HALVES, GROUP, ROWS, EVEN, B, C, M,
            )  # fmt: skip
        if not KNOWN:
            wait_for_previous_kernel()
        if row_scales is not None:
            acc_BM *= tl.load(row_scales + outs_B)[:, None]
        if squares is not None:
            squares_PM = squares_of_tokens(squares, tokens_M, there_M, length_parts, LENGTH, M)
            acc_BM *= inverse_lengths(squares_PM, length_eps, LENGTH, M)
        place = tile * (B // PARTS) + tl.arange(0, B // PARTS)[:, None]
        token, inside = tokens_M[None, :], (place < size) & there_M[None, :]
        if PARTS == 2:
            put_gated(acc_BM, place, token, place < size, inside, bias, out, size, B, M)
        else:
            if not WHOLE:
                token += (share - tile * num_steps // steps_each) * num_tokens
            place, is_out = placed(place, place < size, columns), place < size
            put(acc_BM, place, token, is_out, inside, bias, residual, out, num_columns)


@triton.jit(do_not_specialize=["num_tokens", "num_steps", "steps_each", "all_steps", "length_parts"])
def multiply(
    x_ND, codes, scales, offsets, row_scales, out, bias, residual, columns, squares, length_eps, length_parts,
    num_tokens, num_outs, num_ins, row_stride, scale_stride, num_steps, steps_each, all_steps, num_columns,
    DTYPE: tl.constexpr, CODE: tl.constexpr, ZERO: tl.constexpr, HALVES: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr, TOGETHER: tl.constexpr,
    WHOLE: tl.constexpr, PARTS: tl.constexpr, KNOWN: tl.constexpr, LENGTH: tl.constexpr,
    B: tl.constexpr, C: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """A program's share: `steps_each` of the `all_steps`, of which a tile has `num_steps`, for M of the tokens. Leaves
    pieces of sums, or, WHOLE, what becomes of them, divided by the inputs' lengths where there are `squares`. Two PARTS
    are gates, then as many of what they are gates of. KNOWN inputs were there before the kernel before began, and it
    waited before it let this one start; and what it reads is in use until after this one, so it is not where this one
    writes. Then nothing has to be waited for, but by one program, for what comes later: the others make room for more
    of them."""
    launch_dependents()
    multiply_share(
        tl.program_id(1), x_ND, codes, scales, offsets, row_scales, out, bias, residual, columns,
        squares, length_eps, length_parts,
        num_tokens, num_outs, num_ins, row_stride, scale_stride, num_steps, steps_each, all_steps, num_columns,
        DTYPE, CODE, ZERO, HALVES, GROUP, ROWS, EVEN, TOGETHER, WHOLE, PARTS, KNOWN, LENGTH, B, C, M,
    )  # fmt: skip
    if KNOWN:
        last = tl.program_id(0) == tl.num_programs(0) - 1
        if last & (tl.program_id(1) == tl.num_programs(1) - 1):
            wait_for_previous_kernel()
