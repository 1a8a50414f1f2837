"""What a layer of experts gives, in float64."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from headlong.ops.elementwise import sigmoid
from headlong.ops.moe.reference import moe, route
from headlong.ops.moe.weights import ExpertWeights, MoeWeights
from headlong.ops.silu_mul.activation import SILU, Activation
from headlong.quant.format import PackedWeight, Weight


def dense(weight: Weight) -> Tensor:
    whole = weight.dequantize(0, weight.out_features) if isinstance(weight, PackedWeight) else weight
    return whole.double()


def mlp(weights: ExpertWeights, activation: Activation = SILU) -> Callable[[Tensor], Tensor]:
    gate_up, down = torch.cat([dense(part) for part in weights.gate_up]), dense(weights.down)

    added = [0.0 if bias is None else bias.double() for bias in (weights.gate_up_bias, weights.down_bias)]

    def run(x: Tensor) -> Tensor:
        gate, up = (x @ gate_up.T + added[0]).chunk(2, dim=-1)
        alpha, limit, plus = activation
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (gate * sigmoid(alpha * gate) * (up + plus)) @ down.T + added[1]

    return run


def expected(weights: MoeWeights, x: Tensor, logits: Tensor, to: Tensor) -> Tensor:
    """After the router's logits comes that of the shared expert's gate, if it has one."""
    x, logits, count = x.double(), logits.double(), weights.routing.num_experts
    act = weights.activation
    chosen, shares = route(logits[:, :count], weights.routing, weights.bias_E)
    out = to.double() + moe(x, chosen, shares, [mlp(weights.load(e), act) for e in range(count)])
    if weights.shared is None:
        return out
    return out + mlp(weights.shared, act)(x) * (sigmoid(logits[:, count:]) if weights.shared_gate else 1.0)


def with_biases(weights: MoeWeights, device: str = "cpu") -> MoeWeights:
    """The same layer with biases in every expert, and gates and ups that are clamped."""

    def biased(expert: ExpertWeights, number: int) -> ExpertWeights:
        generator = torch.Generator().manual_seed(number)
        inner, size = sum(len(dense(part)) for part in expert.gate_up), len(dense(expert.down))
        both = torch.randn(inner + size, generator=generator).to(device)
        return expert._replace(gate_up_bias=both[:inner], down_bias=both[inner:])

    count = weights.routing.num_experts
    shared = None if weights.shared is None else biased(weights.shared, count)
    experts = [biased(weights.load(e), e) for e in range(count)]
    return replace(weights, load=experts.__getitem__, shared=shared, activation=Activation(1.702, 1.5, 1.0))
