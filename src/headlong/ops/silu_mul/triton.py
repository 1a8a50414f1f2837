# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
"""The gated activation of an MLP on a GPU: silu(gate) · up, or another.

Legend. gate_up_ptr [rows, 2 · SIZE]: gates, then as many ups; out_ptr [rows, SIZE]; a program computes BLOCK columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.ops.silu_mul.activation import SILU, Activation
from headlong.ops.triton_launch import LAUNCH_OPTIONS, launch_dependents_and_wait

BLOCK = 1024


@triton.jit
def silu_gated(gate, up):
    """Computes silu(gate) · up, element by element."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def activated(gate, up, ACTIVATION: tl.constexpr):
    """Computes what an `Activation` makes of gates and ups, element by element; of None, silu(gate) · up. A number that
    is none stays so, which minimum and maximum do not promise."""
    if ACTIVATION is None:
        return silu_gated(gate, up)
    else:  # what stands behind a return is compiled too
        LIMIT: tl.constexpr = ACTIVATION.limit
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, up)
        up = tl.where(up < -LIMIT, -LIMIT, up)
        return gate / (1.0 + tl.exp(-ACTIVATION.alpha * gate)) * (up + ACTIVATION.plus)


def constant_of(activation: Activation) -> Activation | None:
    """What kernels are compiled for."""
    return None if activation == SILU else activation


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr, out_ptr, SIZE: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    launch_dependents_and_wait()
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    gate_ptrs = gate_up_ptr + row * 2 * SIZE + column
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + SIZE, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + column, activated(gate, up, ACTIVATION), mask=mask)


def silu_mul(gate_up_NI: Tensor, dtype: torch.dtype = torch.float32, activation: Activation = SILU) -> Tensor:
    """Computes silu(first half of the columns) · second half, or another activation of them, in `dtype`."""
    assert gate_up_NI.is_contiguous()
    rows, size = gate_up_NI.shape[0], gate_up_NI.shape[1] // 2
    out = gate_up_NI.new_empty(rows, size, dtype=dtype)
    grid = (triton.cdiv(size, BLOCK), rows)
    _silu_mul_kernel[grid](
        gate_up_NI, out, SIZE=size, ACTIVATION=constant_of(activation), BLOCK=BLOCK, **LAUNCH_OPTIONS
    )
    return out
