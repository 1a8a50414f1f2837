# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
"""A token for each row of scores on a GPU: the best of scores plus the noise of sampling/noise.py, made on the way.

Parts of a row first, so that even one row keeps many programs busy; then the best of its parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.ops.argmax.triton import best_of_parts, first_best
from headlong.ops.triton_launch import LAUNCH_OPTIONS, launch_dependents_and_wait

BLOCK = 1024
"""Tokens of a part."""
_ROUNDS = tl.constexpr(10)
_TO_UNIT = tl.constexpr(2.0**-32)


@triton.jit
def _product(x, FACTOR: tl.constexpr):
    """Of two numbers of 32 bits: its upper half, and its lower."""
    product = x.to(tl.uint64) * FACTOR
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    for _ in tl.static_range(_ROUNDS):
        high0, low0 = _product(c0, 0xD2511F53)
        high1, low1 = _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def noise(keys, part, BLOCK: tl.constexpr):
    """Of the BLOCK tokens of a part, four to a counter; `keys` are a row's."""
    seed, choice, position = tl.load(keys), tl.load(keys + 1), tl.load(keys + 2)
    quad = (part * (BLOCK // 4) + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    nothing = quad * 0
    c0, c1, c2, c3 = _philox(
        quad,
        nothing + position.to(tl.uint32),
        nothing + choice.to(tl.uint32),
        nothing + tl.load(keys + 3).to(tl.uint32),
        nothing + seed.to(tl.uint32),
        nothing + (seed >> 32).to(tl.uint32),
    )
    words = tl.join(tl.join(c0, c2), tl.join(c1, c3)).reshape(BLOCK)
    unit = (words.to(tl.float64) + 0.5) * _TO_UNIT
    return -tl.log(-tl.log(unit))


@triton.jit
def _draw_of_part(scores, keys, tops, indices, size, BLOCK: tl.constexpr):
    launch_dependents_and_wait()
    part, row, parts = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    index = part * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    score = tl.load(scores + row * size + index, mask=inside, other=0.0)
    top, first = first_best(score + noise(keys + row * 4, part, BLOCK), index, inside)
    tl.store(tops + row * parts + part, top)
    tl.store(indices + row * parts + part, first)


def draw(scores_MV: Tensor, keys_M4: Tensor) -> Tensor:
    """`scores_MV` float64, -inf for what must not be; `keys_M4` seed, choice, position and stream of each row."""
    assert scores_MV.dtype == torch.float64 and keys_M4.dtype == torch.long
    scores_MV, keys_M4 = scores_MV.contiguous(), keys_M4.contiguous()
    rows, size = scores_MV.shape
    tops_MP, indices_MP = room_for_parts(rows, size, scores_MV.device)
    parts = tops_MP.shape[1]
    _draw_of_part[(parts, rows)](scores_MV, keys_M4, tops_MP, indices_MP, size, BLOCK=BLOCK, **LAUNCH_OPTIONS)
    return best_of_drawn(tops_MP, indices_MP)


def room_for_parts(rows: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For the best noisy score of each part, and its token."""
    parts = triton.cdiv(size, BLOCK)
    tops_MP = torch.empty(rows, parts, dtype=torch.float64, device=device)
    return tops_MP, torch.empty(rows, parts, dtype=torch.int32, device=device)


def best_of_drawn(tops_MP: Tensor, indices_MP: Tensor) -> Tensor:
    tokens_M = torch.empty(len(tops_MP), dtype=torch.long, device=tops_MP.device)
    best_of_parts(tops_MP, indices_MP, tokens_M)
    return tokens_M
