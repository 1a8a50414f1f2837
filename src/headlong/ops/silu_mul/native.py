"""The gate of an MLP as one native call; in and out in the matmuls' dtype."""

from torch import Tensor

from headlong.ops import native


def silu_mul(gate_up_NI: Tensor) -> Tensor:
    rows, size = gate_up_NI.shape[0], gate_up_NI.shape[1] // 2
    out = gate_up_NI.new_empty(rows, size)
    kernel = native.kernel("headlong_silu_mul")
    kernel(native.address(gate_up_NI), out.data_ptr(), native.is_wide(out), rows, size)
    return out
