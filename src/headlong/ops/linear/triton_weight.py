"""A weight as the GPU's GEMM reads it, and the launch configuration of that GEMM: by the weight's shape and the GPU's
multiprocessors alone.

Legend. N tokens (M in the kernels), O or `num_outs` outputs (N there), D or `num_ins` inputs (K there), P partial sums.
"""

# pyright: reportCallIssue=false, reportArgumentType=false

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler.compiler import max_shared_mem

from headlong.ops.linear.triton_gemm import CodeLayout, gemm_kernel
from headlong.ops.norm.normed import PartialNorm
from headlong.ops.norm.triton import norm_args
from headlong.ops.triton_launch import LAUNCH_OPTIONS

SPLITS_EACH, BYTE_SPLITS_EACH = 2, 5
"""The splits of a weight, one program each, for every multiprocessor; and those of an 8-bit weight, which is unpacked:
more programs hide more of that."""
BYTE_REGISTERS = 96
"""Registers of a thread of the programs for 8-bit weights, so that five of them fit on a multiprocessor."""
LEAST_STEPS = 4
"""The fewest steps of a split: fewer would not fill a program's pipeline."""
WHOLE_STEPS = 8
"""The steps of a tile up to which a program takes the whole tile: a launch that adds partial sums would cost more than
it saves."""
EVEN_TILES = 8
"""The tiles of a program from which on one more or less does not matter."""
COLUMNS = 64
"""Columns that are multiplied at once; twice as many for 16 bits, half as many for float32."""
FEW = 64
"""The tokens at once up to which two programs shall fit on a multiprocessor; with more tokens, one program keeps it
busy."""
STAGES_MEMORY, WIDE_MEMORY = 112 << 10, 160 << 10
"""Bytes of shared memory that a program's pipeline stages may take, for few tokens and for more."""
INTERLEAVE = 64
"""Outputs of packed weights whose codes lie together, step by step: a split is one stretch of memory."""
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class GemmConfig(NamedTuple):
    """How the GEMM of a weight is tiled, split and launched, whatever is multiplied by it."""

    block_n: int
    block_k: int
    steps_per_split: int
    """The steps that a program takes, of `block_k` columns each (twice as many if two share a word)."""
    num_warps: int
    num_stages: int
    """The most steps whose loads are under way at once."""
    max_registers: int | None
    """The registers of a thread, where few tokens are multiplied at once, so that all programs fit on the
    multiprocessors."""


def codes_per_word(bits: int) -> int:
    """Codes that share a word, each of them of one half of a step's columns."""
    return 2 if bits <= 8 else 1


def columns_at_once(bits: int) -> int:
    """Columns of a step, or of each half of it."""
    return {32: COLUMNS // 2, 16: 2 * COLUMNS}.get(bits, COLUMNS)


def gemm_config(num_outs: int, num_ins: int, *, bits: int = 16, multiprocessors: int = 132) -> GemmConfig:
    """How to split a weight of so many bits, so that every multiprocessor has as much to do."""
    columns = columns_at_once(bits)
    steps = triton.cdiv(num_ins, columns * codes_per_word(bits))
    if bits in (8, 16):
        num_splits, num_stages = (BYTE_SPLITS_EACH, 3) if bits == 8 else (SPLITS_EACH, 4)
        num_splits *= multiprocessors
        each = max(triton.cdiv(triton.cdiv(num_outs, 64) * steps, num_splits), LEAST_STEPS // 2)
        each = _steps_per_split(each, steps)
        return GemmConfig(64, columns, each, 4, num_stages, BYTE_REGISTERS if bits == 8 else None)
    num_splits = SPLITS_EACH * multiprocessors
    block = 128 if triton.cdiv(num_outs, 128) * steps >= 2 * LEAST_STEPS * num_splits else 64
    each = max(triton.cdiv(triton.cdiv(num_outs, block) * steps, num_splits), LEAST_STEPS)
    each = _steps_per_split(each, steps)
    num_stages = 3 if bits > 16 else 4
    if block == 128:
        return GemmConfig(block, columns, each, 8, num_stages, 128)
    return GemmConfig(block, columns, each, 4, num_stages, None)


def _steps_per_split(each: int, steps: int) -> int:
    """Steps of a program: whole tiles where these are short and programs stay as even."""
    short = steps <= WHOLE_STEPS and not max(steps, LEAST_STEPS) < each < EVEN_TILES * steps
    return triton.cdiv(each, steps) * steps if short else each


class WeightLayout(NamedTuple):
    """How a weight lies in memory: weights of one layout can be laid into one."""

    encoding: int
    """The encoding of its codes, one of those that triton_unpack.py names."""
    storage: torch.dtype
    bits: int
    group_size: int = 0
    """Columns that share a scale; 0 if none do."""
    scale_rows: int = 1
    """Outputs that share a scale, if they lie together."""
    zero_point: int = 0
    """The code of 0."""
    has_offsets: bool = False
    has_row_scales: bool = False
    """Whether each row has a scale of its own, beside those of groups."""

    def padded(self, num_ins: int) -> int:
        """Columns of all steps."""
        columns = columns_at_once(self.bits) * codes_per_word(self.bits)
        return triton.cdiv(num_ins, columns) * columns

    def words(self, num_ins: int) -> int:
        """Words that hold the codes of an output."""
        return (
            num_ins if codes_per_word(self.bits) == 1 else self.padded(num_ins) // codes_per_word(self.bits)
        )

    @property
    def interleave(self) -> int:
        """Outputs whose codes lie step by step; floats lie row by row, as they are stored."""
        return 1 if codes_per_word(self.bits) == 1 else INTERLEAVE

    @property
    def code_layout(self) -> CodeLayout:
        """What a kernel is compiled for of it."""
        return CodeLayout(
            self.encoding,
            self.zero_point,
            codes_per_word(self.bits),
            self.group_size,
            self.scale_rows,
            self.interleave,
        )


def interleaved(codes_OW: Tensor) -> Tensor:
    """Packed weights as they lie: [tiles, steps, outputs of a tile, words]; the last tile is filled up."""
    missing = -len(codes_OW) % INTERLEAVE
    codes_OW = torch.nn.functional.pad(codes_OW, (0, 0, 0, missing))
    return codes_OW.view(-1, INTERLEAVE, codes_OW.shape[1] // COLUMNS, COLUMNS).transpose(1, 2).contiguous()


@cache
def multiprocessors_of(device: torch.device) -> int:
    """How many there are; for the interpreter, as many as an H100 or H200 has."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program can have."""
    if device.type != "cuda":  # the interpreter asks for none
        return WIDE_MEMORY
    return max_shared_mem(torch.cuda.current_device() if device.index is None else device.index)


@dataclass(frozen=True, eq=False)
class GemmWeight:
    """A weight as the kernels read it; it may hold several weights of a checkpoint that are of one layout."""

    layout: WeightLayout
    dtype: torch.dtype
    """What is multiplied in."""
    num_outs: int
    num_ins: int
    codes: Tensor
    """[O, D] floats, else [tiles, steps, outputs of a tile, words]."""
    scales: Tensor | None
    """[groups, O], or, where `layout.scale_rows` outputs share one, [O / scale_rows, groups]; the kernels say why."""
    offsets_GO: Tensor | None
    row_scales_O: Tensor | None
    columns_O: Tensor | None
    """Which columns of a result the outputs are, if not all of them in order."""
    groups: int = 1
    """The groups that outputs fall into, each of which has `num_ins` inputs of its own."""

    @cached_property
    def config(self) -> GemmConfig:
        """How its GEMM is tiled and split."""
        multiprocessors = multiprocessors_of(self.codes.device)
        return gemm_config(
            self.num_outs, self.num_ins, bits=self.layout.bits, multiprocessors=multiprocessors
        )

    @property
    def steps_per_tile(self) -> int:
        """Steps along the inputs of one tile of outputs."""
        return self.layout.padded(self.num_ins) // (self.config.block_k * codes_per_word(self.layout.bits))

    @property
    def total_steps(self) -> int:
        """Steps of all tiles."""
        return triton.cdiv(self.num_outs, self.config.block_n) * self.steps_per_tile

    @property
    def num_splits(self) -> int:
        """Programs that share the steps."""
        return triton.cdiv(self.total_steps, self.config.steps_per_split)

    @cached_property
    def num_partials(self) -> int:
        """Partial sums of an output, at most."""
        return max(self._partials_of_tiles())

    @cached_property
    def has_even_splits(self) -> bool:
        """Whether all outputs have as many partial sums."""
        return len(self._partials_of_tiles()) == 1

    @property
    def is_split(self) -> bool:
        """Whether any output's sum is split over programs (split-K)."""
        return self.num_partials > 1

    def _partials_of_tiles(self) -> set[int]:
        steps, each = self.steps_per_tile, self.config.steps_per_split
        tiles = range(triton.cdiv(self.num_outs, self.config.block_n))
        return {(tile * steps + steps - 1) // each - tile * steps // each + 1 for tile in tiles}

    def partial_sums(self, x_ND: Tensor, block_m: int, *, inputs_ready: bool = False) -> Tensor:
        """The partial sums of all outputs, [P, N, O]; `block_m` tokens are multiplied at once. `inputs_ready`: see the
        kernel."""
        partials = x_ND.new_empty((self.num_partials, len(x_ND), self.num_outs), dtype=torch.float32)
        self._launch(
            x_ND, block_m, partials, stride_out=self.num_outs, inputs_ready=inputs_ready, split_k=True
        )
        return partials

    def gemm(
        self, x_ND: Tensor, block_m: int, bias: Tensor | None, residual_NO: Tensor | None, out_NO: Tensor,
        partial_norm: PartialNorm | None,
    ) -> None:  # fmt: skip
        """Sums that are not split, with the epilogue, into those columns of `out_NO` that are the weight's; divided by
        the norms of what `x_ND` belongs to."""
        self._launch(
            x_ND, block_m, out_NO, bias, residual_NO, self.columns_O, partial_norm, stride_out=out_NO.shape[1]
        )  # fmt: skip

    def gated_gemm(
        self,
        x_ND: Tensor,
        block_m: int,
        bias: Tensor | None,
        out_NI: Tensor,
        partial_norm: PartialNorm | None,
    ) -> None:
        """silu(first half of the outputs) · second half, of sums that are not split."""
        self._launch(
            x_ND, block_m, out_NI, bias, partial_norm=partial_norm, stride_out=out_NI.shape[1], parts=2
        )  # fmt: skip

    def _launch(
        self, x_ND: Tensor, block_m: int, out: Tensor, bias: Tensor | None = None, residual_NO: Tensor | None = None,
        columns_O: Tensor | None = None, partial_norm: PartialNorm | None = None, *,
        stride_out: int, split_k: bool = False, parts: int = 1, inputs_ready: bool = False,
    ) -> None:  # fmt: skip
        gemm_kernel[triton.cdiv(len(x_ND), block_m), self.num_splits](
            x_ND, out_ptr=out, bias_ptr=bias, residual_ptr=residual_NO, columns_ptr=columns_O, stride_out=stride_out,
            SPLIT_K=split_k, PARTS=parts, INPUTS_READY=inputs_ready, GROUPS=self.groups, **norm_args(partial_norm),
            **self.kernel_args(len(x_ND), block_m), **self.launch_options(block_m),
        )  # fmt: skip

    def kernel_args(self, num_tokens: int, block_m: int, shorter: int | None = None) -> dict[str, Any]:
        """The arguments of `gemm_kernel` that describe the weight and its tiling. Steps are `shorter` times shorter
        than the configuration's; as short as they best are, if it is not said."""
        config, layout, scales = self.config, self.layout, self.scales
        shorter = self._shorter(block_m) if shorter is None else shorter
        return {
            "codes_ptr": self.codes, "scales_ptr": scales, "offsets_ptr": self.offsets_GO,
            "row_scales_ptr": self.row_scales_O, "num_tokens": num_tokens, "num_outs": self.num_outs,
            "num_ins": self.num_ins, "stride_codes": layout.words(self.num_ins),
            "stride_scales": 0 if scales is None else scales.shape[1],
            "steps_per_tile": shorter * self.steps_per_tile, "steps_per_split": shorter * config.steps_per_split,
            "total_steps": shorter * self.total_steps, "DTYPE": DTYPES[self.dtype], "LAYOUT": layout.code_layout,
            "EVEN_K": layout.padded(self.num_ins) == self.num_ins,
            "BLOCK_N": config.block_n, "BLOCK_K": config.block_k // shorter, "BLOCK_M": block_m,
        }  # fmt: skip

    def launch_options(self, block_m: int) -> dict[str, Any]:
        """Triton's own options of a launch."""
        return {
            "num_warps": self.config.num_warps * (2 if block_m > 128 else 1),
            "num_stages": self._num_stages(block_m),
            "maxnreg": self._max_registers(block_m),
            **LAUNCH_OPTIONS,
        }

    def _max_registers(self, block_m: int) -> int | None:
        """More tokens need more registers, above all for few threads."""
        return self.config.max_registers if block_m <= 8 * self.config.num_warps else None

    def _shorter(self, block_m: int) -> int:
        """How many times shorter a step is than the configuration's, so that more steps are under way. Columns are
        multiplied in the same order, sixteen after sixteen, and sums split at the same ones."""
        return 2 if block_m > FEW and self.layout.bits == 16 else 1

    def _num_stages(self, block_m: int) -> int:
        """The configuration's, or as many as shared memory holds where many tokens are multiplied at once."""
        config, columns = self.config, self.config.block_k // self._shorter(block_m)
        codes = config.block_n * columns * self.codes.element_size()
        inputs = block_m * columns * codes_per_word(self.layout.bits) * self.dtype.itemsize
        memory = min(WIDE_MEMORY if block_m > FEW else STAGES_MEMORY, shared_memory(self.codes.device))
        return max(min(config.num_stages, memory // (codes + inputs)), 2)
