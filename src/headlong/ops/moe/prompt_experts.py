"""The experts of many tokens on Hopper GPUs: the grouped GEMM in CUDA C++ (ops/cuda/prompt_gemm.cu), where it knows the
weights and gives a token the bits of Triton's, which multiplies few.

Pairs of a token and one of its experts are sorted by expert, and the inputs are brought into that order. What comes of
gate and up stays in it, and down puts its results where the pairs were. P pairs, E experts, T tiles of up to
`block_tokens` pairs of one expert, I gated outputs, O outputs, D inputs.
"""

# pyright: reportCallIssue=false, reportArgumentType=false

import logging
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.ops.cuda.driver import DriverError
from headlong.ops.cuda.nvrtc import CompileError
from headlong.ops.linear.cuda_gemm import BLOCK_OUTS, Shape, Variant, token_map, weight_map
from headlong.ops.linear.prompt_gemm import inverse_norms, knows
from headlong.ops.linear.triton_block_m import random_weight
from headlong.ops.linear.triton_split_k import PROMPT_TOKENS
from headlong.ops.linear.triton_weight import WeightLayout, multiprocessors_of
from headlong.ops.moe.stacked_weight import BLOCK_M, Loaded, StackedWeight
from headlong.ops.norm.normed import Normed
from headlong.ops.norm.triton import gemm_input
from headlong.ops.silu_mul.activation import SILU
from headlong.ops.triton_launch import CAPABILITY, LAUNCH_OPTIONS, launch_dependents_and_wait

log = logging.getLogger(__name__)
WIDTHS = {16: {64: 1.3, 128: 1.05, 192: 1.0, 256: 1.0}, 8: {64: 1.25, 96: 1.1, 128: 1.0}}
"""The pairs that a block may take, and the time of one of them relative to the others, by the bits of weights."""


class Sorted(NamedTuple):
    """Pairs by expert."""

    pairs_P: Tensor
    tiles_T3: Tensor
    """The expert, the first sorted pair and the number of pairs of each tile; empty tiles have none."""


def serves(gate_up: StackedWeight, down: StackedWeight, num_tokens: int, num_pairs: int) -> bool:
    """Whether the kernel multiplies these experts' weights for so many tokens, with so many pairs."""
    if CAPABILITY != (9, 0) or num_tokens < PROMPT_TOKENS or down.dtype != torch.bfloat16:
        return False
    width = _width(gate_up, num_pairs)
    return all(
        _fits(stack) and _gives_same_bits(stack.layout, stack.codes.device, _variant(stack, width))
        for stack in (gate_up, down)
    )


def multiply(
    gate_up: StackedWeight, down: StackedWeight, given: Normed, experts_P: Tensor, ranks: int
) -> Tensor:
    """Computes what each pair's expert gives, [P, O] in float32; a token has `ranks` pairs, one after the other."""
    x_ND, partial_norm = gemm_input(given)
    count = len(gate_up.codes)
    width = _width(gate_up, len(experts_P))
    pairs_P, tiles_T3 = sort_pairs(experts_P, count, width)
    tokens_P = pairs_P // ranks
    inverse_norms_P = None if partial_norm is None else inverse_norms(partial_norm).index_select(0, tokens_P)
    mid_PI = x_ND.new_empty((len(pairs_P), gate_up.out_size), dtype=down.dtype)
    launch(gate_up, x_ND.index_select(0, tokens_P), mid_PI, tiles_T3, inverse_norms_P, None, width)
    y_PO = x_ND.new_empty((len(pairs_P), down.out_size), dtype=torch.float32)
    launch(down, mid_PI, y_PO, tiles_T3, None, pairs_P, width)
    return y_PO


def sort_pairs(experts_P: Tensor, num_experts: int, width: int) -> Sorted:
    """Sorts pairs by expert, those of one expert in their order, and cuts them into tiles."""
    sorted_P, pairs_P = experts_P.sort(stable=True)
    starts_E = torch.searchsorted(
        sorted_P, torch.arange(num_experts + 1, dtype=torch.int32, device=sorted_P.device), out_int32=True
    )
    most = len(experts_P) // width + num_experts
    tiles_T3 = torch.zeros((most, 3), dtype=torch.int32, device=sorted_P.device)
    tiles_kernel[(1,)](
        starts_E,
        tiles_T3,
        num_experts,
        WIDTH=width,
        BLOCK_E=triton.next_power_of_2(num_experts),
        **LAUNCH_OPTIONS,
    )
    return Sorted(pairs_P.to(torch.int32), tiles_T3)


@triton.jit
def tiles_kernel(starts_ptr, tiles_ptr, num_experts, WIDTH: tl.constexpr, BLOCK_E: tl.constexpr):
    """Stores the tiles of each expert's pairs, which begin at `starts`, one expert's behind another's."""
    launch_dependents_and_wait()
    expert = tl.arange(0, BLOCK_E)
    mask = expert < num_experts
    start = tl.load(starts_ptr + expert, mask=mask, other=0)
    end = tl.load(starts_ptr + expert + 1, mask=mask, other=0)
    tiles = (end - start + WIDTH - 1) // WIDTH
    first_tile = tl.cumsum(tiles, 0) - tiles
    for tile in range(tl.max(tiles, 0)):
        first, ptrs = start + tile * WIDTH, tiles_ptr + 3 * (first_tile + tile)
        exists = tile < tiles
        tl.store(ptrs, expert, mask=exists)
        tl.store(ptrs + 1, first, mask=exists)
        tl.store(ptrs + 2, tl.minimum(end - first, WIDTH), mask=exists)


def launch(
    stack: StackedWeight, x_PD: Tensor, out: Tensor, tiles_T3: Tensor, inverse_norms_P: Tensor | None,
    out_rows_P: Tensor | None, width: int,
) -> None:  # fmt: skip
    """Multiplies sorted inputs by their experts' weights. Row p of the result is row `out_rows[p]` of `out`, or p."""
    variant, scales = _variant(stack, width), stack.scales
    shape = Shape(
        num_tokens=len(x_PD),
        num_outs=stack.out_size,
        steps=triton.cdiv(stack.num_ins, variant.step_columns),
        token_tiles=len(tiles_T3),
        out_tiles=stack.out_size // variant.block_outs,
        scale_rows=stack.layout.scale_rows,
        stride_scales=0 if scales is None else scales.stride(1),
        stride_expert_scales=0 if scales is None else scales.stride(0),
    )
    maps = (weight_map(stack.codes, stack.num_ins, stack.out_size, variant), token_map(x_PD, variant))
    blocks = min(multiprocessors_of(x_PD.device), shape.token_tiles * shape.out_tiles)
    factors = (scales, stack.row_scales_EO, inverse_norms_P)
    variant.kernel()(blocks, (*maps, shape, tiles_T3, *factors, out_rows_P, out))


def _variant(stack: StackedWeight, width: int) -> Variant:
    codes, grouped = stack.layout.bits == 8, stack.layout.group_size > 0
    return Variant(width, stack.gated, codes, grouped, 16 if stack.gated else 32, experts=True)


def _width(stack: StackedWeight, num_pairs: int) -> int:
    """How many pairs of an expert a block takes: those with which a mean expert's are done first."""
    mean, widths = num_pairs / len(stack.codes), WIDTHS[stack.layout.bits]
    return min(widths, key=lambda width: (mean / width + 0.5) * width * widths[width])


def _fits(stack: StackedWeight) -> bool:
    """Whether the kernel knows such weights."""
    if stack.bias_EO is not None or (stack.gated and stack.activation != SILU):
        return False
    return knows(stack.layout, stack.dtype, stack.num_ins, stack.scales) and not stack.num_outs % BLOCK_OUTS


@cache
def _gives_same_bits(layout: WeightLayout, device: torch.device, variant: Variant) -> bool:
    """Tries it with two experts, of which the second has a few pairs and the first more than a block takes."""
    generator = torch.Generator(device).manual_seed(0)
    weights = [random_weight(layout, torch.bfloat16, generator) for _ in range(2)]
    stack = StackedWeight.like(Loaded(weights[0]), 2, gated=variant.gated)
    for expert, weight in enumerate(weights):
        stack.put(expert, Loaded(weight))
    count = variant.block_tokens + 40
    x_PD = torch.randn(count, stack.num_ins, generator=generator, device=device).to(torch.bfloat16)
    experts_P = (torch.arange(count, device=device) >= count - 7).int()
    pairs_P, tiles_T3 = sort_pairs(experts_P, 2, variant.block_tokens)
    dtype = torch.bfloat16 if variant.gated else torch.float32
    found = torch.full((count, stack.out_size), torch.nan, dtype=dtype, device=device)
    try:
        launch(stack, x_PD, found, tiles_T3, None, pairs_P, variant.block_tokens)
    except (CompileError, DriverError) as error:
        log.warning(
            "experts of prompts are multiplied by Triton's kernels, more slowly: %s", str(error)[:500]
        )
        return False
    starts = [*range(0, count - 7, BLOCK_M), count - 7, count]
    blocks = [[int(a >= count - 7), a, b - a] for a, b in pairwise(starts)]
    blocks_B3 = torch.tensor(blocks, dtype=torch.int32, device=device)
    same = torch.equal(found, stack.grouped_gemm(x_PD, blocks_B3, pairs_P, 1, dtype))
    if not same:
        log.warning("experts of prompts are multiplied by Triton's kernels: %s has other bits", variant)
    return same
