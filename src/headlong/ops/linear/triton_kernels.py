"""The kernels of y = x Wᵀ for few tokens: weights are streamed once, as narrow as they are stored.

All steps of a matrix, tile of outputs by tile and along each from its first columns to its last, are one line that is
cut into equal shares, one for each program. Where a share ends inside a tile, each program leaves a piece of the sum;
triton_pieces.py adds them in their order. Tiles, shares and pieces are cut the same whatever the number of tokens. How
many of these are multiplied at once depends on their number, but only where the device gives each the same bits
(triton_widths.py); so a token's bits do not depend on its company.

N tokens, D inputs, O outputs; a tile has B outputs, a step C columns, a program M tokens.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# Triton's own types describe neither its kernels nor their launch.

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.ops.linear.triton_unpack import INTERPRETED, decode
from headlong.ops.triton_launch import OPTIONS, let_next_start, wait

PROGRAMS = 264
"""That a matrix is shared by: two for each multiprocessor of the GPUs this is made for."""
BYTE_PROGRAMS = 660
"""That one of 8 bits is shared by: it is unpacked, and more programs hide more of that."""
BYTE_REGISTERS = 96
"""Of a thread of those, so that five programs fit on a multiprocessor."""
LEAST_STEPS = 4
"""Of a program: less would not fill its pipeline."""
COLUMNS = 64
"""That are multiplied at once; twice as many of 16 bits, half as many of float32."""
STAGES_MEMORY = 112 << 10
"""Bytes of a multiprocessor's own memory that a program's steps under way may take, so that two programs fit."""
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def dot(w_BC, x_CM, acc_BM):
    w_BC = w_BC.to(x_CM.dtype)
    if INTERPRETED:  # which takes the bits of bfloat16 for whole numbers
        w_BC, x_CM = w_BC.to(tl.float32), x_CM.to(tl.float32)
    return tl.dot(w_BC, x_CM, acc_BM, input_precision="ieee")


@triton.jit
def by_column(factors, outs_B, first_column, stride, B: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr):
    """Factors [groups, O] of groups shorter than a step, one for each weight of a tile."""
    groups = first_column // GROUP + tl.arange(0, C // GROUP)
    factors_BG = tl.load(factors + groups[None, :].to(tl.int64) * stride + outs_B[:, None]).to(tl.float32)
    return tl.broadcast_to(factors_BG[:, :, None], (B, C // GROUP, GROUP)).reshape(B, C)


@triton.jit
def add_step(
    acc_BM, x_CM_at, codes_BC, scales, offsets, outs_B, there_M, step, num_outs, num_ins, num_scaled,
    DTYPE: tl.constexpr, CODE: tl.constexpr, ZERO: tl.constexpr, HALVES: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr,
    B: tl.constexpr, C: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """The sum, and the product of a step's columns, one half after the other. `ROWS` outputs have one scale."""
    SHARED: tl.constexpr = 1 if GROUP % (HALVES * C) else HALVES  # halves that have a scale together
    scale_B = tl.zeros((B,), tl.float32)
    if scales is not None and GROUP >= C:  # on its way while the columns are multiplied
        scale_B = tl.load(scales + step * HALVES * C // GROUP * num_scaled + outs_B // ROWS).to(tl.float32)
    part_BM, total_M = tl.zeros((B, M), tl.float32), tl.zeros((M,), tl.float32)
    for half in tl.static_range(HALVES):
        first_column = (step * HALVES + half) * C
        if EVEN:
            x_CM = tl.load(x_CM_at + first_column, mask=there_M[None, :], other=0.0).to(DTYPE)
        else:
            inside = there_M[None, :] & (first_column + tl.arange(0, C) < num_ins)[:, None]
            x_CM = tl.load(x_CM_at + first_column, mask=inside, other=0.0).to(DTYPE)
        w_BC = decode(codes_BC, half, CODE, ZERO, DTYPE)
        if scales is None:
            acc_BM = dot(w_BC, x_CM, acc_BM)
        elif GROUP < C:
            w_BC = w_BC.to(tl.float32) * by_column(
                scales, outs_B // ROWS, first_column, num_scaled, B, C, GROUP
            )
            if offsets is not None:
                w_BC += by_column(offsets, outs_B, first_column, num_outs, B, C, GROUP)
            acc_BM = dot(w_BC, x_CM, acc_BM)
        else:
            if half % SHARED == 0:
                part_BM, total_M = tl.zeros((B, M), tl.float32), tl.zeros((M,), tl.float32)
            part_BM = dot(w_BC, x_CM, part_BM)
            if offsets is not None:
                total_M += tl.sum(x_CM.to(tl.float32), 0)
            group = (first_column // GROUP).to(tl.int64)
            if SHARED < HALVES and half > 0:
                scale_B = tl.load(scales + group * num_scaled + outs_B // ROWS).to(tl.float32)
            if half % SHARED == SHARED - 1:
                acc_BM += scale_B[:, None] * part_BM
                if offsets is not None:
                    acc_BM += tl.load(offsets + group * num_outs + outs_B)[:, None] * total_M[None, :]
    return acc_BM


@triton.jit(do_not_specialize=["num_tokens", "num_steps", "steps_each", "all_steps"])
def multiply(
    x_ND, codes, scales, offsets, row_scales, pieces,
    num_tokens, num_outs, num_ins, row_stride, num_scaled, num_steps, steps_each, all_steps,
    DTYPE: tl.constexpr, CODE: tl.constexpr, ZERO: tl.constexpr, HALVES: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr, LATE: tl.constexpr,
    B: tl.constexpr, C: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """A program's share: `steps_each` of the `all_steps`, of which a tile has `num_steps`, for M of the tokens."""
    if not LATE:
        let_next_start()
    wait()
    tokens_M = tl.program_id(0) * M + tl.arange(0, M)
    there_M = tokens_M < num_tokens
    first = tl.program_id(1) * steps_each
    last = tl.minimum(first + steps_each, all_steps)
    columns_C = tl.arange(0, C)
    x_CM_at = x_ND + tokens_M.to(tl.int64)[None, :] * num_ins + columns_C[:, None]
    last_tile = (last - 1) // num_steps
    for tile in range(first // num_steps, last_tile + 1):
        places_B = tile * B + tl.arange(0, B)
        # Outputs past the last are computed from the last one's weights and not stored.
        outs_B = tl.minimum(places_B, num_outs - 1)
        codes_at = codes + outs_B.to(tl.int64)[:, None] * row_stride + columns_C[None, :]
        acc_BM = tl.zeros((B, M), tl.float32)
        begin = tl.maximum(first - tile * num_steps, 0)
        end = tl.minimum(last - tile * num_steps, num_steps)
        for step in range(begin, end):
            if EVEN or HALVES == 2:
                codes_BC = tl.load(codes_at + step * C)
            else:
                codes_BC = tl.load(
                    codes_at + step * C, mask=(step * C + columns_C < num_ins)[None, :], other=0.0
                )
            acc_BM = add_step(
                acc_BM, x_CM_at, codes_BC, scales, offsets, outs_B, there_M, step, num_outs, num_ins, num_scaled,
                DTYPE, CODE, ZERO, HALVES, GROUP, ROWS, EVEN, B, C, M,
            )  # fmt: skip
        if LATE and tile == last_tile:
            let_next_start()
        if row_scales is not None:
            acc_BM *= tl.load(row_scales + outs_B)[:, None]
        piece = tl.program_id(1) - tile * num_steps // steps_each
        at = pieces + (piece * num_tokens + tokens_M).to(tl.int64)[None, :] * num_outs + places_B[:, None]
        tl.store(at, acc_BM, mask=(places_B < num_outs)[:, None] & there_M[None, :])


class Plan(NamedTuple):
    """How a matrix is cut, by its shape alone."""

    block_outs: int
    block_ins: int
    steps_each: int
    """Steps of `block_ins` columns (twice as many if two share a word) that a program takes."""
    num_warps: int
    num_stages: int
    """Steps that are under way at once, at most."""
    registers: int | None
    """Of a thread, at most, where few tokens are multiplied at once, so that as many programs as there are fit on the
    multiprocessors."""
    late: bool
    """Whether the next kernel is let start only when all is multiplied: its programs would take the place of ours."""


def halves(bits: int) -> int:
    """Codes to a word, each for one half of a step's columns."""
    return 2 if bits <= 8 else 1


def columns_at_once(bits: int) -> int:
    return {32: COLUMNS // 2, 16: 2 * COLUMNS}.get(bits, COLUMNS)


def plan_shape(outs: int, ins: int, *, bits: int = 16) -> Plan:
    """How to cut a matrix whose weights have so many bits, so that every multiprocessor has as much to do."""
    columns = columns_at_once(bits)
    steps = triton.cdiv(ins, columns * halves(bits))
    if bits in (8, 16):
        programs, num_stages = (BYTE_PROGRAMS, 3) if bits == 8 else (PROGRAMS, 4)
        each = max(triton.cdiv(triton.cdiv(outs, 64) * steps, programs), LEAST_STEPS // 2)
        return Plan(64, columns, each, 4, num_stages, BYTE_REGISTERS if bits == 8 else None, bits == 8)
    block = 128 if triton.cdiv(outs, 128) * steps >= 2 * LEAST_STEPS * PROGRAMS else 64
    each = max(triton.cdiv(triton.cdiv(outs, block) * steps, PROGRAMS), LEAST_STEPS)
    num_stages = 3 if bits > 16 else 4
    if block == 128:
        return Plan(block, columns, each, 8, num_stages, 128, False)
    return Plan(block, columns, each, 4, num_stages, None, False)


class Kind(NamedTuple):
    """What decides how weights lie in memory: those of one kind lie in one matrix."""

    code: int
    stored: torch.dtype
    bits: int
    group: int = 0
    """Columns that share a scale; 0 if none do."""
    rows: int = 1
    """Outputs that share a scale, if they lie together."""
    zero: int = 0
    """The code of 0."""
    has_offsets: bool = False
    row_scaled: bool = False
    """Whether each row has a scale of its own, beside those of groups."""

    def padded(self, ins: int) -> int:
        """Columns of all steps."""
        columns = columns_at_once(self.bits) * halves(self.bits)
        return triton.cdiv(ins, columns) * columns


@dataclass(frozen=True, eq=False)
class Matrix:
    """Weights of one kind, as the kernels read them."""

    kind: Kind
    dtype: torch.dtype
    """What is multiplied in."""
    ins: int
    codes_OC: Tensor
    scales_GO: Tensor | None
    offsets_GO: Tensor | None
    row_scales_O: Tensor | None
    columns_O: Tensor | None
    """Where outputs go, if not one beside the other from the first on."""

    @property
    def outs(self) -> int:
        return self.codes_OC.shape[0]

    @cached_property
    def plan(self) -> Plan:
        return plan_shape(self.outs, self.ins, bits=self.kind.bits)

    @property
    def num_steps(self) -> int:
        """Of a tile."""
        return self.kind.padded(self.ins) // (self.plan.block_ins * halves(self.kind.bits))

    @cached_property
    def num_pieces(self) -> int:
        """Of one sum, at most."""
        steps, each = self.num_steps, self.plan.steps_each
        tiles = range(triton.cdiv(self.outs, self.plan.block_outs))
        return max((tile * steps + steps - 1) // each - tile * steps // each + 1 for tile in tiles)

    @property
    def all_steps(self) -> int:
        return triton.cdiv(self.outs, self.plan.block_outs) * self.num_steps

    def multiply(self, x_ND: Tensor, width: int) -> Tensor:
        """The pieces of all sums, [pieces, N, outs]; `width` tokens are multiplied at once."""
        num_tokens, plan, kind = len(x_ND), self.plan, self.kind
        pieces = x_ND.new_empty((self.num_pieces, num_tokens, self.outs), dtype=torch.float32)
        multiply[triton.cdiv(num_tokens, width), triton.cdiv(self.all_steps, plan.steps_each)](
            x_ND, self.codes_OC, self.scales_GO, self.offsets_GO, self.row_scales_O, pieces,
            num_tokens, self.outs, self.ins, self.codes_OC.stride(0),
            0 if self.scales_GO is None else self.scales_GO.shape[1], self.num_steps, plan.steps_each,
            self.all_steps,
            DTYPE=DTYPES[self.dtype], CODE=kind.code, ZERO=kind.zero, HALVES=halves(kind.bits),
            GROUP=kind.group, ROWS=kind.rows, EVEN=kind.padded(self.ins) == self.ins, LATE=plan.late,
            B=plan.block_outs, C=plan.block_ins, M=width,
            num_warps=plan.num_warps * (2 if width > 128 else 1), num_stages=self._num_stages(width),
            maxnreg=self._registers(width), **OPTIONS,
        )  # fmt: skip
        return pieces

    def _registers(self, width: int) -> int | None:
        """More tokens need more of them, above all for few threads."""
        return self.plan.registers if width <= 8 * self.plan.num_warps else None

    def _num_stages(self, width: int) -> int:
        """The plan's, or as many as there is room for where many tokens are multiplied at once."""
        plan = self.plan
        codes = plan.block_outs * plan.block_ins * self.codes_OC.element_size()
        inputs = width * plan.block_ins * halves(self.kind.bits) * self.dtype.itemsize
        return max(min(plan.num_stages, STAGES_MEMORY // (codes + inputs)), 2)
