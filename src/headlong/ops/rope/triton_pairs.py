# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
"""The turning of pairs inside kernels: the last numbers of a head, two neighbours each, as `pairs.py` defines it.

A head's numbers are held as those at even and at odd places, of which number i of both is a pair.
"""

import triton
import triton.language as tl

from headlong.ops.rope.pairs import PairRope
from headlong.ops.rope.reference import Angles


def turn_args(angles: Angles, rope: PairRope) -> dict[str, object]:
    """Returns the arguments by which kernels find a step's cosines and sines."""
    assert angles.cos.stride() == angles.sin.stride() and angles.cos.stride(-1) == 1
    return {
        "cos_ptr": angles.cos,
        "sin_ptr": angles.sin,
        "stride_turns": angles.cos.stride(0),
        "first_cos": rope.first,
        "first_sin": angles.rotary_dim // 2 + rope.first,
    }


@triton.jit
def load_turn(
    cos_ptr,
    sin_ptr,
    stride_turns,
    first_cos,
    first_sin,
    token,
    i,
    FIRST_PAIR: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Loads cosines and sines of pairs `i` of a token's head; pairs before FIRST_PAIR are not turned."""
    pair = i - FIRST_PAIR
    mask = (pair >= 0) & (pair < PAIRS)
    cos = tl.load(cos_ptr + token * stride_turns + first_cos + pair, mask=mask, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * stride_turns + first_sin + pair, mask=mask, other=0.0).to(tl.float32)
    return cos, sin
