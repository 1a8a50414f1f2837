"""The gate of an MLP as one native call."""

from torch import Tensor

from headlong.ops import native


def silu_mul(gate_up_NI: Tensor) -> Tensor:
    """Computes silu(gate) · up, with gate and up side by side."""
    rows, double = gate_up_NI.shape
    out = gate_up_NI.new_empty(rows, double // 2)
    native.kernel("headlong_silu_mul")(
        native.address(gate_up_NI), out.data_ptr(), rows, double // 2, native.num_threads()
    )
    return out
