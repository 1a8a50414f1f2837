"""The feed-forward half of a layer: dense, or experts with a shared one."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from headlong.layers.weights import Scope
from headlong.ops.elementwise import sigmoid
from headlong.ops.linear.invariance import Linear, Norm, Normed, add_product
from headlong.ops.linear.native import NativeLinear
from headlong.ops.moe.native import NativeExperts
from headlong.ops.moe.reference import moe, route
from headlong.ops.moe.weights import ExpertWeights, MoeWeights
from headlong.ops.program import FIRST, SECOND, STREAM, Program
from headlong.ops.registry import Ops


class Mlp:
    """down(silu(gate x) · up x)"""

    def __init__(self, gate_up: Linear, down: Linear, ops: Ops) -> None:
        self.gate_up = gate_up
        self.down = down
        self.gated = ops.gated(gate_up)

    @classmethod
    def load(cls, hidden_size: int, intermediate_size: int, scope: Scope, *, bias: bool = False) -> "Mlp":
        parts = (("gate_proj", intermediate_size), ("up_proj", intermediate_size))
        gate_up = scope.stacked(*parts, in_features=hidden_size, bias=bias)
        return cls(gate_up, scope.linear("down_proj", hidden_size, intermediate_size, bias=bias), scope.ops)

    def __call__(self, normed: Normed) -> Tensor:
        return self.down(self.gated(normed))

    def plus(self, normed: Normed, to_ND: Tensor, then: Norm) -> tuple[Tensor, Normed]:
        """Added to `to_ND`, and what `then` makes of that."""
        return add_product(to_ND, self.down, self.gated(normed), then)

    def record(self, program: Program) -> bool:
        """From FIRST, added to the stream; False if it cannot be part of a program."""
        if not (isinstance(self.gate_up, NativeLinear) and isinstance(self.down, NativeLinear)):
            return False
        program.matmul(self.gate_up, FIRST, SECOND)
        program.silu_mul(SECOND, FIRST, self.down.in_features)
        program.matmul(self.down, FIRST, STREAM, add=True)
        return True


@dataclass(frozen=True)
class MoeConfig:
    hidden_size: int
    num_experts: int
    num_active: int
    intermediate_size: int
    shared_intermediate_size: int
    normalise: bool


class MoeMlp:
    """The routed experts' sum, plus a shared expert behind a gate of its own."""

    def __init__(self, config: MoeConfig, scope: Scope) -> None:
        self.config = c = config
        gates = (("gate", c.num_experts), ("shared_expert_gate", 1))
        self.gates = scope.stacked(*gates, in_features=c.hidden_size)
        weights = MoeWeights(
            num_experts=c.num_experts,
            num_active=c.num_active,
            normalise=c.normalise,
            load=_experts(c, scope("experts")),
            shared=_expert(c.hidden_size, c.shared_intermediate_size, scope("shared_expert")),
        )
        self.fused = scope.ops.experts(weights)
        """All in one call or a few kernels, where there are such."""
        self.experts = [] if self.fused is not None else _mlps(weights, scope.ops)
        joined = self.fused is not None and self.fused.has_shared
        self.shared = None if joined else _mlp(weights.shared, scope.ops)

    def plus(self, normed: Normed, to_ND: Tensor, then: Norm) -> tuple[Tensor, Normed]:
        """Added to `to_ND`, and what `then` makes of that."""
        logits_NR = self.gates(normed)
        shared = None if self.shared is None else self.shared(normed)
        if isinstance(self.fused, NativeExperts):
            out_ND = self.fused(normed, logits_NR, shared, to_ND)
            return out_ND, then(out_ND)
        if self.fused is not None:
            return self.fused(normed, logits_NR, shared, to_ND, then)
        assert shared is not None
        count = self.config.num_experts
        experts, shares = route(logits_NR[:, :count], self.config.num_active, self.config.normalise)
        routed = moe(normed, experts, shares, self.experts)
        out_ND = to_ND + routed.add_(shared * sigmoid(logits_NR[:, count:].to(routed.dtype)))
        return out_ND, then(out_ND)

    def record(self, program: Program) -> bool:
        """From FIRST, added to the stream; False if it cannot be part of a program."""
        if not (isinstance(self.gates, NativeLinear) and isinstance(self.fused, NativeExperts)):
            return False
        program.matmul(self.gates, FIRST, SECOND)
        program.experts(self.fused, FIRST, SECOND, STREAM)
        return True


def _experts(c: MoeConfig, scope: Scope) -> Callable[[int], ExpertWeights]:
    """Stored one by one, or all in one tensor: gate and up in one, or apart."""
    hidden, size = c.hidden_size, c.intermediate_size
    if any(scope.has(f"{expert}.gate_proj.weight") for expert in range(c.num_experts)):
        return lambda expert: _expert(hidden, size, scope(str(expert)))
    if scope.has("gate_proj.weight"):
        gate = scope.experts("gate_proj.weight", c.num_experts, size, hidden)
        up = scope.experts("up_proj.weight", c.num_experts, size, hidden)
        gate_up = [list(pair) for pair in zip(gate, up, strict=True)]
        down = scope.experts("down_proj.weight", c.num_experts, hidden, size)
    else:
        gate_up = [[weight] for weight in scope.experts("gate_up_proj", c.num_experts, 2 * size, hidden)]
        down = scope.experts("down_proj", c.num_experts, hidden, size)
    return lambda expert: ExpertWeights(gate_up[expert], down[expert])


def _expert(hidden: int, size: int, scope: Scope) -> ExpertWeights:
    gate_up = scope.weights(("gate_proj", size), ("up_proj", size), in_features=hidden)
    return ExpertWeights(gate_up, scope.matrix("down_proj", hidden, size))


def _mlps(weights: MoeWeights, ops: Ops) -> list[Mlp]:
    return [_mlp(weights.load(expert), ops) for expert in range(weights.num_experts)]


def _mlp(weights: ExpertWeights, ops: Ops) -> Mlp:
    return Mlp(ops.stacked(weights.gate_up, None), ops.linear(weights.down), ops)
