"""What follows a GEMM's sums, so that it costs no launch of its own: bias and residual, a partial norm, an MLP's
gate, the argmax. Where `gemm_kernel` leaves partial sums (split-K), an epilogue kernel adds these first, one after
the other.

Which outputs a program takes does not change how their partial sums are added.

Legend. N tokens and O outputs, of whose sums there are at most P partial ones; a program takes BLOCK outputs of a
token.
  partials_ptr [P, num_tokens, num_outs]; steps_per_tile, steps_per_split, BLOCK_N: how the GEMM was cut
  (triton_gemm.py); NUM_PARTIALS: P; EVEN_SPLITS: whether all tiles have so many.
  squares_ptr, norm_eps, num_squares, BLOCK_SQUARES: by what sums are still to be divided (ops/norm/triton.py).
  norm_weight_ptr, normed_ptr, normed_squares_ptr, num_normed_squares: the partial norm to be stored, if any.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.ops.argmax.triton import argmax_of_parts, block_argmax
from headlong.ops.linear.triton_gemm import load_columns, store_epilogue
from headlong.ops.linear.triton_weight import GemmWeight
from headlong.ops.norm.normed import Norm, PartialNorm
from headlong.ops.norm.triton import (
    inverse_norm,
    load_squares,
    norm_args,
    partial_norm_args,
    store_partial_norm,
)
from headlong.ops.silu_mul.triton import silu_gated
from headlong.ops.triton_launch import LAUNCH_OPTIONS, launch_dependents, wait_for_previous_kernel

BLOCK, PROMPT_BLOCK = 256, 1024
"""The outputs whose partial sums a program adds; and of many tokens, where programs for fewer would be too short."""
PROMPT_TOKENS = 512
"""The tokens that are many."""
ARGMAX_BLOCK = 1024
"""The outputs of which a program finds the largest."""
UNSPECIALIZED = ["num_tokens", "steps_per_tile", "steps_per_split", "num_squares"]
"""Sizes that no epilogue kernel is compiled for: one binary serves all."""
WHOLE_SUMS: dict[str, object] = {
    "num_tokens": 1,
    "num_outs": 1,
    "steps_per_tile": 1,
    "steps_per_split": 1,
    "BLOCK_N": 1,
    "NUM_PARTIALS": 1,
    "EVEN_SPLITS": True,
    **norm_args(None),
}
"""Arguments of kernels whose sums need not be added from partial ones."""


class PartialSums(NamedTuple):
    """Partial sums of a GEMM, for kernels that add them with `sum_partials` as they need them."""

    partials_PNO: Tensor
    args: dict[str, object]
    """How the GEMM was cut, as the kernels' arguments."""

    @classmethod
    def of(cls, weight: GemmWeight, partials_PNO: Tensor, partial_norm: PartialNorm | None) -> "PartialSums":
        """Makes them of a weight's sums, which are whole already where P is 1. `partial_norm` is what was multiplied,
        if it is one."""
        args = {
            "num_tokens": partials_PNO.shape[1],
            "num_outs": weight.num_outs,
            "steps_per_tile": weight.steps_per_tile,
            "steps_per_split": weight.config.steps_per_split,
            "BLOCK_N": weight.config.block_n,
            "NUM_PARTIALS": len(partials_PNO),
            "EVEN_SPLITS": len(partials_PNO) == 1 or weight.has_even_splits,
            **norm_args(partial_norm),
        }
        return cls(partials_PNO, args)

    @classmethod
    def whole(cls, sums_NO: Tensor) -> "PartialSums":
        """Sums of which nothing is left to add."""
        tokens, outs = sums_NO.shape
        return cls(sums_NO.contiguous(), {**WHOLE_SUMS, "num_tokens": tokens, "num_outs": outs})


@triton.jit
def sum_partials(
    partials_ptr, outs, mask, token, cut,
    BLOCK_N: tl.constexpr, NUM_PARTIALS: tl.constexpr, EVEN_SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK outputs of a token, still to be divided by its norm. `cut` is num_tokens, num_outs, steps_per_tile and
    steps_per_split. Where all tiles are split alike, nobody has to find out how many partial sums there are: that takes
    divisions, which compilers leave for after the wait."""
    num_tokens, num_outs, steps_per_tile, steps_per_split = cut
    num_partials = NUM_PARTIALS
    if not EVEN_SPLITS:
        first_step = outs // BLOCK_N * steps_per_tile
        num_partials = (
            (first_step + steps_per_tile - 1) // steps_per_split - first_step // steps_per_split + 1
        )
    total = tl.zeros((BLOCK,), tl.float32)
    for partial in tl.static_range(NUM_PARTIALS):
        ptrs = partials_ptr + (partial * num_tokens + token).to(tl.int64) * num_outs + outs
        exists = mask if EVEN_SPLITS else mask & (partial < num_partials)
        total += tl.load(ptrs, mask=exists, other=0.0)
    return total


@triton.jit(do_not_specialize=UNSPECIALIZED)
def epilogue_kernel(
    partials_ptr, bias_ptr, residual_ptr, columns_ptr, out_ptr, stride_out,
    norm_weight_ptr, normed_ptr, normed_squares_ptr, num_normed_squares,
    num_tokens, num_outs, steps_per_tile, steps_per_split, squares_ptr, norm_eps, num_squares,
    BLOCK_N: tl.constexpr, NUM_PARTIALS: tl.constexpr, EVEN_SPLITS: tl.constexpr, BLOCK_SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums, bias and residual, and the partial norm of the result where there is a norm's weight."""
    cut = (num_tokens, num_outs, steps_per_tile, steps_per_split)
    launch_dependents()
    outs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.program_id(1)
    mask = outs < num_outs
    norm_weight = tl.zeros((BLOCK,), tl.float32)
    if norm_weight_ptr is not None:
        norm_weight = tl.load(norm_weight_ptr + outs, mask=mask, other=0.0).to(tl.float32)
    columns = load_columns(columns_ptr, outs, mask)
    wait_for_previous_kernel()
    total = sum_partials(partials_ptr, outs, mask, token, cut, BLOCK_N, NUM_PARTIALS, EVEN_SPLITS, BLOCK)
    squares_S = load_squares(squares_ptr, token, num_squares, BLOCK_SQUARES)
    total *= inverse_norm(squares_ptr, squares_S, norm_eps, BLOCK_SQUARES)
    total = store_epilogue(total, columns, token, mask, mask, bias_ptr, residual_ptr, out_ptr, stride_out)
    if norm_weight_ptr is not None:
        store_partial_norm(
            total, outs, mask, token, tl.program_id(0), norm_weight, normed_ptr, normed_squares_ptr,
            num_outs, num_normed_squares, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALIZED)
def gated_epilogue_kernel(
    partials_ptr, bias_ptr, out_ptr,
    num_tokens, num_outs, steps_per_tile, steps_per_split, squares_ptr, norm_eps, num_squares,
    BLOCK_N: tl.constexpr, NUM_PARTIALS: tl.constexpr, EVEN_SPLITS: tl.constexpr, BLOCK_SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """silu(gate) · up: the first half of the outputs are gates of the second."""
    cut = (num_tokens, num_outs, steps_per_tile, steps_per_split)
    launch_dependents()
    num_gated = num_outs // 2
    outs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.program_id(1)
    mask = outs < num_gated
    wait_for_previous_kernel()
    gate = sum_partials(partials_ptr, outs, mask, token, cut, BLOCK_N, NUM_PARTIALS, EVEN_SPLITS, BLOCK)
    up = sum_partials(
        partials_ptr, outs + num_gated, mask, token, cut, BLOCK_N, NUM_PARTIALS, EVEN_SPLITS, BLOCK
    )
    squares_S = load_squares(squares_ptr, token, num_squares, BLOCK_SQUARES)
    inverse = inverse_norm(squares_ptr, squares_S, norm_eps, BLOCK_SQUARES)
    gate, up = gate * inverse, up * inverse
    if bias_ptr is not None:
        gate += tl.load(bias_ptr + outs, mask=mask, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + num_gated + outs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token.to(tl.int64) * num_gated + outs, silu_gated(gate, up), mask=mask)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def argmax_epilogue_kernel(
    partials_ptr, bias_ptr, maxima_ptr, indices_ptr,
    num_tokens, num_outs, steps_per_tile, steps_per_split, squares_ptr, norm_eps, num_squares,
    BLOCK_N: tl.constexpr, NUM_PARTIALS: tl.constexpr, EVEN_SPLITS: tl.constexpr, BLOCK_SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest of BLOCK outputs of a token, and which it is, for each part of the outputs."""
    cut = (num_tokens, num_outs, steps_per_tile, steps_per_split)
    launch_dependents()
    part, token, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    outs = part * BLOCK + tl.arange(0, BLOCK)
    mask = outs < num_outs
    wait_for_previous_kernel()
    total = sum_partials(partials_ptr, outs, mask, token, cut, BLOCK_N, NUM_PARTIALS, EVEN_SPLITS, BLOCK)
    squares_S = load_squares(squares_ptr, token, num_squares, BLOCK_SQUARES)
    total *= inverse_norm(squares_ptr, squares_S, norm_eps, BLOCK_SQUARES)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + outs, mask=mask, other=0.0).to(tl.float32)
    maximum, index = block_argmax(total, outs, mask)
    offset = token.to(tl.int64) * num_parts + part
    tl.store(maxima_ptr + offset, maximum)
    tl.store(indices_ptr + offset, index)


def gemm(
    weight: GemmWeight, x_ND: Tensor, block_m: int, bias: Tensor | None, residual_NO: Tensor | None, out_NO: Tensor,
    partial_norm: PartialNorm | None = None, then: Norm | None = None, then_partial: PartialNorm | None = None,
) -> None:  # fmt: skip
    """The product, the bias and the residual, into those columns of `out_NO` that are the weight's. `partial_norm` is
    what `x_ND` belongs to, if sums are still to be divided. What comes `then` is stored into `then_partial`, which only
    a split weight can do."""
    if weight.is_split:
        partials_PNO = weight.partial_sums(x_ND, block_m)
        epilogue(weight, partials_PNO, bias, residual_NO, out_NO, partial_norm, then, then_partial)
    else:
        weight.gemm(x_ND, block_m, bias, residual_NO, out_NO, partial_norm)


def epilogue(
    weight: GemmWeight, partials_PNO: Tensor, bias: Tensor | None, residual_NO: Tensor | None, out_NO: Tensor,
    partial_norm: PartialNorm | None, then: Norm | None, then_partial: PartialNorm | None,
) -> None:  # fmt: skip
    """What `gemm` makes of partial sums."""
    block = BLOCK if len(out_NO) < PROMPT_TOKENS else PROMPT_BLOCK
    epilogue_kernel[triton.cdiv(weight.num_outs, block), len(out_NO)](
        partials_PNO, bias, residual_NO, weight.columns_O, out_NO, out_NO.shape[1],
        *partial_norm_args(then, then_partial),
        **PartialSums.of(weight, partials_PNO, partial_norm).args, BLOCK=block, **LAUNCH_OPTIONS,
    )  # fmt: skip


def gated_gemm(
    weight: GemmWeight, x_ND: Tensor, block_m: int, bias: Tensor | None, out_NI: Tensor,
    partial_norm: PartialNorm | None = None,
) -> None:  # fmt: skip
    """silu(first half of the outputs) · second half, into `out_NI`."""
    if not weight.is_split:
        weight.gated_gemm(x_ND, block_m, bias, out_NI, partial_norm)
        return
    partials_PNO = weight.partial_sums(x_ND, block_m)
    gated_epilogue_kernel[triton.cdiv(out_NI.shape[1], BLOCK), len(out_NI)](
        partials_PNO, bias, out_NI,
        **PartialSums.of(weight, partials_PNO, partial_norm).args, BLOCK=BLOCK, **LAUNCH_OPTIONS,
    )  # fmt: skip


def argmax_gemm(weight: GemmWeight, x_ND: Tensor, block_m: int, bias: Tensor | None, found_N: Tensor) -> None:
    """Which output is the largest, for each token; of equal ones the first, and NaN wins."""
    partials_PNO = weight.partial_sums(x_ND, block_m)
    num_tokens, num_parts = partials_PNO.shape[1], triton.cdiv(weight.num_outs, ARGMAX_BLOCK)
    maxima_NP = partials_PNO.new_empty(num_tokens, num_parts)
    indices_NP = partials_PNO.new_empty(num_tokens, num_parts, dtype=torch.int32)
    argmax_epilogue_kernel[num_parts, num_tokens](
        partials_PNO, bias, maxima_NP, indices_NP,
        **PartialSums.of(weight, partials_PNO, None).args, BLOCK=ARGMAX_BLOCK, **LAUNCH_OPTIONS,
    )  # fmt: skip
    argmax_of_parts(maxima_NP, indices_NP, found_N)
