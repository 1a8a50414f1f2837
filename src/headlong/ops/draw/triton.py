# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
"""A token for each row of scores on a GPU: the argmax of scores plus the noise of sampling/noise.py, made on the way.

Parts of a row first, so that even one row keeps many programs busy; then the argmax of its parts.

Legend. M rows of V scores, P parts of BLOCK tokens. scores_ptr [rows, size]; keys_ptr [rows, 4]: seed, choice, position
and stream; maxima_ptr and indices_ptr [rows, parts]: the largest noisy score of each part, and its token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.ops.argmax.triton import argmax_of_parts, block_argmax
from headlong.ops.triton_launch import LAUNCH_OPTIONS, launch_dependents_and_wait

BLOCK = 1024
"""The number of tokens of a part."""
_ROUNDS = tl.constexpr(10)
_TO_UNIT = tl.constexpr(2.0**-32)


@triton.jit
def _product(x, FACTOR: tl.constexpr):
    """The product of two numbers of 32 bits: its upper half, and its lower half."""
    product = x.to(tl.uint64) * FACTOR
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    """Philox 4x32: four random words from a counter and a key."""
    for _ in tl.static_range(_ROUNDS):
        high0, low0 = _product(c0, 0xD2511F53)
        high1, low1 = _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def noise(row_keys_ptr, part, BLOCK: tl.constexpr):
    """Gumbel noise of the BLOCK tokens of a part, four to a counter."""
    seed, choice, position = tl.load(row_keys_ptr), tl.load(row_keys_ptr + 1), tl.load(row_keys_ptr + 2)
    quad = (part * (BLOCK // 4) + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = quad * 0
    c0, c1, c2, c3 = _philox(
        quad,
        zero + position.to(tl.uint32),
        zero + choice.to(tl.uint32),
        zero + tl.load(row_keys_ptr + 3).to(tl.uint32),
        zero + seed.to(tl.uint32),
        zero + (seed >> 32).to(tl.uint32),
    )
    words = tl.join(tl.join(c0, c2), tl.join(c1, c3)).reshape(BLOCK)
    unit = (words.to(tl.float64) + 0.5) * _TO_UNIT
    return -tl.log(-tl.log(unit))


@triton.jit
def _draw_of_part_kernel(scores_ptr, keys_ptr, maxima_ptr, indices_ptr, size, BLOCK: tl.constexpr):
    launch_dependents_and_wait()
    part, row, num_parts = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    index = part * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    score = tl.load(scores_ptr + row * size + index, mask=mask, other=0.0)
    maximum, first = block_argmax(score + noise(keys_ptr + row * 4, part, BLOCK), index, mask)
    tl.store(maxima_ptr + row * num_parts + part, maximum)
    tl.store(indices_ptr + row * num_parts + part, first)


def draw(scores_MV: Tensor, keys_M4: Tensor) -> Tensor:
    """Draws the token of each row. `scores_MV` is float64, with -inf for tokens that must not be drawn; `keys_M4` are
    seed, choice, position and stream of each row."""
    assert scores_MV.dtype == torch.float64 and keys_M4.dtype == torch.long
    scores_MV, keys_M4 = scores_MV.contiguous(), keys_M4.contiguous()
    rows, size = scores_MV.shape
    maxima_MP, indices_MP = empty_parts(rows, size, scores_MV.device)
    num_parts = maxima_MP.shape[1]
    _draw_of_part_kernel[(num_parts, rows)](
        scores_MV, keys_M4, maxima_MP, indices_MP, size, BLOCK=BLOCK, **LAUNCH_OPTIONS
    )
    return argmax_of_drawn(maxima_MP, indices_MP)


def empty_parts(rows: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Makes tensors for the largest noisy score of each part, and its token."""
    num_parts = triton.cdiv(size, BLOCK)
    maxima_MP = torch.empty(rows, num_parts, dtype=torch.float64, device=device)
    return maxima_MP, torch.empty(rows, num_parts, dtype=torch.int32, device=device)


def argmax_of_drawn(maxima_MP: Tensor, indices_MP: Tensor) -> Tensor:
    """Returns the token of each row, from what its parts drew."""
    tokens_M = torch.empty(len(maxima_MP), dtype=torch.long, device=maxima_MP.device)
    argmax_of_parts(maxima_MP, indices_MP, tokens_M)
    return tokens_M
