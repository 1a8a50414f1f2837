"""The gate of an MLP: silu(gate) · up, the two side by side."""

from torch import Tensor

from headlong.ops.elementwise import silu


def silu_mul(gate_up_NI: Tensor) -> Tensor:
    gate, up = gate_up_NI.chunk(2, dim=-1)
    return silu(gate).mul_(up)
