"""A mixture of experts on a GPU: only experts that tokens are routed to are read, and nothing is read back to the host.

All experts of a layer lie in one tensor for each GEMM; the shared one is among them where it is like them, as an expert
that every token is routed to. A token's bits depend on its own row alone.

N tokens, P pairs of a token and one of its experts, B blocks of pairs of one expert, E experts, R logits or
probabilities of a token.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from headlong.ops.linear.triton import WORKSPACE, TritonLinear
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
from headlong.ops.moe.weights import ExpertWeights, MoeWeights
from headlong.ops.norm.normed import Norm, Normed
from headlong.ops.norm.triton import empty_partial_norm, gemm_input, norm_args, partial_norm_args
from headlong.ops.silu_mul.activation import SILU, Activation
from headlong.ops.silu_mul.triton import constant_of
from headlong.ops.triton_launch import LAUNCH_OPTIONS
from headlong.quant.format import Weight

BLOCK_M, FEW_BLOCK_M = 16, 8
"""The pairs of one expert that a program multiplies at once; and the smaller number for 8-bit weights and few tokens,
if the device gives them the same bits. For other weights that is no quicker."""
ROUTED_TOKENS = 1
"""The tokens that a program routes; if these are all, it groups their pairs too."""
GROUPED_PAIRS = 16
"""The pairs that a program of the grouping sorts."""
SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
"""Ways to make scores of logits, by the numbers that the kernels have for them."""
COMBINED = 256
"""The outputs whose experts a program adds."""


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


class TritonExperts:
    """Routing, the routed experts and the residual; the shared expert too, where it is like the others."""

    name = "triton"

    def __init__(self, gate_up: StackedWeight, down: StackedWeight, weights: MoeWeights) -> None:
        self.gate_up, self.down = gate_up, down
        self.routing, self.is_gated = weights.routing, weights.is_gated
        self.num_experts, self.num_active = self.routing.num_experts, self.routing.num_active
        self.bias_E = None if weights.bias_E is None else weights.bias_E.float().contiguous()
        self.needs_shared = weights.shared is not None and len(gate_up.codes) == self.num_experts
        self.has_shared = len(gate_up.codes) > self.num_experts
        self.ranks = self.num_active + self.has_shared
        self._tokens_at_once = max(WORKSPACE // (self.ranks * max(gate_up.out_size, down.out_size)), 1)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that inputs are multiplied in."""
        return self.gate_up.dtype

    @classmethod
    def load(cls, weights: MoeWeights, dtype: torch.dtype) -> "TritonExperts | str":
        """Loads expert by expert, so that little is held twice; or returns the reason why another backend must serve.
        Packed weights are multiplied in `dtype`."""
        stacks: list[StackedWeight] = []
        first = None
        for expert in range(weights.routing.num_experts):
            loaded = _gemm_weights(weights.load(expert), dtype)
            if isinstance(loaded, str):
                return loaded
            if first is None:
                first = loaded
                shared = "" if weights.shared is None else _gemm_weights(weights.shared, dtype)
                joined = not isinstance(shared, str) and _alike(shared, first)
                count = weights.routing.num_experts + joined
                activation = weights.activation
                stacks = [
                    StackedWeight.like(part, count, gated=i == 0, activation=activation)
                    for i, part in enumerate(loaded)
                ]
                if joined:
                    _put(stacks, weights.routing.num_experts, shared)
            if not _alike(loaded, first):
                return "experts of one layer are stored differently"
            _put(stacks, expert, loaded)
        return cls(*stacks, weights)

    def __call__(
        self,
        given: Normed,
        logits_NR: Tensor,
        shared_ND: Tensor | None,
        to_ND: Tensor,
        then: Norm,
        chosen_NA: Tensor | None = None,
    ) -> tuple[Tensor, Normed]:
        """Adds the experts' outputs to `to_ND`, in float32, and applies the norm `then`. `logits_NR` are the router's,
        then the shared expert's gate, if it has one; `shared_ND` is what that expert gives, where it is not
        among the others."""
        assert (shared_ND is not None) == self.needs_shared
        x_ND, partial_norm = gemm_input(given)
        x_ND, to_ND = x_ND.to(self.gate_up.dtype).contiguous(), to_ND.contiguous()
        out_ND, then_partial = torch.empty_like(to_ND), empty_partial_norm(then, to_ND)
        for begin in range(0, len(x_ND), self._tokens_at_once):
            part = slice(begin, begin + self._tokens_at_once)
            x = x_ND[part] if partial_norm is None else replace(partial_norm.some(part), x_ND=x_ND[part])
            chosen = None if chosen_NA is None else chosen_NA[part].contiguous()
            probs_NR, y_PO = self._routed(x, logits_NR[part].contiguous(), chosen)
            kernels.combine_experts_kernel[triton.cdiv(self.down.out_size, COMBINED), len(probs_NR)](
                y_PO, probs_NR, None if shared_ND is None else shared_ND[part], to_ND[part], out_ND[part],
                *partial_norm_args(then, None if then_partial is None else then_partial.some(part)),
                self.down.out_size, A=self.num_active, RANKS=self.ranks, BLOCK=COMBINED, **LAUNCH_OPTIONS,
            )  # fmt: skip
        return out_ND, then(out_ND) if then_partial is None else then_partial

    def _routed(self, given: Normed, logits_NR: Tensor, chosen_NA: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the probabilities of each token's experts, and what each pair's expert gives."""
        _, probs_NR, blocks_B3, pairs_P = self.route(logits_NR, chosen_NA)
        up_m, down_m = (block_m_for(len(logits_NR), stack) for stack in (self.gate_up, self.down))
        mid_PI = self.gate_up.grouped_gemm(
            given, blocks_B3, pairs_P, self.ranks, self.down.dtype, block_m=up_m
        )
        y_PO = self.down.grouped_gemm(
            mid_PI, blocks_B3, pairs_P, 1, torch.float32, blocks_ready=True, block_m=down_m
        )
        return probs_NR, y_PO

    def route(
        self, logits_NR: Tensor, chosen_NA: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the expert of each pair; the probabilities of each token's experts, the shared one's last; the
        blocks; and the pairs sorted by expert."""
        tokens, active, routing = len(logits_NR), self.num_active, self.routing
        experts_P = logits_NR.new_empty(tokens * self.ranks, dtype=torch.int32)
        probs_NR = logits_NR.new_empty((tokens, active + 1), dtype=torch.float32)
        together = tokens <= ROUTED_TOKENS and self._is_sparse(len(experts_P))
        blocks_B3, pairs_P = self._empty_blocks(experts_P) if together else (None, None)
        kernels.route_kernel[(triton.cdiv(tokens, ROUTED_TOKENS),)](
            logits_NR, self.bias_E, chosen_NA, experts_P, probs_NR, pairs_P, blocks_B3, tokens,
            E=self.num_experts, A=active, RANKS=self.ranks, NORMALISE=routing.normalise,
            SCORES=SCORES.index(routing.scores), SCALE=routing.scale,
            GROUPS=routing.num_groups, KEPT=routing.kept_groups, GATED=int(self.is_gated),
            BLOCK_M=BLOCK_M, BLOCK_T=ROUTED_TOKENS, BLOCK_R=triton.next_power_of_2(active + 1),
            BLOCK_E=triton.next_power_of_2(self.num_experts), num_warps=1, **LAUNCH_OPTIONS,
        )  # fmt: skip
        if blocks_B3 is None or pairs_P is None:
            blocks_B3, pairs_P = self.group(experts_P)
        return experts_P, probs_NR, blocks_B3, pairs_P

    def group(self, experts_P: Tensor) -> tuple[Tensor, Tensor]:
        """Returns blocks, each an expert, its first sorted pair and their number; and the pairs, sorted by expert."""
        count = len(experts_P)
        blocks_B3, pairs_P = self._empty_blocks(experts_P)
        kernels.group_kernel[(triton.cdiv(count, GROUPED_PAIRS),)](
            experts_P, pairs_P, blocks_B3, count,
            SPARSE=self._is_sparse(count), BLOCK_M=BLOCK_M, BLOCK_P=GROUPED_PAIRS, BLOCK=128 if count <= 128 else 1024,
            **LAUNCH_OPTIONS,
        )  # fmt: skip
        return blocks_B3, pairs_P

    def _most_blocks(self, num_pairs: int) -> int:
        """The most blocks that there can be, if they are numbered by expert."""
        return (num_pairs - 1) // BLOCK_M + self.num_experts + self.has_shared

    def _is_sparse(self, num_pairs: int) -> bool:
        """Whether every pair has a block of its own, because they are few."""
        return num_pairs <= self._most_blocks(num_pairs)

    def _empty_blocks(self, experts_P: Tensor) -> tuple[Tensor, Tensor]:
        """Makes tensors for blocks, and for sorted pairs."""
        count = len(experts_P)
        if self._is_sparse(count):
            blocks_B3 = experts_P.new_empty((count, 3))
        else:
            blocks_B3 = experts_P.new_zeros((self._most_blocks(count), 3))
        return blocks_B3, torch.empty_like(experts_P)


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


def _gemm_weights(weights: ExpertWeights, dtype: torch.dtype) -> list[Loaded] | str:
    """Returns the weight of gate and up, and that of down; or the reason why there are none."""
    loaded = []
    for parts, bias_O in ((weights.gate_up, weights.gate_up_bias), ([weights.down], weights.down_bias)):
        weight = _gemm_weight(parts, dtype)
        if isinstance(weight, str):
            return weight
        loaded.append(Loaded(weight, None if bias_O is None else bias_O.to(weight.codes.device)))
    return loaded


def _gemm_weight(weights: Sequence[Weight], dtype: torch.dtype) -> GemmWeight | str:
    for weight in weights:
        if (reason := TritonLinear.supports(weight)) is not None:
            return reason
    repacked = TritonLinear(weights, dtype=dtype).weights
    return repacked[0] if len(repacked) == 1 else "gate and up of an expert are stored differently"


def _alike(some: Sequence[Loaded], others: Sequence[Loaded]) -> bool:
    return all(
        a.layout == b.layout
        and (a.num_outs, a.num_ins) == (b.num_outs, b.num_ins)
        and (a_bias is None) == (b_bias is None)
        for (a, a_bias), (b, b_bias) in zip(some, others, strict=True)
    )


def _put(stacks: Sequence[StackedWeight], expert: int, loaded: Sequence[Loaded]) -> None:
    for stack, one in zip(stacks, loaded, strict=True):
        stack.put(expert, one)
