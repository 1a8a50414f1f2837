"""The feed-forward half of a layer: dense, or experts with a shared one."""

from dataclasses import dataclass

from torch import Tensor

from headlong.layers.weights import Scope
from headlong.ops.elementwise import sigmoid
from headlong.ops.linear.invariance import Linear, add_product
from headlong.ops.linear.native import NativeLinear
from headlong.ops.moe.reference import moe, route
from headlong.ops.program import FIRST, SECOND, STREAM, Program
from headlong.ops.registry import Ops


class Mlp:
    """down(silu(gate x) · up x)"""

    def __init__(self, gate_up: Linear, down: Linear, ops: Ops) -> None:
        self.gate_up = gate_up
        self.down = down
        self.silu_mul = ops.silu_mul

    @classmethod
    def load(cls, hidden_size: int, intermediate_size: int, scope: Scope, *, bias: bool = False) -> "Mlp":
        parts = (("gate_proj", intermediate_size), ("up_proj", intermediate_size))
        gate_up = scope.stacked(*parts, in_features=hidden_size, bias=bias)
        return cls(gate_up, scope.linear("down_proj", hidden_size, intermediate_size, bias=bias), scope.ops)

    def __call__(self, x_ND: Tensor) -> Tensor:
        return self.down(self.silu_mul(self.gate_up(x_ND)))

    def plus(self, x_ND: Tensor, to_ND: Tensor) -> Tensor:
        """Added to `to_ND`."""
        return add_product(to_ND, self.down, self.silu_mul(self.gate_up(x_ND)))

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
        self.router = scope.linear("gate", c.num_experts, c.hidden_size)
        self.experts = _experts(c, scope("experts"))
        self.shared = Mlp.load(c.hidden_size, c.shared_intermediate_size, scope("shared_expert"))
        self.shared_gate = scope.linear("shared_expert_gate", 1, c.hidden_size)

    def __call__(self, x_ND: Tensor) -> Tensor:
        experts, weights = route(self.router(x_ND), self.config.num_active, self.config.normalise)
        routed = moe(x_ND, experts, weights, self.experts)
        return routed.add_(self.shared(x_ND) * sigmoid(self.shared_gate(x_ND).to(routed.dtype)))

    def plus(self, x_ND: Tensor, to_ND: Tensor) -> Tensor:
        """Added to `to_ND`."""
        return to_ND + self(x_ND)


def _experts(c: MoeConfig, scope: Scope) -> list[Mlp]:
    """Stored one by one, or all in one tensor: gate and up in one, or apart."""
    hidden, size, ops = c.hidden_size, c.intermediate_size, scope.ops
    if any(scope.has(f"{expert}.gate_proj.weight") for expert in range(c.num_experts)):
        return [Mlp.load(hidden, size, scope(str(expert))) for expert in range(c.num_experts)]
    if scope.has("gate_proj.weight"):
        gate = scope.experts("gate_proj.weight", c.num_experts, size, hidden)
        up = scope.experts("up_proj.weight", c.num_experts, size, hidden)
        gate_up = [ops.stacked([g, u], None) for g, u in zip(gate, up, strict=True)]
        down = scope.experts("down_proj.weight", c.num_experts, hidden, size)
    else:
        fused = scope.experts("gate_up_proj", c.num_experts, 2 * size, hidden)
        gate_up = [ops.linear(weight) for weight in fused]
        down = scope.experts("down_proj", c.num_experts, hidden, size)
    return [Mlp(g, ops.linear(d), ops) for g, d in zip(gate_up, down, strict=True)]
