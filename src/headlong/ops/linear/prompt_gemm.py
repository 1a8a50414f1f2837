"""The GEMM of many tokens: whether the kernel for Hopper (cuda_gemm.py) multiplies a weight by so many of them, and how
many tokens its blocks take.

It is compiled and tried when it is first wanted: only where it gives a token the bits of the split-K GEMM of few tokens
may it depend on the number of tokens. N tokens, O outputs, I gated outputs, D inputs.
"""

# pyright: reportCallIssue=false, reportArgumentType=false

import logging
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.ops.cuda.driver import DriverError
from headlong.ops.cuda.nvrtc import CompileError
from headlong.ops.linear.cuda_gemm import BLOCK_OUTS, SPLIT_TILE, Variant, launch
from headlong.ops.linear.triton_block_m import NUM_INS, NUM_OUTS, REFERENCE_BLOCK_M, random_weight
from headlong.ops.linear.triton_split_k import gated_gemm, gemm
from headlong.ops.linear.triton_unpack import E4M3, FLOAT
from headlong.ops.linear.triton_weight import GemmWeight, WeightLayout, multiprocessors_of
from headlong.ops.norm.normed import PartialNorm
from headlong.ops.norm.triton import inverse_norm, load_squares, norm_args
from headlong.ops.triton_launch import CAPABILITY, LAUNCH_OPTIONS, launch_dependents_and_wait

log = logging.getLogger(__name__)
LEAST_TOKENS = 256
"""The fewest tokens that it is quicker for: a decode step of 64 rows with three drafts each, too."""
WIDTHS = {FLOAT: {128: 1.155, 160: 1.084, 192: 1.0}, E4M3: {96: 1.06, 112: 1.0}}
"""The tokens that a block may take, and the time of one of them, relative to the others: measured on an H200."""
TRIED_TOKENS = 200
"""Tokens of the trial: more than a block takes, and no multiple of what it takes."""


def serves(weight: GemmWeight, num_tokens: int, *, gated: torch.dtype | None = None) -> bool:
    """Whether the kernel multiplies this weight by so many tokens; and by `gated` makes silu(gate) · up of the sums, in
    this dtype."""
    if CAPABILITY != (9, 0) or num_tokens < LEAST_TOKENS or not _fits(weight):
        return False
    if gated is not None and (
        weight.num_outs % (2 * SPLIT_TILE) or gated not in (torch.bfloat16, torch.float32)
    ):
        return False
    variant = _variant(weight, num_tokens, gated)
    if _blocks(weight, num_tokens, variant) < multiprocessors_of(weight.codes.device) // 2:
        return False
    return _gives_same_bits(weight.layout, weight.codes.device, variant)


def sums(weight: GemmWeight, x_ND: Tensor) -> Tensor:
    """All sums, [N, O], in float32."""
    out_NO = x_ND.new_empty((len(x_ND), weight.num_outs), dtype=torch.float32)
    launch(weight, x_ND, out_NO, None, _variant(weight, len(x_ND), None))
    return out_NO


def gated(weight: GemmWeight, x_ND: Tensor, out_NI: Tensor, partial_norm: PartialNorm | None) -> None:
    """silu(first half of the outputs) · second half, into `out_NI`. `partial_norm` is what `x_ND` belongs to, if sums
    are still to be divided."""
    inverse_norms_N = None if partial_norm is None else inverse_norms(partial_norm)
    launch(weight, x_ND, out_NI, inverse_norms_N, _variant(weight, len(x_ND), out_NI.dtype))


def inverse_norms(partial_norm: PartialNorm) -> Tensor:
    """1 / |x| of each token, [N]."""
    out_N = partial_norm.squares_NP.new_empty(len(partial_norm.squares_NP))
    inverse_norms_kernel[(len(out_N),)](
        out_ptr=out_N, **norm_args(partial_norm), num_warps=1, **LAUNCH_OPTIONS
    )
    return out_N


@triton.jit(do_not_specialize=["num_squares"])
def inverse_norms_kernel(squares_ptr, norm_eps, num_squares, out_ptr, BLOCK_SQUARES: tl.constexpr):
    """Stores 1 / |x| of a token."""
    launch_dependents_and_wait()
    token = tl.program_id(0)
    squares_S = load_squares(squares_ptr, token, num_squares, BLOCK_SQUARES)
    inverse = inverse_norm(squares_ptr, squares_S, norm_eps, BLOCK_SQUARES)
    tl.store(out_ptr + token + tl.arange(0, 1), inverse)


def _fits(weight: GemmWeight) -> bool:
    return weight.is_split and knows(weight.layout, weight.dtype, weight.num_ins, weight.scales)


def knows(layout: WeightLayout, dtype: torch.dtype, num_ins: int, scales: Tensor | None) -> bool:
    """Whether the kernel knows such weights."""
    if dtype != torch.bfloat16 or num_ins % 8:
        return False
    if layout.encoding == FLOAT:
        return layout.bits == 16
    known = scales is None or (scales.dtype == torch.float32 and layout.group_size == 128)
    return layout.encoding == E4M3 and known and not layout.has_offsets


def _variant(weight: GemmWeight, num_tokens: int, gated: torch.dtype | None) -> Variant:
    """The kernel for so many tokens: the one whose blocks are done first."""
    codes = weight.layout.encoding != FLOAT
    made = [
        Variant(
            width, gated is not None, codes, weight.scales is not None, 16 if gated == torch.bfloat16 else 32
        )
        for width in WIDTHS[weight.layout.encoding]
    ]
    slots, times = multiprocessors_of(weight.codes.device), WIDTHS[weight.layout.encoding]

    def time(variant: Variant) -> float:
        width = variant.block_tokens
        return triton.cdiv(_blocks(weight, num_tokens, variant), slots) * width * times[width]

    return min(made, key=time)


def _blocks(weight: GemmWeight, num_tokens: int, variant: Variant) -> int:
    """The tiles that blocks take."""
    return triton.cdiv(num_tokens, variant.block_tokens) * triton.cdiv(weight.num_outs, BLOCK_OUTS)


@cache
def _gives_same_bits(layout: WeightLayout, device: torch.device, variant: Variant) -> bool:
    """Tries it."""
    generator = torch.Generator(device).manual_seed(0)
    weight = random_weight(layout, torch.bfloat16, generator)
    x_ND = torch.randn(TRIED_TOKENS, NUM_INS, generator=generator, device=device).to(torch.bfloat16)
    outs, dtype = NUM_OUTS // (1 + variant.gated), torch.bfloat16 if variant.out_bits == 16 else torch.float32
    found, expected = (torch.full((len(x_ND), outs), torch.nan, device=device, dtype=dtype) for _ in range(2))
    try:
        launch(weight, x_ND, found, None, variant)
    except (CompileError, DriverError) as error:
        log.warning("prompts are read by Triton's kernels, more slowly: %s", str(error)[:500])
        return False
    if variant.gated:
        gated_gemm(weight, x_ND, REFERENCE_BLOCK_M, None, expected)
    else:
        gemm(weight, x_ND, REFERENCE_BLOCK_M, None, None, expected)
    same = torch.equal(found, expected)
    if not same:
        log.warning("prompts are read by Triton's kernels: %s has other bits on %s", variant, device)
    return same
