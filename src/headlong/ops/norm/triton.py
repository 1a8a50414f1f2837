# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""RMSNorm on a GPU: by a kernel of its own, where a program holds a whole row, or as a partial norm.

A GEMM is linear, so it may be given x · weight and have its sums divided by |x| in its epilogue. Then whoever makes x
stores the partial norm beside it: x · weight, and sums of the squares of x by parts of PART columns. Nothing has to
wait until somebody has seen a whole row, and each norm costs one launch less.

|x| stands for the root of what RMSNorm divides by, with its eps; the mean's factor is in the weight. Sums are made by
pairs of neighbours, an order that no layout of a tile changes, so that every kernel finds the same bits.

Legend. x_ptr [num_tokens, D]; weight_ptr [D]; squares_ptr [num_tokens, num_squares], which is None where nothing has
to be divided. BLOCK_SQUARES is the power of two that holds num_squares, BLOCK_M a program's tokens, BLOCK a row or
its part.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.ops.norm.normed import Norm, Normed, PartialNorm
from headlong.ops.norm.reference import RmsNorm
from headlong.ops.triton_launch import LAUNCH_OPTIONS, launch_dependents, wait_for_previous_kernel

PART = 64
"""The number of columns of a row whose squares are one sum."""
_PART = tl.constexpr(PART)


def gemm_input(given: Normed) -> tuple[Tensor, PartialNorm | None]:
    """Returns what a GEMM multiplies, and the partial norm whose |x| its sums are still to be divided by."""
    return (given.x_ND, given) if isinstance(given, PartialNorm) else (given, None)


def norm_args(partial: PartialNorm | None) -> dict[str, object]:
    """Returns the arguments of kernels whose sums are divided by |x|, or need not be."""
    if partial is None:
        return {"squares_ptr": None, "norm_eps": 0.0, "num_squares": 1, "BLOCK_SQUARES": 1}
    num_squares = partial.squares_NP.shape[1]
    return {
        "squares_ptr": partial.squares_NP,
        "norm_eps": partial.eps,
        "num_squares": num_squares,
        "BLOCK_SQUARES": triton.next_power_of_2(num_squares),
    }


@triton.jit
def pairwise_sum(x, SIZE: tl.constexpr, LEFT: tl.constexpr):
    """Adds neighbours by twos until LEFT numbers are left."""
    if SIZE == LEFT:
        return x
    else:
        even, odd = tl.split(tl.reshape(x, (SIZE // 2, 2)))
        return pairwise_sum(even + odd, SIZE // 2, LEFT)


@triton.jit
def pairwise_sum_of_squares(x, SIZE: tl.constexpr, LEFT: tl.constexpr):
    """Adds the squares of neighbours by twos until LEFT numbers are left."""
    even, odd = tl.split(tl.reshape(x, (SIZE // 2, 2)))
    return pairwise_sum(tl.fma(odd, odd, even * even), SIZE // 2, LEFT)


@triton.jit
def _pairwise_sum_of_columns(x_SM, SIZE: tl.constexpr, BLOCK_M: tl.constexpr):
    """Adds each column of a tile in the order of `pairwise_sum`. [1, BLOCK_M]"""
    if SIZE == 1:
        return x_SM
    else:
        even, odd = tl.split(tl.permute(tl.reshape(x_SM, (SIZE // 2, 2, BLOCK_M)), (0, 2, 1)))
        return _pairwise_sum_of_columns(even + odd, SIZE // 2, BLOCK_M)


@triton.jit
def load_squares(squares_ptr, token, num_squares, BLOCK_SQUARES: tl.constexpr):
    """Loads a token's sums of squares, or zeros where nothing has to be divided. Load them together with what will be
    divided: adding them takes a barrier, and a load after that barrier waits for memory once more."""
    part = tl.arange(0, BLOCK_SQUARES)
    if squares_ptr is None:
        return tl.zeros((BLOCK_SQUARES,), tl.float32)
    else:
        squares_ptrs = squares_ptr + token.to(tl.int64) * num_squares + part
        return tl.load(squares_ptrs, mask=part < num_squares, other=0.0)


@triton.jit
def inverse_norm(squares_ptr, squares_S, norm_eps, BLOCK_SQUARES: tl.constexpr):
    """Computes 1 / |x| of a token, [1], or 1 where nothing has to be divided."""
    if squares_ptr is None:
        return tl.full((1,), 1.0, tl.float32)
    else:
        tl.debug_barrier()  # or the compiler moves loads behind the first of these sums, which waits
        return tl.rsqrt(pairwise_sum(squares_S, BLOCK_SQUARES, 1) + norm_eps)


@triton.jit
def load_squares_of_tokens(
    squares_ptr, token_M, is_token_M, num_squares, BLOCK_SQUARES: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Loads the sums of squares of several tokens, [BLOCK_SQUARES, BLOCK_M]."""
    part = tl.arange(0, BLOCK_SQUARES)
    if squares_ptr is None:
        return tl.zeros((BLOCK_SQUARES, BLOCK_M), tl.float32)
    else:
        mask = (part < num_squares)[:, None] & is_token_M[None, :]
        squares_ptrs = squares_ptr + token_M.to(tl.int64)[None, :] * num_squares + part[:, None]
        return tl.load(squares_ptrs, mask=mask, other=0.0)


@triton.jit
def inverse_norms(squares_SM, norm_eps, BLOCK_SQUARES: tl.constexpr, BLOCK_M: tl.constexpr):
    """Computes 1 / |x| of several tokens, [1, BLOCK_M]."""
    return tl.rsqrt(_pairwise_sum_of_columns(squares_SM, BLOCK_SQUARES, BLOCK_M) + norm_eps)


@triton.jit
def store_partial_norm(
    x, columns, mask, token, block, weight, normed_ptr, squares_ptr, size, num_squares, BLOCK: tl.constexpr
):
    """Stores the partial norm of BLOCK columns of a token; those past its `size` are zeros."""
    tl.store(normed_ptr + token.to(tl.int64) * size + columns, x * weight, mask=mask)
    PARTS: tl.constexpr = BLOCK // _PART
    part = block * PARTS + tl.arange(0, PARTS)
    squares_ptrs = squares_ptr + token.to(tl.int64) * num_squares + part
    tl.store(squares_ptrs, pairwise_sum_of_squares(x, BLOCK, PARTS), mask=part < num_squares)


# A row may start anywhere: how it is summed must not depend on where.
@triton.jit(do_not_specialize_on_alignment=["x_ptr"])
def _rms_norm_kernel(x_ptr, weight_ptr, eps, out_ptr, D: tl.constexpr, BLOCK: tl.constexpr):
    launch_dependents()
    column = tl.arange(0, BLOCK)
    mask = column < D
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)  # which no kernel writes
    wait_for_previous_kernel()
    offsets = tl.program_id(0).to(tl.int64) * D + column
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    scale = tl.rsqrt(tl.sum(x * x, 0) + eps)
    tl.store(out_ptr + offsets, x * scale * weight, mask=mask)


class TritonRmsNorm:
    """RMSNorm of float32 rows, with results of `dtype`."""

    def __init__(
        self, norm: RmsNorm, dtype: torch.dtype = torch.float32, gemms_only: Callable[[], bool] | None = None
    ) -> None:
        """`gemms_only` says whether the results go only into GEMMs that take a partial norm."""
        self.dtype = dtype
        self.weight = norm.weight
        self.eps = float(norm.eps)
        self._gemms_only = gemms_only

    @property
    def may_be_partial(self) -> bool:
        """Whether the division by |x| may be left to those who take the results."""
        return self._gemms_only is not None and self._gemms_only()

    def __call__(self, x_ND: Tensor) -> Tensor:
        assert x_ND.is_contiguous() and x_ND.dtype == torch.float32
        rows, size = x_ND.shape
        out = torch.empty_like(x_ND, dtype=self.dtype)
        block = triton.next_power_of_2(size)
        _rms_norm_kernel[(rows,)](
            x_ND, self.weight, self.eps, out, D=size, BLOCK=block, num_warps=8 if block >= 2048 else 4,
            **LAUNCH_OPTIONS,
        )  # fmt: skip
        return out


def empty_partial_norm(then: Norm | None, like_ND: Tensor) -> PartialNorm | None:
    """Makes tensors for an epilogue to store the partial norm in, if `then` is a norm that may be partial; else returns
    None."""
    if not (isinstance(then, TritonRmsNorm) and then.may_be_partial):
        return None
    squares_NP = like_ND.new_empty((len(like_ND), triton.cdiv(like_ND.shape[1], PART)), dtype=torch.float32)
    return PartialNorm(torch.empty_like(like_ND, dtype=then.dtype), squares_NP, then.eps)


def partial_norm_args(
    then: Norm | None, partial: PartialNorm | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, int]:
    """Returns the arguments of kernels that store a partial norm, or none: the norm's weight, the normed rows, the sums
    of squares and their number."""
    if partial is None:
        return None, None, None, 1
    assert isinstance(then, TritonRmsNorm)
    return then.weight, partial.x_ND, partial.squares_NP, partial.squares_NP.shape[1]
