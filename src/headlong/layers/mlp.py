"""The feed-forward half of a layer: dense, or experts with a shared one."""

from dataclasses import dataclass

from torch import Tensor

from headlong.layers.weights import Scope
from headlong.ops.elementwise import sigmoid, silu
from headlong.ops.linear.invariance import Linear
from headlong.ops.moe.reference import moe, route


class Mlp:
    """down(silu(gate x) · up x)"""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    @classmethod
    def load(cls, hidden_size: int, intermediate_size: int, scope: Scope) -> "Mlp":
        parts = (("gate_proj", intermediate_size), ("up_proj", intermediate_size))
        return cls(
            scope.fused(*parts, in_features=hidden_size),
            scope.linear("down_proj", hidden_size, intermediate_size),
        )

    def __call__(self, x_ND: Tensor) -> Tensor:
        gate, up = self.gate_up(x_ND).chunk(2, dim=-1)
        return self.down(silu(gate).mul_(up))


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
        linear = scope.ops.linear
        self.router = scope.linear("gate", c.num_experts, c.hidden_size)
        gate_up = scope.tensor("experts.gate_up_proj", c.num_experts, 2 * c.intermediate_size, c.hidden_size)
        down = scope.tensor("experts.down_proj", c.num_experts, c.hidden_size, c.intermediate_size)
        self.experts = [Mlp(linear(g), linear(d)) for g, d in zip(gate_up, down, strict=True)]
        self.shared = Mlp.load(c.hidden_size, c.shared_intermediate_size, scope("shared_expert"))
        self.shared_gate = scope.linear("shared_expert_gate", 1, c.hidden_size)

    def __call__(self, x_ND: Tensor) -> Tensor:
        experts, weights = route(self.router(x_ND), self.config.num_active, self.config.normalise)
        routed = moe(x_ND, experts, weights, self.experts)
        return routed.add_(self.shared(x_ND).mul_(sigmoid(self.shared_gate(x_ND))))
