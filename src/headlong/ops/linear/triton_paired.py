"""A paired GEMM: a packed weight and a small weight of floats over the same inputs, for few tokens in one launch.

FP8 checkpoints leave small projections as they are, such as those of a DeltaNet's β and decay. By themselves they take
hardly less time than a large GEMM: most of it is begin and end. Both are split, like every GEMM.

Legend. As in triton_gemm.py and triton_split_k.py for the packed weight; the same names with `float` in them are of the
small one, of whose programs (`float_splits`, `float_blocks`) there are so many.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from headlong.ops.linear.triton_block_m import block_m_for
from headlong.ops.linear.triton_gemm import gemm_split, load_columns, store_epilogue
from headlong.ops.linear.triton_split_k import BLOCK, UNSPECIALIZED, PartialSums, sum_partials
from headlong.ops.linear.triton_unpack import FLOAT, INTERPRETED
from headlong.ops.linear.triton_weight import FEW, GemmWeight
from headlong.ops.norm.normed import PartialNorm
from headlong.ops.norm.triton import inverse_norm, load_squares
from headlong.ops.triton_launch import LAUNCH_OPTIONS, launch_dependents, wait_for_previous_kernel

MOST_FLOATS = 512
"""The most outputs of the small weight."""
SHORTER = 1 if INTERPRETED.value else 2
"""How many times shorter the small weight's steps are than its configuration's, so that they have as many bytes as a
packed weight's. In the interpreter, whose products promise nothing, they are no shorter."""
FLOAT_ARGS = {
    "codes_ptr": "floats_ptr",
    "num_outs": "num_float_outs",
    "steps_per_tile": "float_steps_per_tile",
    "steps_per_split": "float_steps_per_split",
    "total_steps": "total_float_steps",
    "LAYOUT": "FLOAT_LAYOUT",
    "EVEN_K": "FLOAT_EVEN_K",
    "BLOCK_N": "FLOAT_BLOCK_N",
    "BLOCK_K": "FLOAT_BLOCK_K",
    "BLOCK_M": "FLOAT_BLOCK_M",
}
"""The names that `paired_gemm_kernel` has for the small weight's arguments; it shares the others, or does not have
them."""


class Pair(NamedTuple):
    """A packed weight and a small one of floats, both split."""

    packed: GemmWeight
    floats: GemmWeight

    @classmethod
    def of(cls, weights: Sequence[GemmWeight]) -> "Pair | None":
        """Makes a pair of these weights, or returns None if they are none."""
        if len(weights) != 2 or not all(weight.is_split for weight in weights):
            return None
        packed, floats = sorted(weights, key=lambda weight: weight.layout.bits)
        is_small = floats.num_outs <= MOST_FLOATS
        are_floats = floats.layout.encoding == FLOAT and floats.layout.bits == 16
        alike = packed.layout.encoding != FLOAT and packed.dtype == floats.dtype
        return cls(packed, floats) if is_small and are_floats and alike else None


@triton.jit(
    do_not_specialize=[
        "num_tokens", "steps_per_tile", "steps_per_split", "total_steps",
        "float_steps_per_tile", "float_steps_per_split", "total_float_steps", "float_splits",
    ]
)  # fmt: skip
def paired_gemm_kernel(
    x_ptr, codes_ptr, scales_ptr, offsets_ptr, row_scales_ptr, out_ptr, floats_ptr, float_out_ptr,
    num_tokens, num_outs, num_ins, stride_codes, stride_scales, steps_per_tile, steps_per_split, total_steps,
    num_float_outs, float_steps_per_tile, float_steps_per_split, total_float_steps, float_splits,
    DTYPE: tl.constexpr, LAYOUT: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
    FLOAT_LAYOUT: tl.constexpr, FLOAT_EVEN_K: tl.constexpr,
    FLOAT_BLOCK_N: tl.constexpr, FLOAT_BLOCK_K: tl.constexpr, FLOAT_BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Partial sums of both weights. The small one's programs come first: they are done before the others are."""
    launch_dependents()
    split = tl.program_id(1)
    if split < float_splits:
        gemm_split(
            split, x_ptr, floats_ptr, None, None, None, float_out_ptr, None, None, None, None, 0.0, 1,
            num_tokens, num_float_outs, num_ins, num_ins, 0,
            float_steps_per_tile, float_steps_per_split, total_float_steps, num_float_outs,
            DTYPE, FLOAT_LAYOUT, FLOAT_EVEN_K, True, 1, False, 1, FLOAT_BLOCK_N, FLOAT_BLOCK_K, FLOAT_BLOCK_M,
        )  # fmt: skip
    else:
        gemm_split(
            split - float_splits, x_ptr, codes_ptr, scales_ptr, offsets_ptr, row_scales_ptr, out_ptr,
            None, None, None, None, 0.0, 1,
            num_tokens, num_outs, num_ins, stride_codes, stride_scales,
            steps_per_tile, steps_per_split, total_steps, num_outs,
            DTYPE, LAYOUT, EVEN_K, True, 1, False, 1, BLOCK_N, BLOCK_K, BLOCK_M,
        )  # fmt: skip


@triton.jit
def _epilogue(
    partials_ptr, columns_ptr, bias_ptr, out_ptr, stride_out, block, token, cut, squares_ptr, norm_eps, num_squares,
    BLOCK_N: tl.constexpr, NUM_PARTIALS: tl.constexpr, EVEN_SPLITS: tl.constexpr, BLOCK_SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The epilogue of BLOCK outputs of one of the weights."""
    _, num_outs, _, _ = cut
    outs = block * BLOCK + tl.arange(0, BLOCK)
    mask = outs < num_outs
    columns = load_columns(columns_ptr, outs, mask)
    wait_for_previous_kernel()
    total = sum_partials(partials_ptr, outs, mask, token, cut, BLOCK_N, NUM_PARTIALS, EVEN_SPLITS, BLOCK)
    squares_S = load_squares(squares_ptr, token, num_squares, BLOCK_SQUARES)
    total *= inverse_norm(squares_ptr, squares_S, norm_eps, BLOCK_SQUARES)
    store_epilogue(total, columns, token, mask, mask, bias_ptr, None, out_ptr, stride_out)


@triton.jit(
    do_not_specialize=[*UNSPECIALIZED, "float_steps_per_tile", "float_steps_per_split", "float_blocks"]
)
def paired_epilogue_kernel(
    partials_ptr, columns_ptr, float_partials_ptr, float_columns_ptr, bias_ptr, out_ptr, stride_out,
    num_tokens, num_outs, steps_per_tile, steps_per_split, squares_ptr, norm_eps, num_squares,
    num_float_outs, float_steps_per_tile, float_steps_per_split, float_blocks,
    BLOCK_N: tl.constexpr, NUM_PARTIALS: tl.constexpr, EVEN_SPLITS: tl.constexpr,
    FLOAT_BLOCK_N: tl.constexpr, FLOAT_NUM_PARTIALS: tl.constexpr, FLOAT_EVEN_SPLITS: tl.constexpr,
    BLOCK_SQUARES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums of both weights, with the bias, into the columns that are theirs."""
    launch_dependents()
    block, token = tl.program_id(0), tl.program_id(1)
    if block < float_blocks:
        _epilogue(
            float_partials_ptr, float_columns_ptr, bias_ptr, out_ptr, stride_out, block, token,
            (num_tokens, num_float_outs, float_steps_per_tile, float_steps_per_split),
            squares_ptr, norm_eps, num_squares,
            FLOAT_BLOCK_N, FLOAT_NUM_PARTIALS, FLOAT_EVEN_SPLITS, BLOCK_SQUARES, BLOCK,
        )  # fmt: skip
    else:
        _epilogue(
            partials_ptr, columns_ptr, bias_ptr, out_ptr, stride_out, block - float_blocks, token,
            (num_tokens, num_outs, steps_per_tile, steps_per_split), squares_ptr, norm_eps, num_squares,
            BLOCK_N, NUM_PARTIALS, EVEN_SPLITS, BLOCK_SQUARES, BLOCK,
        )  # fmt: skip


def paired_gemm(
    pair: Pair, x_ND: Tensor, bias: Tensor | None, partial_norm: PartialNorm | None, out_NO: Tensor
) -> None:
    """The products of at most FEW tokens, and the bias, into `out_NO`."""
    (packed, floats), num_tokens = pair, len(x_ND)
    assert num_tokens <= FEW
    block_m = block_m_for(num_tokens, packed)
    of_floats = floats.kernel_args(num_tokens, block_m_for(num_tokens, floats), SHORTER)
    partials_PNO, float_partials_PNO = (
        out_NO.new_empty((weight.num_partials, num_tokens, weight.num_outs)) for weight in (packed, floats)
    )
    paired_gemm_kernel[1, floats.num_splits + packed.num_splits](
        x_ND, out_ptr=partials_PNO, float_out_ptr=float_partials_PNO, float_splits=floats.num_splits,
        **packed.kernel_args(num_tokens, block_m), **{name: of_floats[own] for own, name in FLOAT_ARGS.items()},
        **packed.launch_options(block_m),
    )  # fmt: skip
    float_blocks = triton.cdiv(floats.num_outs, BLOCK)
    paired_epilogue_kernel[float_blocks + triton.cdiv(packed.num_outs, BLOCK), num_tokens](
        partials_PNO, packed.columns_O, float_partials_PNO, floats.columns_O, bias, out_NO, out_NO.shape[1],
        **PartialSums.of(packed, partials_PNO, partial_norm).args, num_float_outs=floats.num_outs,
        float_steps_per_tile=floats.steps_per_tile, float_steps_per_split=floats.config.steps_per_split,
        float_blocks=float_blocks, FLOAT_BLOCK_N=floats.config.block_n, FLOAT_NUM_PARTIALS=floats.num_partials,
        FLOAT_EVEN_SPLITS=floats.has_even_splits, BLOCK=BLOCK, **LAUNCH_OPTIONS,
    )  # fmt: skip
