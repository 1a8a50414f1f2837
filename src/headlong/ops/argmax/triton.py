# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false
"""The best token of each row of logits on a GPU; of equal ones the first, and what is no number wins.

Parts of a row first, so that even one row keeps many programs busy; then the best of its parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.ops.triton_launch import LAUNCH_OPTIONS, launch_dependents_and_wait

BLOCK = 4096


@triton.jit
def first_best(x, index, inside):
    """The largest number, and the lowest index where it stands; NaN, and its index, if there is one."""
    is_nan = (x != x) & inside
    any_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    top = tl.max(tl.where(inside & (x == x), x, float("-inf")), 0)
    wanted = tl.where(any_nan, is_nan, (x == top) & inside)
    first = tl.min(tl.where(wanted, index, 2147483647), 0)
    return tl.where(any_nan, float("nan"), top), first


@triton.jit
def _best_of_part(logits, stride, tops, indices, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    launch_dependents_and_wait()
    part, row, parts = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    index = part * BLOCK + tl.arange(0, BLOCK)
    inside = index < SIZE
    x = tl.load(logits + row * stride + index, mask=inside, other=0.0).to(tl.float32)
    top, first = first_best(x, index, inside)
    tl.store(tops + row * parts + part, top)
    tl.store(indices + row * parts + part, first)


@triton.jit
def _best_of_parts(tops, indices, tokens, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    launch_dependents_and_wait()
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    inside = part < PARTS
    top = tl.load(tops + row * PARTS + part, mask=inside, other=0.0)
    index = tl.load(indices + row * PARTS + part, mask=inside, other=0)
    _, first = first_best(top, index, inside)
    tl.store(tokens + row, first.to(tl.int64))


def argmax(logits_LV: Tensor) -> Tensor:
    assert logits_LV.stride(1) == 1
    rows, size = logits_LV.shape
    parts = triton.cdiv(size, BLOCK)
    tops = torch.empty(rows, parts, dtype=torch.float32, device=logits_LV.device)
    indices = torch.empty(rows, parts, dtype=torch.int32, device=logits_LV.device)
    _best_of_part[(parts, rows)](
        logits_LV, logits_LV.stride(0), tops, indices, SIZE=size, BLOCK=BLOCK, **LAUNCH_OPTIONS
    )
    tokens_L = torch.empty(rows, dtype=torch.long, device=logits_LV.device)
    best_of_parts(tops, indices, tokens_L)
    return tokens_L


def best_of_parts(tops_LP: Tensor, indices_LP: Tensor, tokens_L: Tensor) -> None:
    """The token of each row, from the best of its parts."""
    rows, parts = tops_LP.shape
    _best_of_parts[(rows,)](
        tops_LP, indices_LP, tokens_L, PARTS=parts, BLOCK=triton.next_power_of_2(parts), **LAUNCH_OPTIONS
    )
