"""A packed matrix and, beside it, a small one of floats over the same inputs, for few tokens in one launch.

FP8 checkpoints leave small projections as they are, such as those of a DeltaNet's β and decay. By themselves they take
hardly less time than a large product: most of it is begin and end. Both are cut, and their pieces added, as ever.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from headlong.ops.linear.triton_block_m import width_for
from headlong.ops.linear.triton_gemm import multiply_share, placed, put
from headlong.ops.linear.triton_split_k import CUT, WIDTH, Pieces, sum_pieces
from headlong.ops.linear.triton_unpack import FLOAT, INTERPRETED
from headlong.ops.linear.triton_weight import FEW, Matrix
from headlong.ops.norm.normed import PartialNorm
from headlong.ops.norm.triton import inverse_length, squares_of
from headlong.ops.triton_launch import LAUNCH_OPTIONS, launch_dependents, wait_for_previous_kernel

MOST_FLOATS = 512
"""Outputs of the small one."""
SHORTER = 1 if INTERPRETED.value else 2
"""By what its steps are shorter than its plan's, so that they have as many bytes as a packed one's. Of an interpreter's
products nothing is known, so there they are the same."""
_FLOAT = tl.constexpr(FLOAT)
FLOATS = {
    "codes": "floats",
    "num_outs": "num_floats",
    "num_steps": "float_steps",
    "steps_each": "float_each",
    "all_steps": "all_float_steps",
    "EVEN": "FLOAT_EVEN",
    "B": "FLOAT_B",
    "C": "FLOAT_C",
    "M": "FLOAT_M",
}
"""What the kernels call the small one's arguments; others it shares, or has none."""


class Pair(NamedTuple):
    packed: Matrix
    floats: Matrix

    @classmethod
    def of(cls, matrices: Sequence[Matrix]) -> "Pair | None":
        """None if these are no such pair."""
        if len(matrices) != 2 or any(matrix.is_whole for matrix in matrices):
            return None
        packed, floats = sorted(matrices, key=lambda matrix: matrix.kind.bits)
        small = floats.kind.code == FLOAT and floats.kind.bits == 16 and floats.outs <= MOST_FLOATS
        alike = packed.kind.code != FLOAT and packed.dtype == floats.dtype
        return cls(packed, floats) if small and alike else None


@triton.jit(
    do_not_specialize=[
        "num_tokens", "num_steps", "steps_each", "all_steps",
        "float_steps", "float_each", "all_float_steps", "float_programs",
    ]
)  # fmt: skip
def _multiply(
    x_ND, codes, scales, offsets, row_scales, out, floats, float_out,
    num_tokens, num_outs, num_ins, row_stride, scale_stride, num_steps, steps_each, all_steps,
    num_floats, float_steps, float_each, all_float_steps, float_programs,
    DTYPE: tl.constexpr, CODE: tl.constexpr, ZERO: tl.constexpr, HALVES: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr, TOGETHER: tl.constexpr,
    B: tl.constexpr, C: tl.constexpr, M: tl.constexpr,
    FLOAT_EVEN: tl.constexpr, FLOAT_B: tl.constexpr, FLOAT_C: tl.constexpr, FLOAT_M: tl.constexpr,
):  # fmt: skip
    """Pieces of both. The small one's programs come first: they are done before the others are."""
    launch_dependents()
    share = tl.program_id(1)
    if share < float_programs:
        multiply_share(
            share, x_ND, floats, None, None, None, float_out, None, None, None, None, 0.0, 1,
            num_tokens, num_floats, num_ins, num_ins, 0, float_steps, float_each, all_float_steps, num_floats,
            DTYPE, _FLOAT, 0, 1, 0, 1, FLOAT_EVEN, 1, False, 1, False, 1, FLOAT_B, FLOAT_C, FLOAT_M,
        )  # fmt: skip
    else:
        multiply_share(
            share - float_programs, x_ND, codes, scales, offsets, row_scales, out, None, None, None, None, 0.0, 1,
            num_tokens, num_outs, num_ins, row_stride, scale_stride, num_steps, steps_each, all_steps, num_outs,
            DTYPE, CODE, ZERO, HALVES, GROUP, ROWS, EVEN, TOGETHER, False, 1, False, 1, B, C, M,
        )  # fmt: skip


@triton.jit
def _add_block(
    pieces, columns, bias, out, num_columns, block, token, cut, squares, length_eps, length_parts,
    B: tl.constexpr, PIECES: tl.constexpr, EVENLY: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Of WIDTH outputs of one matrix."""
    _, num_outs, _, _ = cut
    outs = block * WIDTH + tl.arange(0, WIDTH)
    inside = outs < num_outs
    place = placed(outs, inside, columns)
    wait_for_previous_kernel()
    total = sum_pieces(pieces, outs, inside, token, cut, B, PIECES, EVENLY, WIDTH)
    squares_P = squares_of(squares, token, length_parts, LENGTH)
    total *= inverse_length(squares, squares_P, length_eps, LENGTH)
    put(total, place, token, inside, inside, bias, None, out, num_columns)


@triton.jit(do_not_specialize=[*CUT, "float_steps", "float_each", "float_blocks"])
def _add_pieces(
    pieces, columns, float_pieces, float_columns, bias, out, num_columns,
    num_tokens, num_outs, num_steps, steps_each, squares, length_eps, length_parts,
    num_floats, float_steps, float_each, float_blocks,
    B: tl.constexpr, PIECES: tl.constexpr, EVENLY: tl.constexpr,
    FLOAT_B: tl.constexpr, FLOAT_PIECES: tl.constexpr, FLOAT_EVENLY: tl.constexpr,
    LENGTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Of both, with the bias, into the columns that are theirs."""
    launch_dependents()
    block, token = tl.program_id(0), tl.program_id(1)
    if block < float_blocks:
        _add_block(
            float_pieces, float_columns, bias, out, num_columns, block, token,
            (num_tokens, num_floats, float_steps, float_each), squares, length_eps, length_parts,
            FLOAT_B, FLOAT_PIECES, FLOAT_EVENLY, LENGTH, WIDTH,
        )  # fmt: skip
    else:
        _add_block(
            pieces, columns, bias, out, num_columns, block - float_blocks, token,
            (num_tokens, num_outs, num_steps, steps_each), squares, length_eps, length_parts,
            B, PIECES, EVENLY, LENGTH, WIDTH,
        )  # fmt: skip


def add_both(pair: Pair, x_ND: Tensor, bias: Tensor | None, half: PartialNorm | None, out_NO: Tensor) -> None:
    """The products of at most FEW tokens, and the bias, into `out_NO`."""
    (packed, floats), num_tokens = pair, len(x_ND)
    assert num_tokens <= FEW
    width = width_for(num_tokens, packed)
    of_floats = floats.args(num_tokens, width_for(num_tokens, floats), SHORTER)
    pieces_PNO, float_pieces_PNO = (
        out_NO.new_empty((matrix.num_pieces, num_tokens, matrix.outs)) for matrix in (packed, floats)
    )
    _multiply[1, floats.programs + packed.programs](
        x_ND, out=pieces_PNO, float_out=float_pieces_PNO, float_programs=floats.programs,
        **packed.args(num_tokens, width), **{name: of_floats[own] for own, name in FLOATS.items()},
        **packed.options(width),
    )  # fmt: skip
    float_blocks = triton.cdiv(floats.outs, WIDTH)
    _add_pieces[float_blocks + triton.cdiv(packed.outs, WIDTH), num_tokens](
        pieces_PNO, packed.columns_O, float_pieces_PNO, floats.columns_O, bias, out_NO, out_NO.shape[1],
        **Pieces.of(packed, pieces_PNO, half).cut,
        num_floats=floats.outs, float_steps=floats.num_steps, float_each=floats.plan.steps_each,
        float_blocks=float_blocks, FLOAT_B=floats.plan.block_outs, FLOAT_PIECES=floats.num_pieces,
        FLOAT_EVENLY=floats.is_evenly_cut,
        WIDTH=WIDTH, **LAUNCH_OPTIONS,
    )  # fmt: skip
