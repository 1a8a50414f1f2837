"""What becomes of sums, so that it costs no launch of its own: bias and residual, half of a norm, an MLP's gate, the
best token. Where `multiply` leaves pieces of them, these are added first, one after the other.

Which outputs a program takes does not change how their pieces are added.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.ops.argmax.triton import best_of_parts, first_best
from headlong.ops.linear.triton_gemm import placed, put
from headlong.ops.linear.triton_weight import Matrix
from headlong.ops.norm.normed import Norm, PartialNorm
from headlong.ops.norm.triton import inverse_length, length_args, put_half_normed, room_args, squares_of
from headlong.ops.silu_mul.triton import gated
from headlong.ops.triton_launch import LAUNCH_OPTIONS, launch_dependents, wait_for_previous_kernel

WIDTH = 256
"""Outputs whose pieces a program adds."""
COMPARED = 1024
"""Outputs of which a program finds the best."""
CUT = ["num_tokens", "num_steps", "steps_each", "length_parts"]
"""What no kernel is made for: one serves all."""
WHOLE: dict[str, object] = {
    "num_tokens": 1,
    "num_outs": 1,
    "num_steps": 1,
    "steps_each": 1,
    "B": 1,
    "PIECES": 1,
    "EVENLY": True,
    **length_args(None),
}
"""How sums are found of which nothing is left to add."""


class Pieces(NamedTuple):
    """Sums, [pieces, N, outs], which kernels find by `cut` and add by `sum_pieces`."""

    tensor: Tensor
    cut: dict[str, object]

    @classmethod
    def of(cls, matrix: Matrix, pieces_PNO: Tensor, half: PartialNorm | None) -> "Pieces":
        """`half` is what was multiplied, if its other half is still to come."""
        cut = {
            "num_tokens": pieces_PNO.shape[1],
            "num_outs": matrix.outs,
            "num_steps": matrix.num_steps,
            "steps_each": matrix.plan.steps_each,
            "B": matrix.plan.block_outs,
            "PIECES": matrix.num_pieces,
            "EVENLY": matrix.is_evenly_cut,
            **length_args(half),
        }
        return cls(pieces_PNO, cut)

    @classmethod
    def whole(cls, sums_NO: Tensor) -> "Pieces":
        """Nothing is left to add."""
        tokens, outs = sums_NO.shape
        return cls(sums_NO.contiguous(), {**WHOLE, "num_tokens": tokens, "num_outs": outs})


@triton.jit
def sum_pieces(
    pieces, outs, inside, token, cut,
    B: tl.constexpr, PIECES: tl.constexpr, EVENLY: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Some outputs of a token, still to be divided by its length. Where all tiles are cut EVENLY, nobody has to find
    out how many pieces there are: that takes divisions, which compilers leave for after the wait."""
    num_tokens, num_outs, num_steps, steps_each = cut
    num_pieces = PIECES
    if not EVENLY:
        first_step = outs // B * num_steps
        num_pieces = (first_step + num_steps - 1) // steps_each - first_step // steps_each + 1
    total = tl.zeros((WIDTH,), tl.float32)
    for piece in tl.static_range(PIECES):
        at = pieces + (piece * num_tokens + token).to(tl.int64) * num_outs + outs
        there = inside if EVENLY else inside & (piece < num_pieces)
        total += tl.load(at, mask=there, other=0.0)
    return total


@triton.jit(do_not_specialize=CUT)
def add_pieces(
    pieces, bias, residual, columns, out, num_columns, norm_weight, normed, normed_squares, normed_parts,
    num_tokens, num_outs, num_steps, steps_each, squares, length_eps, length_parts,
    B: tl.constexpr, PIECES: tl.constexpr, EVENLY: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    cut = (num_tokens, num_outs, num_steps, steps_each)
    launch_dependents()
    outs = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    token = tl.program_id(1)
    inside = outs < num_outs
    weight_W = tl.zeros((WIDTH,), tl.float32)
    if norm_weight is not None:
        weight_W = tl.load(norm_weight + outs, mask=inside, other=0.0).to(tl.float32)
    place = placed(outs, inside, columns)
    wait_for_previous_kernel()
    total = sum_pieces(pieces, outs, inside, token, cut, B, PIECES, EVENLY, WIDTH)
    squares_P = squares_of(squares, token, length_parts, LENGTH)
    total *= inverse_length(squares, squares_P, length_eps, LENGTH)
    total = put(total, place, token, inside, inside, bias, residual, out, num_columns)
    if norm_weight is not None:
        put_half_normed(
            total, outs, inside, token, tl.program_id(0), weight_W, normed, normed_squares, num_outs, normed_parts,
            WIDTH,
        )  # fmt: skip


@triton.jit(do_not_specialize=CUT)
def gate_pieces(
    pieces, bias, out,
    num_tokens, num_outs, num_steps, steps_each, squares, length_eps, length_parts,
    B: tl.constexpr, PIECES: tl.constexpr, EVENLY: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The first half of the outputs are gates of the second."""
    cut = (num_tokens, num_outs, num_steps, steps_each)
    launch_dependents()
    size = num_outs // 2
    gates = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    token = tl.program_id(1)
    inside = gates < size
    wait_for_previous_kernel()
    gate = sum_pieces(pieces, gates, inside, token, cut, B, PIECES, EVENLY, WIDTH)
    up = sum_pieces(pieces, gates + size, inside, token, cut, B, PIECES, EVENLY, WIDTH)
    squares_P = squares_of(squares, token, length_parts, LENGTH)
    inverse = inverse_length(squares, squares_P, length_eps, LENGTH)
    gate, up = gate * inverse, up * inverse
    if bias is not None:
        gate += tl.load(bias + gates, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias + size + gates, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * size + gates, gated(gate, up), mask=inside)


@triton.jit(do_not_specialize=CUT)
def best_of_pieces(
    pieces, bias, tops, indices,
    num_tokens, num_outs, num_steps, steps_each, squares, length_eps, length_parts,
    B: tl.constexpr, PIECES: tl.constexpr, EVENLY: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The best of some outputs, and which it is."""
    cut = (num_tokens, num_outs, num_steps, steps_each)
    launch_dependents()
    part, token, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    outs = part * WIDTH + tl.arange(0, WIDTH)
    inside = outs < num_outs
    wait_for_previous_kernel()
    total = sum_pieces(pieces, outs, inside, token, cut, B, PIECES, EVENLY, WIDTH)
    squares_P = squares_of(squares, token, length_parts, LENGTH)
    total *= inverse_length(squares, squares_P, length_eps, LENGTH)
    if bias is not None:
        total += tl.load(bias + outs, mask=inside, other=0.0).to(tl.float32)
    top, first = first_best(total, outs, inside)
    at = token.to(tl.int64) * parts + part
    tl.store(tops + at, top)
    tl.store(indices + at, first)


def add(
    matrix: Matrix, x_ND: Tensor, width: int, bias: Tensor | None, residual_NO: Tensor | None, out_NO: Tensor,
    half: PartialNorm | None = None, then: Norm | None = None, room: PartialNorm | None = None,
) -> None:  # fmt: skip
    """The product, the bias and the residual, into those columns of `out_NO` that are the matrix's. `half` is what
    `x_ND` belongs to, if sums are still to be divided; the first half of what comes `then` goes
    into `room`, of a product in pieces alone."""
    if matrix.is_whole:
        matrix.put(x_ND, width, bias, residual_NO, out_NO, half)
        return
    pieces_PNO = matrix.multiply(x_ND, width)
    add_pieces[triton.cdiv(matrix.outs, WIDTH), len(out_NO)](
        pieces_PNO, bias, residual_NO, matrix.columns_O, out_NO, out_NO.shape[1],
        *room_args(then, room),
        **Pieces.of(matrix, pieces_PNO, half).cut, WIDTH=WIDTH, **LAUNCH_OPTIONS,
    )  # fmt: skip


def gate(
    matrix: Matrix, x_ND: Tensor, width: int, bias: Tensor | None, out_NI: Tensor, half: PartialNorm | None = None
) -> None:  # fmt: skip
    """silu(first half of the outputs) · second half."""
    if matrix.is_whole:
        matrix.put_gated(x_ND, width, bias, out_NI, half)
        return
    pieces_PNO = matrix.multiply(x_ND, width)
    gate_pieces[triton.cdiv(out_NI.shape[1], WIDTH), len(out_NI)](
        pieces_PNO, bias, out_NI, **Pieces.of(matrix, pieces_PNO, half).cut, WIDTH=WIDTH, **LAUNCH_OPTIONS
    )


def best(matrix: Matrix, x_ND: Tensor, width: int, bias: Tensor | None, found_N: Tensor) -> None:
    """Which output is the largest, for each token; of equal ones the first, and what is no number wins."""
    pieces_PNO = matrix.multiply(x_ND, width)
    num_tokens, parts = pieces_PNO.shape[1], triton.cdiv(matrix.outs, COMPARED)
    tops_NP = pieces_PNO.new_empty(num_tokens, parts)
    indices_NP = pieces_PNO.new_empty(num_tokens, parts, dtype=torch.int32)
    best_of_pieces[parts, num_tokens](
        pieces_PNO, bias, tops_NP, indices_NP,
        **Pieces.of(matrix, pieces_PNO, None).cut, WIDTH=COMPARED, **LAUNCH_OPTIONS,
    )  # fmt: skip
    best_of_parts(tops_NP, indices_NP, found_N)
