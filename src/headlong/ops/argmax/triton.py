# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false
"""The argmax of each row of logits on a GPU; of equal ones the first, and NaN wins.

Parts of a row first, so that even one row keeps many programs busy; then the argmax of its parts.

Legend. logits_ptr [rows, SIZE], stride_logits from row to row; maxima_ptr and indices_ptr [rows, parts]: the largest
logit of each part of BLOCK logits, and its index; tokens_ptr [rows]. L rows, V logits of each, P parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.ops.triton_launch import LAUNCH_OPTIONS, launch_dependents_and_wait

BLOCK = 4096


@triton.jit
def block_argmax(x, index, mask):
    """The largest number of a block, and the lowest index where it is; NaN, and its index, if there is one."""
    is_nan = (x != x) & mask
    any_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    maximum = tl.max(tl.where(mask & (x == x), x, float("-inf")), 0)
    wanted = tl.where(any_nan, is_nan, (x == maximum) & mask)
    first = tl.min(tl.where(wanted, index, 2147483647), 0)
    return tl.where(any_nan, float("nan"), maximum), first


@triton.jit
def _argmax_of_part_kernel(
    logits_ptr, stride_logits, maxima_ptr, indices_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    launch_dependents_and_wait()
    part, row, num_parts = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    index = part * BLOCK + tl.arange(0, BLOCK)
    mask = index < SIZE
    x = tl.load(logits_ptr + row * stride_logits + index, mask=mask, other=0.0).to(tl.float32)
    maximum, first = block_argmax(x, index, mask)
    tl.store(maxima_ptr + row * num_parts + part, maximum)
    tl.store(indices_ptr + row * num_parts + part, first)


@triton.jit
def _argmax_of_parts_kernel(
    maxima_ptr, indices_ptr, tokens_ptr, NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    launch_dependents_and_wait()
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    mask = part < NUM_PARTS
    maximum = tl.load(maxima_ptr + row * NUM_PARTS + part, mask=mask, other=0.0)
    index = tl.load(indices_ptr + row * NUM_PARTS + part, mask=mask, other=0)
    _, first = block_argmax(maximum, index, mask)
    tl.store(tokens_ptr + row, first.to(tl.int64))


def argmax(logits_LV: Tensor) -> Tensor:
    """The token with the largest logit of each row."""
    assert logits_LV.stride(1) == 1
    rows, size = logits_LV.shape
    num_parts = triton.cdiv(size, BLOCK)
    maxima_LP = torch.empty(rows, num_parts, dtype=torch.float32, device=logits_LV.device)
    indices_LP = torch.empty(rows, num_parts, dtype=torch.int32, device=logits_LV.device)
    _argmax_of_part_kernel[(num_parts, rows)](
        logits_LV, logits_LV.stride(0), maxima_LP, indices_LP, SIZE=size, BLOCK=BLOCK, **LAUNCH_OPTIONS
    )
    tokens_L = torch.empty(rows, dtype=torch.long, device=logits_LV.device)
    argmax_of_parts(maxima_LP, indices_LP, tokens_L)
    return tokens_L


def argmax_of_parts(maxima_LP: Tensor, indices_LP: Tensor, tokens_L: Tensor) -> None:
    """The token of each row, from the argmax of each of its parts."""
    rows, num_parts = maxima_LP.shape
    block = triton.next_power_of_2(num_parts)
    _argmax_of_parts_kernel[(rows,)](
        maxima_LP, indices_LP, tokens_L, NUM_PARTS=num_parts, BLOCK=block, **LAUNCH_OPTIONS
    )
