# pyright: reportArgumentType=false, reportCallIssue=false
"""The gate of an MLP on a GPU: silu(gate) · up, the two side by side."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.ops.triton_launch import LAUNCH_OPTIONS, launch_dependents_and_wait

BLOCK = 1024


@triton.jit
def gated(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _silu_mul(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    launch_dependents_and_wait()
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < SIZE
    at = gate_up + row * 2 * SIZE + i
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + SIZE, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + i, gated(gate, up), mask=inside)


def silu_mul(gate_up_NI: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    assert gate_up_NI.is_contiguous()
    rows, size = gate_up_NI.shape[0], gate_up_NI.shape[1] // 2
    out = gate_up_NI.new_empty(rows, size, dtype=dtype)
    _silu_mul[(triton.cdiv(size, BLOCK), rows)](gate_up_NI, out, SIZE=size, BLOCK=BLOCK, **LAUNCH_OPTIONS)
    return out
