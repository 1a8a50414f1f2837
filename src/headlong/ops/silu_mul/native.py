"""The gate of an MLP as one native call."""

import ctypes
from functools import cache

from torch import Tensor

from headlong.ops import native
from headlong.ops.silu_mul.activation import SILU, Activation


class ActivationStruct(ctypes.Structure):
    """Mirrors `Activation` in csrc/activation.h."""

    _fields_ = (("alpha", ctypes.c_float), ("limit", ctypes.c_float), ("plus", ctypes.c_float))


@cache
def _struct(activation: Activation) -> ActivationStruct:
    """The structure of an activation, made once and never freed."""
    return ActivationStruct(*activation)


def silu_mul(gate_up_NI: Tensor, activation: Activation = SILU) -> Tensor:
    """Computes silu(gate) · up, or another activation, with gate and up side by side."""
    rows, double = gate_up_NI.shape
    out, how = gate_up_NI.new_empty(rows, double // 2), _struct(activation)
    native.kernel("headlong_silu_mul")(
        native.address(gate_up_NI),
        out.data_ptr(),
        rows,
        double // 2,
        ctypes.addressof(how),
        native.num_threads(),
    )
    return out
