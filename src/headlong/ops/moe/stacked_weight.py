"""One weight of every expert of a layer in one tensor, and the grouped GEMM that multiplies it on a GPU: each pair of a
token and one of its experts by the weight of that expert.

P pairs, B blocks of pairs of one expert, E experts, O outputs, G groups of columns.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from headlong.ops.linear.triton_block_m import random_weight
from headlong.ops.linear.triton_unpack import INTERPRETED
from headlong.ops.linear.triton_weight import (
    DTYPES,
    GemmWeight,
    WeightLayout,
    codes_per_word,
    columns_at_once,
)
from headlong.ops.moe import triton_kernels as kernels
from headlong.ops.norm.normed import Normed
from headlong.ops.norm.triton import gemm_input, norm_args
from headlong.ops.silu_mul.activation import SILU, Activation
from headlong.ops.silu_mul.triton import constant_of
from headlong.ops.triton_launch import LAUNCH_OPTIONS

BLOCK_M, FEW_BLOCK_M = 16, 8
"""The pairs of one expert that a program multiplies at once; and the smaller number for 8-bit weights and few tokens,
if the device gives them the same bits. For other weights that is no quicker."""


class GroupedGemmConfig(NamedTuple):
    """How the grouped GEMM of experts' weights is tiled and launched."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def grouped_gemm_config(layout: WeightLayout, *, gated: bool) -> GroupedGemmConfig:
    """Returns the quickest of the configurations that were measured, from one token to sixty-four."""
    columns = columns_at_once(layout.bits)
    if layout.bits == 8 and gated:
        return GroupedGemmConfig(32, columns, num_warps=2, num_stages=4)
    return GroupedGemmConfig(64, columns, num_warps=4, num_stages=4 if layout.bits == 16 and gated else 3)


class Loaded(NamedTuple):
    """One weight of one expert, and what is added to its outputs."""

    weight: GemmWeight
    bias_O: Tensor | None = None


@dataclass(frozen=True, eq=False)
class StackedWeight:
    """One weight of every expert of a layer, in one tensor."""

    layout: WeightLayout
    dtype: torch.dtype
    """The dtype that is multiplied in."""
    num_outs: int
    num_ins: int
    config: GroupedGemmConfig
    gated: bool
    codes: Tensor
    """The codes of each expert, laid out as in a `GemmWeight`."""
    scales: Tensor | None
    """The scales of each expert, laid out as in a `GemmWeight`."""
    offsets_EGO: Tensor | None
    row_scales_EO: Tensor | None
    bias_EO: Tensor | None
    activation: Activation

    @classmethod
    def like(
        cls, one: "Loaded", count: int, *, gated: bool, activation: Activation = SILU
    ) -> "StackedWeight":
        """Makes uninitialised tensors for so many experts whose weights are like this one."""
        weight, bias_O = one
        config = grouped_gemm_config(weight.layout, gated=gated)
        tensors = [None if part is None else part.new_empty(count, *part.shape) for part in _tensors(weight)]
        bias_EO = None if bias_O is None else bias_O.new_empty(count, *bias_O.shape)
        sizes = (weight.num_outs, weight.num_ins)
        return cls(weight.layout, weight.dtype, *sizes, config, gated, *tensors, bias_EO, activation)

    def put(self, expert: int, one: "Loaded") -> None:
        """Copies an expert's weight to its place."""
        stacked = (self.codes, self.scales, self.offsets_EGO, self.row_scales_EO, self.bias_EO)
        for tensor, part in zip(stacked, (*_tensors(one.weight), one.bias_O), strict=True):
            if tensor is not None and part is not None:
                tensor[expert].copy_(part)

    @property
    def parts(self) -> int:
        """Returns 2 where the outputs are gates, then as many ups; else 1."""
        return 2 if self.gated else 1

    @property
    def out_size(self) -> int:
        """Numbers that come out for each pair."""
        return self.num_outs // self.parts

    def grouped_gemm(
        self, given: Normed, blocks_B3: Tensor, pairs_P: Tensor, pairs_per_input: int, dtype: torch.dtype, *,
        blocks_ready: bool = False, block_m: int = BLOCK_M,
    ) -> Tensor:  # fmt: skip
        """Computes what each pair's expert gives, in `dtype`; `pairs_per_input` pairs share one row of the inputs.
        `blocks_ready` says that what was launched last is another grouped GEMM of these blocks, `block_m` how many
        pairs a block can have."""
        layout, config, codes, scales = self.layout, self.config, self.codes, self.scales
        x, partial_norm = gemm_input(given)
        out = x.new_empty((len(pairs_P), self.out_size), dtype=dtype)
        step = config.block_k * codes_per_word(layout.bits)
        grid = (triton.cdiv(self.out_size, config.block_n // self.parts), len(blocks_B3))
        kernels.grouped_gemm_kernel[grid](
            x, codes, scales, self.offsets_EGO, self.row_scales_EO, self.bias_EO, blocks_B3, pairs_P, out,
            num_outs=self.num_outs, num_ins=self.num_ins, stride_codes=layout.words(self.num_ins),
            stride_expert_codes=codes.stride(0), stride_expert_scales=0 if scales is None else scales.stride(0),
            stride_scales=0 if scales is None else scales.stride(1), num_steps=triton.cdiv(self.num_ins, step),
            DTYPE=DTYPES[self.dtype], LAYOUT=layout.code_layout, EVEN_K=self.num_ins % step == 0,
            PAIRS_PER_INPUT=pairs_per_input, PARTS=self.parts, BLOCKS_READY=blocks_ready, ONE_INPUT=len(x) == 1,
            ACTIVATION=constant_of(self.activation), **norm_args(partial_norm), BLOCK_N=config.block_n,
            BLOCK_K=config.block_k, BLOCK_M=block_m, num_warps=config.num_warps, num_stages=config.num_stages,
            **LAUNCH_OPTIONS,
        )  # fmt: skip
        return out


def block_m_for(num_tokens: int, stack: StackedWeight) -> int:
    """Returns how many pairs of an expert are multiplied at once: an expert has no more than there are tokens."""
    if num_tokens > FEW_BLOCK_M or stack.layout.bits != 8 or INTERPRETED.value:
        return BLOCK_M
    same = _few_give_same_bits(stack.layout, stack.dtype, stack.codes.device, gated=stack.gated)
    return FEW_BLOCK_M if same else BLOCK_M


@cache
def _few_give_same_bits(
    layout: WeightLayout, dtype: torch.dtype, device: torch.device, *, gated: bool
) -> bool:
    """Whether few pairs at once have the bits of many. Nothing promises that, so it is tried once for each layout."""
    generator = torch.Generator(device).manual_seed(0)
    weight = random_weight(layout, dtype, generator)
    stack = StackedWeight.like(Loaded(weight), 1, gated=gated)
    stack.put(0, Loaded(weight))
    x_ND = torch.randn(FEW_BLOCK_M, weight.num_ins, generator=generator, device=device).to(dtype)
    blocks_B3 = torch.tensor([[0, 0, FEW_BLOCK_M]], dtype=torch.int32, device=device)
    pairs_P = torch.arange(FEW_BLOCK_M, dtype=torch.int32, device=device)
    few, more = (
        stack.grouped_gemm(x_ND, blocks_B3, pairs_P, 1, torch.float32, block_m=block_m)
        for block_m in (FEW_BLOCK_M, BLOCK_M)
    )
    return torch.equal(few, more)


def _tensors(weight: GemmWeight) -> tuple[Tensor | None, ...]:
    return weight.codes, weight.scales, weight.offsets_GO, weight.row_scales_O
