"""The GEMM of many tokens on Hopper GPUs in CUDA C++ (ops/cuda/prompt_gemm.cu): its variants, and how it is launched.

Whether it serves, prompt_gemm.py decides. N tokens, O outputs, I gated outputs, D inputs.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

import triton
from torch import Tensor

from headlong.ops.cuda.driver import Box, Kernel, TensorMap
from headlong.ops.cuda.nvrtc import machine_code
from headlong.ops.linear.triton_weight import GemmWeight, multiprocessors_of

SOURCE = Path(__file__).parents[1] / "cuda" / "prompt_gemm.cu"
BLOCK_OUTS, SPLIT_TILE = 128, 64
"""Outputs of a block, and of a tile that is cut along K."""
COLUMNS, ROWS_AT_ONCE = 64, 8
"""Columns of a swizzled tile; rows of which the swizzle repeats itself."""
THREADS, SHARED_MEMORY = 384, 226 << 10
"""Threads of a block; and bytes that its ring of stages may take, with what aligning it costs."""


class Variant(NamedTuple):
    """What the kernel is compiled for."""

    block_tokens: int
    gated: bool
    codes: bool
    grouped: bool
    out_bits: int
    experts: bool = False

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: weights and tokens."""
        return 128 * BLOCK_OUTS + 2 * self.step_columns * self.block_tokens

    @property
    def step_columns(self) -> int:
        """Columns of a stage."""
        return 2 * COLUMNS if self.codes else COLUMNS

    @property
    def block_outs(self) -> int:
        """Outputs of a block; with gates there are as many ups besides."""
        return SPLIT_TILE if self.gated else BLOCK_OUTS

    @property
    def stages(self) -> int:
        return (SHARED_MEMORY - 1024) // self.stage_bytes

    @property
    def options(self) -> list[str]:
        sizes = {
            "BN": self.block_tokens,
            "STAGES": self.stages,
            "GATED": int(self.gated),
            "CODES": int(self.codes),
        }
        sizes |= {"GROUPED": int(self.grouped), "OUT_BITS": self.out_bits, "EXPERTS": int(self.experts)}
        return [
            "--gpu-architecture=sm_90a",
            "-std=c++17",
            *(f"-D{name}={size}" for name, size in sizes.items()),
        ]

    @property
    def source(self) -> str:
        return SOURCE.read_text().replace("@WGMMA@", wgmma(self.block_tokens, registers=self.codes))

    @cache  # noqa: B019 - a handful of variants
    def kernel(self) -> Kernel:
        """Compiled and loaded, once."""
        code = machine_code(self.source, self.options)
        memory = self.stages * self.stage_bytes + 1024
        return Kernel(code, "prompt_gemm", threads=THREADS, shared_memory=memory)


def wgmma(block_tokens: int, *, registers: bool) -> str:
    """The function `multiply`: 64 outputs by so many tokens by 16 columns, added to `sums` where `add` is not 0.
    Weights come from `registers` or from shared memory."""
    count = block_tokens // 2
    operands = 4 if registers else 1
    names = ", ".join(f"%{i}" for i in range(count))
    weights = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}" if registers else f"%{count}"
    tokens, add = count + operands, count + operands + 1
    immediates = "1, 1, 0" if registers else "1, 1, 0, 0"
    given = ", ".join(f'"r"(weights[{i}])' for i in range(4)) if registers else '"l"(weights)'
    outs = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    return f"""
__device__ __forceinline__ void multiply(
    float (&sums)[{count}], {"const u32 (&weights)[4]" if registers else "u64 weights"}, u64 tokens, int add) {{
    asm volatile(
        "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{add}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{block_tokens}k16.f32.bf16.bf16 "
        "{{{names}}}, {weights}, %{tokens}, p, {immediates};\\n}}\\n"
        : {outs} : {given}, "l"(tokens), "r"(add));
}}
"""


class Shape(ctypes.Structure):
    """`Shape` of the kernel."""

    _fields_ = tuple(
        (name, ctypes.c_uint32)
        for name in (
            "num_tokens", "num_outs", "steps", "steps_per_tile", "steps_per_split",
            "token_tiles", "out_tiles", "scale_rows", "stride_scales", "stride_expert_scales",
        )
    )  # fmt: skip


def launch(
    weight: GemmWeight, x_ND: Tensor, out: Tensor, inverse_norms_N: Tensor | None, variant: Variant
) -> None:
    """Multiplies. `out` is [N, O] in float32, or with a gated variant [N, I]."""
    outs = weight.num_outs // 2 if variant.gated else weight.num_outs
    shape = Shape(
        num_tokens=len(x_ND),
        num_outs=outs,
        steps=triton.cdiv(weight.num_ins, variant.step_columns),
        steps_per_tile=weight.steps_per_tile,
        steps_per_split=weight.config.steps_per_split,
        token_tiles=triton.cdiv(len(x_ND), variant.block_tokens),
        out_tiles=triton.cdiv(outs, variant.block_outs),
        scale_rows=weight.layout.scale_rows,
        stride_scales=0 if weight.scales is None else weight.scales.shape[1],
    )
    maps = (weight_map(weight.codes, weight.num_ins, outs, variant), token_map(x_ND, variant))
    factors = (weight.scales, weight.row_scales_O, inverse_norms_N)
    blocks = min(multiprocessors_of(x_ND.device), shape.token_tiles * shape.out_tiles)
    variant.kernel()(blocks, (*maps, shape, None, *factors, None, out))


def token_map(x_ND: Tensor, variant: Variant) -> TensorMap:
    """How tokens are brought: 64 columns of a block's tokens at a time."""
    num_tokens, num_ins = x_ND.shape
    return Box((num_ins, num_tokens), (num_ins,), (COLUMNS, variant.block_tokens)).map(x_ND)


def weight_map(codes: Tensor, ins: int, outs: int, variant: Variant) -> TensorMap:
    """How weights are brought, of one weight or of all experts; `outs` is what comes out, with gates half of the
    weight's outputs."""
    if variant.codes:
        return Box((COLUMNS, codes.numel() // COLUMNS), (COLUMNS,), (COLUMNS, SPLIT_TILE)).map(codes)
    if not variant.gated:
        return Box((ins, codes.numel() // ins), (ins,), (COLUMNS, BLOCK_OUTS)).map(codes)
    experts, rows = codes.numel() // (2 * outs * ins), ROWS_AT_ONCE
    sizes, strides = (ins, rows, 2, outs // rows, experts), (ins, outs * ins, rows * ins, 2 * outs * ins)
    return Box(sizes, strides, (COLUMNS, rows, 2, SPLIT_TILE // rows, 1)).map(codes)
