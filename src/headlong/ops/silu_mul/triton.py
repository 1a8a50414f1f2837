# pyright: reportArgumentType=false, reportCallIssue=false
"""The gated activation of an MLP on a GPU: silu(gate) · up.

Legend. gate_up_ptr [rows, 2 · SIZE]: gates, then as many ups; out_ptr [rows, SIZE]; a program computes BLOCK columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.ops.triton_launch import LAUNCH_OPTIONS, launch_dependents_and_wait

BLOCK = 1024


@triton.jit
def silu_gated(gate, up):
    """Computes silu(gate) · up, element by element."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    launch_dependents_and_wait()
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    gate_ptrs = gate_up_ptr + row * 2 * SIZE + column
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + SIZE, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + column, silu_gated(gate, up), mask=mask)


def silu_mul(gate_up_NI: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Computes silu(first half of the columns) · second half, in `dtype`."""
    assert gate_up_NI.is_contiguous()
    rows, size = gate_up_NI.shape[0], gate_up_NI.shape[1] // 2
    out = gate_up_NI.new_empty(rows, size, dtype=dtype)
    grid = (triton.cdiv(size, BLOCK), rows)
    _silu_mul_kernel[grid](gate_up_NI, out, SIZE=size, BLOCK=BLOCK, **LAUNCH_OPTIONS)
    return out
