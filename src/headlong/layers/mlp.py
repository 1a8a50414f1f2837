"""The feed-forward half of a layer: dense, or experts with a shared one."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from headlong.layers.weights import Scope
from headlong.ops import program
from headlong.ops.linear.linear import Shard
from headlong.ops.moe.weights import ExpertWeights, MoeWeights
from headlong.ops.norm.normed import Norm, Normed
from headlong.ops.program import FIRST, SECOND, STREAM, Instruction
from headlong.ops.silu_mul.swiglu import SwiGlu


class Mlp:
    """down(silu(gate x) · up x)"""

    def __init__(self, swiglu: SwiGlu) -> None:
        self.swiglu = swiglu

    @classmethod
    def load(cls, hidden_size: int, intermediate_size: int, scope: Scope, *, bias: bool = False) -> "Mlp":
        parts = (("gate_proj", intermediate_size), ("up_proj", intermediate_size))
        gate_up = scope.stacked(*parts, in_features=hidden_size, bias=bias, shard=Shard.OUTPUT)
        down = scope.linear("down_proj", hidden_size, intermediate_size, bias=bias, shard=Shard.INPUT)
        return cls(scope.ops.swiglu(gate_up, down))

    def add_to(self, normed: Normed, to_ND: Tensor, then: Norm) -> tuple[Tensor, Normed]:
        """Added to `to_ND`, and what `then` makes of that."""
        return self.swiglu.add_to(normed, to_ND, then)

    def instructions(self) -> list[Instruction]:
        """This layer, from the buffer FIRST, added to the stream."""
        gate_up, down = self.swiglu.gate_up, self.swiglu.down
        return [
            program.Gemm(gate_up, FIRST, SECOND),
            program.SiluMul(SECOND, FIRST, down.in_features),
            program.Gemm(down, FIRST, STREAM, add=True),
        ]


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
        self.gates = scope.stacked(*gates, in_features=c.hidden_size, shard=Shard.NONE)
        weights = MoeWeights(
            num_experts=c.num_experts,
            num_active=c.num_active,
            normalise=c.normalise,
            load=_experts(c, scope("experts")),
            shared=_expert(c.hidden_size, c.shared_intermediate_size, scope("shared_expert")),
            shards=(Shard.OUTPUT, Shard.INPUT),
        )
        self.experts = scope.ops.experts(weights)
        self.shared = None if self.experts.has_shared else scope.ops.expert(weights.shared, weights.shards)

    def add_to(self, normed: Normed, to_ND: Tensor, then: Norm) -> tuple[Tensor, Normed]:
        """Added to `to_ND`, and what `then` makes of that."""
        logits_NR = self.gates(normed)
        shared_ND = None if self.shared is None else self.shared(normed)
        return self.experts(normed, logits_NR, shared_ND, to_ND, then)

    def instructions(self) -> list[Instruction]:
        """This layer, from the buffer FIRST, added to the stream."""
        return [
            program.Gemm(self.gates, FIRST, SECOND),
            program.Experts(self.experts, FIRST, SECOND, STREAM),
        ]


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
