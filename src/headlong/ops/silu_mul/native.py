"""The gate of an MLP as one native call; in and out in the matmuls' dtype."""

import torch
from torch import Tensor

from headlong.ops import native


def silu_mul(gate_up_NI: Tensor) -> Tensor:
    rows, size = gate_up_NI.shape[0], gate_up_NI.shape[1] // 2
    out = gate_up_NI.new_empty(rows, size)
    scratch = torch.empty(2 * size, dtype=torch.float32)
    native.call("headlong_silu_mul", gate_up_NI, out, native.is_wide(out), rows, size, scratch)
    return out
