"""Experts on a GPU: only those that tokens are routed to are read, and nothing is asked on the host.

All experts of a layer lie in one tensor for each product; the shared one is among them where it is like them, as an
expert that every token is routed to. A token's bits depend on its own row alone.
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
from headlong.ops.linear.triton_block_m import some_matrix
from headlong.ops.linear.triton_unpack import INTERPRETED
from headlong.ops.linear.triton_weight import DTYPES, Kind, Matrix, columns_at_once, halves
from headlong.ops.moe import triton_kernels as kernels
from headlong.ops.moe.weights import ExpertWeights, MoeWeights
from headlong.ops.norm.normed import Norm, Normed
from headlong.ops.norm.triton import half_normed_room, length_args, room_args, to_multiply
from headlong.ops.triton_launch import LAUNCH_OPTIONS
from headlong.quant.format import Weight

PAIRS, FEW_PAIRS = 16, 8
"""Of one expert, that a program multiplies at once; and of weights of 8 bits where there are so few tokens, if the
device gives them the same bits. Of others that is no quicker."""
ROUTED_TOKENS = 1
"""That a program routes; if these are all, it groups them too."""
OWN_PAIRS = 16
"""That a program of the grouping finds a place for."""
WIDTH = 256
"""Outputs whose experts a program adds."""


class Plan(NamedTuple):
    """How an expert's matrix is cut."""

    block_outs: int
    block_ins: int
    num_warps: int
    num_stages: int


def plan_shape(kind: Kind, *, gated: bool) -> Plan:
    """The quickest of those that were measured, from one token to sixty-four."""
    columns = columns_at_once(kind.bits)
    if kind.bits == 8 and gated:
        return Plan(32, columns, num_warps=2, num_stages=4)
    return Plan(64, columns, num_warps=4, num_stages=4 if kind.bits == 16 and gated else 3)


@dataclass(frozen=True, eq=False)
class Stack:
    """The same matrix of all experts, in one."""

    kind: Kind
    dtype: torch.dtype
    """What is multiplied in."""
    outs: int
    ins: int
    plan: Plan
    gated: bool
    codes: Tensor
    """Of each expert, as in a `Matrix`."""
    scales: Tensor | None
    """Of each expert, as in a `Matrix`."""
    offsets_EGO: Tensor | None
    row_scales_EO: Tensor | None

    @classmethod
    def like(cls, matrix: Matrix, count: int, *, gated: bool) -> "Stack":
        """Room for so many."""
        plan = plan_shape(matrix.kind, gated=gated)
        parts = [None if part is None else part.new_empty(count, *part.shape) for part in _parts(matrix)]
        return cls(matrix.kind, matrix.dtype, matrix.outs, matrix.ins, plan, gated, *parts)

    def put(self, expert: int, matrix: Matrix) -> None:
        rooms = (self.codes, self.scales, self.offsets_EGO, self.row_scales_EO)
        for room, part in zip(rooms, _parts(matrix), strict=True):
            if room is not None and part is not None:
                room[expert].copy_(part)

    @property
    def parts(self) -> int:
        return 2 if self.gated else 1

    @property
    def out_size(self) -> int:
        return self.outs // self.parts

    def multiply(
        self, given: Normed, places: Tensor, pairs_P: Tensor, sharing: int, dtype: torch.dtype, *,
        known: bool = False, width: int = PAIRS,
    ) -> Tensor:  # fmt: skip
        """For each pair, in `dtype`; `sharing` pairs have one row of what is given. `known` says that what was launched
        last is another such product of these places, `width` how many pairs of a place there can be."""
        kind, plan, codes, scales = self.kind, self.plan, self.codes, self.scales
        x, half = to_multiply(given)
        out = x.new_empty((len(pairs_P), self.out_size), dtype=dtype)
        step = plan.block_ins * halves(kind.bits)
        kernels.multiply[triton.cdiv(self.out_size, plan.block_outs // self.parts), len(places)](
            x, codes, scales, self.offsets_EGO, self.row_scales_EO, places, pairs_P, out,
            num_outs=self.outs, num_ins=self.ins, row_stride=kind.words(self.ins), expert_stride=codes.stride(0),
            expert_scales=0 if scales is None else scales.stride(0),
            scale_stride=0 if scales is None else scales.stride(1), num_steps=triton.cdiv(self.ins, step),
            DTYPE=DTYPES[self.dtype], CODE=kind.code, ZERO=kind.zero, HALVES=halves(kind.bits),
            GROUP=kind.group, ROWS=kind.rows, EVEN=self.ins % step == 0, TOGETHER=kind.together,
            SHARING=sharing, PARTS=self.parts, KNOWN=known, ONE=len(x) == 1, **length_args(half),
            B=plan.block_outs, C=plan.block_ins, M=width,
            num_warps=plan.num_warps, num_stages=plan.num_stages, **LAUNCH_OPTIONS,
        )  # fmt: skip
        return out


class TritonExperts:
    """Routing, the routed experts and the residual; the shared expert too, where it is like the others."""

    name = "triton"

    def __init__(self, gate_up: Stack, down: Stack, weights: MoeWeights) -> None:
        self.gate_up, self.down = gate_up, down
        self.num_experts, self.num_active = weights.num_experts, weights.num_active
        self.normalise = weights.normalise
        self.has_shared = len(gate_up.codes) > self.num_experts
        self.ranks = self.num_active + self.has_shared
        self._tokens_at_once = max(WORKSPACE // (self.ranks * max(gate_up.out_size, down.out_size)), 1)

    @property
    def dtype(self) -> torch.dtype:
        """What inputs are multiplied in."""
        return self.gate_up.dtype

    @classmethod
    def load(cls, weights: MoeWeights, dtype: torch.dtype) -> "TritonExperts | str":
        """Expert by expert, so that little is held twice; or the reason why somebody else must serve. Packed weights
        are multiplied in `dtype`."""
        stacks: list[Stack] = []
        first = shared = None
        for expert in range(weights.num_experts):
            matrices = _matrices(weights.load(expert), dtype)
            if isinstance(matrices, str):
                return matrices
            if first is None:
                first, shared = matrices, _matrices(weights.shared, dtype)
                joined = not isinstance(shared, str) and _alike(shared, first)
                count = weights.num_experts + joined
                stacks = [Stack.like(m, count, gated=i == 0) for i, m in enumerate(matrices)]
                if joined:
                    _put(stacks, weights.num_experts, shared)
            if not _alike(matrices, first):
                return "experts of one layer are stored differently"
            _put(stacks, expert, matrices)
        return cls(*stacks, weights)

    def __call__(
        self, given: Normed, logits_NR: Tensor, shared_ND: Tensor | None, to_ND: Tensor, then: Norm
    ) -> tuple[Tensor, Normed]:
        """Added to `to_ND`, in float32, and what `then` makes of that. `logits_NR` are the router's, then the shared
        expert's gate; `shared_ND` is what that expert gives, where it is not among the others."""
        assert (shared_ND is None) == self.has_shared
        x_ND, half = to_multiply(given)
        x_ND, to_ND = x_ND.to(self.gate_up.dtype).contiguous(), to_ND.contiguous()
        out_ND, room = torch.empty_like(to_ND), half_normed_room(then, to_ND)
        for begin in range(0, len(x_ND), self._tokens_at_once):
            part = slice(begin, begin + self._tokens_at_once)
            x = x_ND[part] if half is None else replace(half.some(part), x_ND=x_ND[part])
            shares_NR, y_PO = self._routed(x, logits_NR[part].contiguous())
            kernels.combine[triton.cdiv(self.down.out_size, WIDTH), len(shares_NR)](
                y_PO, shares_NR, None if shared_ND is None else shared_ND[part], to_ND[part], out_ND[part],
                *room_args(then, None if room is None else room.some(part)),
                self.down.out_size, A=self.num_active, RANKS=self.ranks, WIDTH=WIDTH, **LAUNCH_OPTIONS,
            )  # fmt: skip
        return out_ND, then(out_ND) if room is None else room

    def _routed(self, given: Normed, logits_NR: Tensor) -> tuple[Tensor, Tensor]:
        """The shares of each token's experts, and what each pair's expert gives."""
        _, shares_NR, places, pairs_P = self.route(logits_NR)
        up_width, down_width = (width_for(len(logits_NR), stack) for stack in (self.gate_up, self.down))
        mid_PI = self.gate_up.multiply(given, places, pairs_P, self.ranks, self.down.dtype, width=up_width)
        y_PO = self.down.multiply(mid_PI, places, pairs_P, 1, torch.float32, known=True, width=down_width)
        return shares_NR, y_PO

    def route(self, logits_NR: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The expert of each pair; the shares of each token's experts, the shared one's last; the places, and the pairs
        sorted by expert."""
        tokens, active = len(logits_NR), self.num_active
        experts_P = logits_NR.new_empty(tokens * self.ranks, dtype=torch.int32)
        shares_NR = logits_NR.new_empty((tokens, active + 1), dtype=torch.float32)
        together = tokens <= ROUTED_TOKENS and self._is_sparse(len(experts_P))
        places, pairs_P = self._room(experts_P) if together else (None, None)
        kernels.route[(triton.cdiv(tokens, ROUTED_TOKENS),)](
            logits_NR, experts_P, shares_NR, pairs_P, places, tokens,
            E=self.num_experts, A=active, RANKS=self.ranks, NORMALISE=self.normalise,
            M=PAIRS, T=ROUTED_TOKENS, R=triton.next_power_of_2(active + 1),
            BLOCK=triton.next_power_of_2(self.num_experts), num_warps=1, **LAUNCH_OPTIONS,
        )  # fmt: skip
        if places is None or pairs_P is None:
            places, pairs_P = self.group(experts_P)
        return experts_P, shares_NR, places, pairs_P

    def group(self, experts_P: Tensor) -> tuple[Tensor, Tensor]:
        """Places, each an expert, its first pair and their number; and the pairs, sorted by expert."""
        count = len(experts_P)
        places, pairs_P = self._room(experts_P)
        kernels.group[(triton.cdiv(count, OWN_PAIRS),)](
            experts_P, pairs_P, places, count,
            SPARSE=self._is_sparse(count), M=PAIRS, OWN=OWN_PAIRS, BLOCK=128 if count <= 128 else 1024,
            **LAUNCH_OPTIONS,
        )  # fmt: skip
        return places, pairs_P

    def _most_places(self, num_pairs: int) -> int:
        """If they are numbered by expert."""
        return (num_pairs - 1) // PAIRS + self.num_experts + self.has_shared

    def _is_sparse(self, num_pairs: int) -> bool:
        """Whether every pair has a place of its own, because they are few."""
        return num_pairs <= self._most_places(num_pairs)

    def _room(self, experts_P: Tensor) -> tuple[Tensor, Tensor]:
        """For places, and for sorted pairs."""
        count = len(experts_P)
        if self._is_sparse(count):
            places = experts_P.new_empty((count, 3))
        else:
            places = experts_P.new_zeros((self._most_places(count), 3))
        return places, torch.empty_like(experts_P)


def width_for(num_tokens: int, stack: Stack) -> int:
    """How many pairs of an expert are multiplied at once: it has no more than there are tokens."""
    if num_tokens > FEW_PAIRS or stack.kind.bits != 8 or INTERPRETED.value:
        return PAIRS
    return FEW_PAIRS if _few_agree(stack.kind, stack.dtype, stack.codes.device, gated=stack.gated) else PAIRS


@cache
def _few_agree(kind: Kind, dtype: torch.dtype, device: torch.device, *, gated: bool) -> bool:
    """Nothing promises it, so it is tried once for each kind."""
    generator = torch.Generator(device).manual_seed(0)
    matrix = some_matrix(kind, dtype, generator)
    stack = Stack.like(matrix, 1, gated=gated)
    stack.put(0, matrix)
    x_ND = torch.randn(FEW_PAIRS, matrix.ins, generator=generator, device=device).to(dtype)
    places = torch.tensor([[0, 0, FEW_PAIRS]], dtype=torch.int32, device=device)
    pairs_P = torch.arange(FEW_PAIRS, dtype=torch.int32, device=device)
    few, more = (
        stack.multiply(x_ND, places, pairs_P, 1, torch.float32, width=width) for width in (FEW_PAIRS, PAIRS)
    )
    return torch.equal(few, more)


def _parts(matrix: Matrix) -> tuple[Tensor | None, ...]:
    return matrix.codes, matrix.scales, matrix.offsets_GO, matrix.row_scales_O


def _matrices(weights: ExpertWeights, dtype: torch.dtype) -> list[Matrix] | str:
    """Those of gate and up, and of down; or the reason why there are none."""
    found = [_matrix(weights.gate_up, dtype), _matrix([weights.down], dtype)]
    reasons = [matrix for matrix in found if isinstance(matrix, str)]
    return reasons[0] if reasons else [matrix for matrix in found if isinstance(matrix, Matrix)]


def _matrix(weights: Sequence[Weight], dtype: torch.dtype) -> Matrix | str:
    for weight in weights:
        if (reason := TritonLinear.supports(weight)) is not None:
            return reason
    matrices = TritonLinear(weights, dtype=dtype).matrices
    return matrices[0] if len(matrices) == 1 else "gate and up of an expert are stored differently"


def _alike(some: Sequence[Matrix], others: Sequence[Matrix]) -> bool:
    return all(
        a.kind == b.kind and (a.outs, a.ins) == (b.outs, b.ins) for a, b in zip(some, others, strict=True)
    )


def _put(stacks: Sequence[Stack], expert: int, matrices: Sequence[Matrix]) -> None:
    for stack, matrix in zip(stacks, matrices, strict=True):
        stack.put(expert, matrix)
