"""What a layer of experts gives, in float64."""

from collections.abc import Callable

import torch
from torch import Tensor

from headlong.ops.elementwise import sigmoid, silu
from headlong.ops.moe.reference import moe, route
from headlong.ops.moe.weights import ExpertWeights, MoeWeights
from headlong.quant.format import PackedWeight, Weight


def dense(weight: Weight) -> Tensor:
    whole = weight.dequantize(0, weight.out_features) if isinstance(weight, PackedWeight) else weight
    return whole.double()


def mlp(weights: ExpertWeights) -> Callable[[Tensor], Tensor]:
    gate_up, down = torch.cat([dense(part) for part in weights.gate_up]), dense(weights.down)

    def run(x: Tensor) -> Tensor:
        gate, up = (x @ gate_up.T).chunk(2, dim=-1)
        return (silu(gate) * up) @ down.T

    return run


def expected(weights: MoeWeights, x: Tensor, logits: Tensor, to: Tensor) -> Tensor:
    """After the router's logits comes that of the shared expert's gate, if it has one."""
    x, logits, count = x.double(), logits.double(), weights.routing.num_experts
    chosen, shares = route(logits[:, :count], weights.routing, weights.bias_E)
    out = to.double() + moe(x, chosen, shares, [mlp(weights.load(e)) for e in range(count)])
    if weights.shared is None:
        return out
    return out + mlp(weights.shared)(x) * (sigmoid(logits[:, count:]) if weights.shared_gate else 1.0)
