"""A weight as the GPU's kernels read it, and how it is cut: by its shape alone."""

# pyright: reportCallIssue=false, reportArgumentType=false

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler.compiler import max_shared_mem

from headlong.ops.linear.triton_gemm import multiply
from headlong.ops.norm.normed import PartialNorm
from headlong.ops.norm.triton import length_args
from headlong.ops.triton_launch import LAUNCH_OPTIONS

PROGRAMS = 264
"""That a matrix is shared by: two for each multiprocessor of the GPUs this is made for."""
BYTE_PROGRAMS = 660
"""That one of 8 bits is shared by: it is unpacked, and more programs hide more of that."""
BYTE_REGISTERS = 96
"""Of a thread of those, so that five programs fit on a multiprocessor."""
LEAST_STEPS = 4
"""Of a program: less would not fill its pipeline."""
WHOLE_STEPS = 8
"""Of a tile, up to which a program takes all: a launch that adds pieces would cost more than it saves."""
EVEN_TILES = 8
"""Of a program; one more or less does not matter then."""
COLUMNS = 64
"""That are multiplied at once; twice as many of 16 bits, half as many of float32."""
FEW = 64
"""Tokens at once up to which two programs shall fit on a multiprocessor; of more, one keeps it busy."""
STAGES_MEMORY, WIDE_MEMORY = 112 << 10, 160 << 10
"""Bytes of a multiprocessor's own memory that a program's steps under way may take, for few tokens and for more."""
TOGETHER = 64
"""Outputs of packed weights whose codes lie together, step by step: a share is one stretch of memory."""
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


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
        each = _share(each, steps)
        return Plan(64, columns, each, 4, num_stages, BYTE_REGISTERS if bits == 8 else None)
    block = 128 if triton.cdiv(outs, 128) * steps >= 2 * LEAST_STEPS * PROGRAMS else 64
    each = _share(max(triton.cdiv(triton.cdiv(outs, block) * steps, PROGRAMS), LEAST_STEPS), steps)
    num_stages = 3 if bits > 16 else 4
    if block == 128:
        return Plan(block, columns, each, 8, num_stages, 128)
    return Plan(block, columns, each, 4, num_stages, None)


def _share(each: int, steps: int) -> int:
    """Steps of a program: whole tiles where these are short and programs stay as even."""
    short = steps <= WHOLE_STEPS and not max(steps, LEAST_STEPS) < each < EVEN_TILES * steps
    return triton.cdiv(each, steps) * steps if short else each


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

    def words(self, ins: int) -> int:
        """Of an output."""
        return ins if halves(self.bits) == 1 else self.padded(ins) // halves(self.bits)

    @property
    def together(self) -> int:
        """Outputs whose codes lie step by step; floats lie row by row, as they are stored."""
        return 1 if halves(self.bits) == 1 else TOGETHER


def tiled(codes_OW: Tensor) -> Tensor:
    """Packed weights as they lie: [tiles, steps, outputs of a tile, words]; the last tile is filled up."""
    missing = -len(codes_OW) % TOGETHER
    codes_OW = torch.nn.functional.pad(codes_OW, (0, 0, 0, missing))
    return codes_OW.view(-1, TOGETHER, codes_OW.shape[1] // COLUMNS, COLUMNS).transpose(1, 2).contiguous()


@cache
def memory_of(device: torch.device) -> int:
    """Bytes that one program can have of a multiprocessor's own memory."""
    if device.type != "cuda":  # the interpreter asks for none
        return WIDE_MEMORY
    return max_shared_mem(torch.cuda.current_device() if device.index is None else device.index)


@dataclass(frozen=True, eq=False)
class Matrix:
    """Weights of one kind, as the kernels read them."""

    kind: Kind
    dtype: torch.dtype
    """What is multiplied in."""
    outs: int
    ins: int
    codes: Tensor
    """[O, D] floats, else [tiles, steps, outputs of a tile, words]."""
    scales: Tensor | None
    """[groups, O], or, where `kind.rows` outputs share one, [O / rows, groups]; the kernels say why."""
    offsets_GO: Tensor | None
    row_scales_O: Tensor | None
    columns_O: Tensor | None
    """Where outputs go, if not one beside the other from the first on."""

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
        return max(self._pieces_of_tiles())

    @cached_property
    def is_evenly_cut(self) -> bool:
        """Whether all sums have as many."""
        return len(self._pieces_of_tiles()) == 1

    def _pieces_of_tiles(self) -> set[int]:
        steps, each = self.num_steps, self.plan.steps_each
        tiles = range(triton.cdiv(self.outs, self.plan.block_outs))
        return {(tile * steps + steps - 1) // each - tile * steps // each + 1 for tile in tiles}

    @property
    def all_steps(self) -> int:
        return triton.cdiv(self.outs, self.plan.block_outs) * self.num_steps

    @property
    def is_whole(self) -> bool:
        """Whether no sum is cut into pieces."""
        return self.num_pieces == 1

    def multiply(self, x_ND: Tensor, width: int, *, known: bool = False) -> Tensor:
        """The pieces of all sums, [pieces, N, outs]; `width` tokens are multiplied at once. `known`: see the kernel."""
        pieces = x_ND.new_empty((self.num_pieces, len(x_ND), self.outs), dtype=torch.float32)
        self._launch(x_ND, width, pieces, num_columns=self.outs, known=known)
        return pieces

    def put(
        self, x_ND: Tensor, width: int, bias: Tensor | None, residual_NO: Tensor | None, out_NO: Tensor,
        half: PartialNorm | None,
    ) -> None:  # fmt: skip
        """Whole sums into those columns of `out_NO` that are the matrix's, divided by the lengths of what `x_ND` is
        half of."""
        self._launch(
            x_ND, width, out_NO, bias, residual_NO, self.columns_O, half, num_columns=out_NO.shape[1], whole=True
        )  # fmt: skip

    def put_gated(
        self, x_ND: Tensor, width: int, bias: Tensor | None, out_NI: Tensor, half: PartialNorm | None
    ) -> None:
        """silu(first half of the outputs) · second half."""
        self._launch(x_ND, width, out_NI, bias, half=half, num_columns=out_NI.shape[1], whole=True, parts=2)

    def _launch(
        self, x_ND: Tensor, width: int, out: Tensor, bias: Tensor | None = None, residual_NO: Tensor | None = None,
        columns_O: Tensor | None = None, half: PartialNorm | None = None, *,
        num_columns: int, whole: bool = False, parts: int = 1, known: bool = False,
    ) -> None:  # fmt: skip
        multiply[triton.cdiv(len(x_ND), width), self.programs](
            x_ND, out=out, bias=bias, residual=residual_NO, columns=columns_O, num_columns=num_columns,
            WHOLE=whole, PARTS=parts, KNOWN=known, **length_args(half),
            **self.args(len(x_ND), width), **self.options(width),
        )  # fmt: skip

    @property
    def programs(self) -> int:
        """That share it."""
        return triton.cdiv(self.all_steps, self.plan.steps_each)

    def args(self, num_tokens: int, width: int, shorter: int | None = None) -> dict[str, Any]:
        """Of a launch, as `multiply` calls them, but for what it is multiplied with and where sums go. Steps are
        `shorter` than the plan's; as short as they best are, if it is not said."""
        plan, kind, scales = self.plan, self.kind, self.scales
        shorter = self._shorter(width) if shorter is None else shorter
        return {
            "codes": self.codes, "scales": scales, "offsets": self.offsets_GO, "row_scales": self.row_scales_O,
            "num_tokens": num_tokens, "num_outs": self.outs, "num_ins": self.ins, "row_stride": kind.words(self.ins),
            "scale_stride": 0 if scales is None else scales.shape[1], "num_steps": shorter * self.num_steps,
            "steps_each": shorter * plan.steps_each, "all_steps": shorter * self.all_steps,
            "DTYPE": DTYPES[self.dtype], "CODE": kind.code, "ZERO": kind.zero, "HALVES": halves(kind.bits),
            "GROUP": kind.group, "ROWS": kind.rows, "EVEN": kind.padded(self.ins) == self.ins,
            "TOGETHER": kind.together, "B": plan.block_outs, "C": plan.block_ins // shorter, "M": width,
        }  # fmt: skip

    def options(self, width: int) -> dict[str, Any]:
        """Of a launch, as Triton calls them."""
        return {
            "num_warps": self.plan.num_warps * (2 if width > 128 else 1),
            "num_stages": self._num_stages(width),
            "maxnreg": self._registers(width),
            **LAUNCH_OPTIONS,
        }

    def _registers(self, width: int) -> int | None:
        """More tokens need more of them, above all for few threads."""
        return self.plan.registers if width <= 8 * self.plan.num_warps else None

    def _shorter(self, width: int) -> int:
        """By what a step is shorter than the plan's, so that more of them are under way. Columns are multiplied in the
        same order, sixteen after sixteen, and pieces cut at the same ones."""
        return 2 if width > FEW and self.kind.bits == 16 else 1

    def _num_stages(self, width: int) -> int:
        """The plan's, or as many as there is room for where many tokens are multiplied at once."""
        plan, columns = self.plan, self.plan.block_ins // self._shorter(width)
        codes = plan.block_outs * columns * self.codes.element_size()
        inputs = width * columns * halves(self.kind.bits) * self.dtype.itemsize
        room = min(WIDE_MEMORY if width > FEW else STAGES_MEMORY, memory_of(self.codes.device))
        return max(min(plan.num_stages, room // (codes + inputs)), 2)
