"""The gate of an MLP: silu(gate) · up, or another activation, the two side by side."""

from torch import Tensor

from headlong.ops.elementwise import silu, swish
from headlong.ops.silu_mul.activation import SILU, Activation


def silu_mul(gate_up_NI: Tensor, activation: Activation = SILU) -> Tensor:
    gate, up = gate_up_NI.chunk(2, dim=-1)
    if activation != SILU:
        alpha, limit, plus = activation
        return swish(gate.clamp(max=limit), alpha).mul_(up.clamp(-limit, limit).add_(plus))
    return silu(gate).mul_(up)
