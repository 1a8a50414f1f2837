"""The gate of an MLP as one native call."""

import ctypes

from torch import Tensor

from headlong.ops import native
from headlong.ops.silu_mul.activation import SILU, Activation


class ActivationStruct(ctypes.Structure):
    """Mirrors `Activation` in csrc/activation.h."""

    _fields_ = (("alpha", ctypes.c_float), ("limit", ctypes.c_float), ("plus", ctypes.c_float))


def silu_mul(gate_up_NI: Tensor, activation: Activation = SILU) -> Tensor:
    """Computes silu(gate) · up, or another activation, with gate and up side by side."""
    rows, double = gate_up_NI.shape
    out = gate_up_NI.new_empty(rows, double // 2)
    native.kernel("headlong_silu_mul")(
        native.address(gate_up_NI),
        out.data_ptr(),
        rows,
        double // 2,
        ctypes.addressof(ActivationStruct(*activation)),
        native.num_threads(),
    )
    return out
