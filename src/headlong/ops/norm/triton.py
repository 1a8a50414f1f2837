# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""The layer norm on a GPU: by a kernel of its own, where a program holds a whole row, or in two halves.

A product is linear, so it may be given x · weight and have its sums divided by |x|. Then whoever makes x writes the
first half beside it, with sums of its squares by parts, and nothing has to wait until somebody has seen a whole row: a
launch less before each product.
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
"""Numbers of a row whose squares are one sum."""
_PART = tl.constexpr(PART)


def to_multiply(given: Normed) -> tuple[Tensor, PartialNorm | None]:
    """What is multiplied, and what sums are still to be divided by."""
    return (given.x_ND, given) if isinstance(given, PartialNorm) else (given, None)


def length_args(half: PartialNorm | None) -> dict[str, object]:
    """For kernels that divide by lengths, or need not."""
    if half is None:
        return {"squares": None, "length_eps": 0.0, "length_parts": 1, "LENGTH": 1}
    parts = half.squares_NP.shape[1]
    return {
        "squares": half.squares_NP,
        "length_eps": half.eps,
        "length_parts": parts,
        "LENGTH": triton.next_power_of_2(parts),
    }


@triton.jit
def added(x, SIZE: tl.constexpr, LEFT: tl.constexpr):
    """Neighbours by twos, until LEFT are left: an order that no layout changes."""
    if SIZE == LEFT:
        return x
    else:
        even, odd = tl.split(tl.reshape(x, (SIZE // 2, 2)))
        return added(even + odd, SIZE // 2, LEFT)


@triton.jit
def squares_added(x, SIZE: tl.constexpr, LEFT: tl.constexpr):
    even, odd = tl.split(tl.reshape(x, (SIZE // 2, 2)))
    return added(tl.fma(odd, odd, even * even), SIZE // 2, LEFT)


@triton.jit
def _added_down(x_SM, SIZE: tl.constexpr, M: tl.constexpr):
    """Columns in the same order. [1, M]"""
    if SIZE == 1:
        return x_SM
    else:
        even, odd = tl.split(tl.permute(tl.reshape(x_SM, (SIZE // 2, 2, M)), (0, 2, 1)))
        return _added_down(even + odd, SIZE // 2, M)


@triton.jit
def squares_of(squares, token, parts, LENGTH: tl.constexpr):
    """A token's, or zeros where nothing has to be divided. To be asked for together with what will be divided: adding
    them takes a barrier, and what is asked for behind that comes a whole way to memory later."""
    part = tl.arange(0, LENGTH)
    if squares is None:
        return tl.zeros((LENGTH,), tl.float32)
    else:
        return tl.load(squares + token.to(tl.int64) * parts + part, mask=part < parts, other=0.0)


@triton.jit
def inverse_length(squares, squares_P, eps, LENGTH: tl.constexpr):
    """1 / |x| of a token, or 1 where nothing has to be divided. [1]"""
    if squares is None:
        return tl.full((1,), 1.0, tl.float32)
    else:
        tl.debug_barrier()  # or the compiler puts what was asked for behind the first of these sums, which waits
        return tl.rsqrt(added(squares_P, LENGTH, 1) + eps)


@triton.jit
def squares_of_tokens(squares, token_M, there_M, parts, LENGTH: tl.constexpr, M: tl.constexpr):
    """Those of several tokens, [LENGTH, M]."""
    part = tl.arange(0, LENGTH)
    if squares is None:
        return tl.zeros((LENGTH, M), tl.float32)
    else:
        inside = (part < parts)[:, None] & there_M[None, :]
        at = squares + token_M.to(tl.int64)[None, :] * parts + part[:, None]
        return tl.load(at, mask=inside, other=0.0)


@triton.jit
def inverse_lengths(squares_PM, eps, LENGTH: tl.constexpr, M: tl.constexpr):
    """1 / |x| of each, [1, M]."""
    return tl.rsqrt(_added_down(squares_PM, LENGTH, M) + eps)


@triton.jit
def put_half_normed(
    x, outs, inside, token, block, weight_W, normed, squares, size, parts, WIDTH: tl.constexpr
):
    """A block of WIDTH numbers of a token; those past its size are zeros."""
    tl.store(normed + token.to(tl.int64) * size + outs, x * weight_W, mask=inside)
    EACH: tl.constexpr = WIDTH // _PART
    part = block * EACH + tl.arange(0, EACH)
    tl.store(squares + token.to(tl.int64) * parts + part, squares_added(x, WIDTH, EACH), mask=part < parts)


# A row may start anywhere: how it is summed must not depend on where.
@triton.jit(do_not_specialize_on_alignment=["x"])
def _rms_norm(x, weight, eps, out, D: tl.constexpr, BLOCK: tl.constexpr):
    launch_dependents()
    d = tl.arange(0, BLOCK)
    inside = d < D
    weight_D = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)  # which no kernel writes
    wait_for_previous_kernel()
    at = tl.program_id(0).to(tl.int64) * D + d
    value = tl.load(x + at, mask=inside, other=0.0)
    scale = tl.rsqrt(tl.sum(value * value, 0) + eps)
    tl.store(out + at, value * scale * weight_D, mask=inside)


class TritonRmsNorm:
    """float32 in; out in `dtype`."""

    def __init__(
        self, norm: RmsNorm, dtype: torch.dtype = torch.float32, products: Callable[[], bool] | None = None
    ) -> None:
        """`products` says whether what comes out goes into products alone which see to its second half."""
        self.dtype = dtype
        self.weight = norm.weight
        self.eps = float(norm.eps)
        self._products = products

    @property
    def may_be_halved(self) -> bool:
        """Whether the second half may be left to those who take it."""
        return self._products is not None and self._products()

    def __call__(self, x_ND: Tensor) -> Tensor:
        assert x_ND.is_contiguous() and x_ND.dtype == torch.float32
        rows, size = x_ND.shape
        out = torch.empty_like(x_ND, dtype=self.dtype)
        block = triton.next_power_of_2(size)
        _rms_norm[(rows,)](
            x_ND, self.weight, self.eps, out, D=size, BLOCK=block, num_warps=8 if block >= 2048 else 4,
            **LAUNCH_OPTIONS,
        )  # fmt: skip
        return out


def half_normed_room(then: Norm | None, like_ND: Tensor) -> PartialNorm | None:
    """For the first half of what comes `then`, if that is a norm which may be halved."""
    if not (isinstance(then, TritonRmsNorm) and then.may_be_halved):
        return None
    squares_NP = like_ND.new_empty((len(like_ND), triton.cdiv(like_ND.shape[1], PART)), dtype=torch.float32)
    return PartialNorm(torch.empty_like(like_ND, dtype=then.dtype), squares_NP, then.eps)


def room_args(
    then: Norm | None, room: PartialNorm | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, int]:
    """For kernels that write the first half, or none: the norm's weight, and where to."""
    if room is None:
        return None, None, None, 1
    assert isinstance(then, TritonRmsNorm)
    return then.weight, room.x_ND, room.squares_NP, room.squares_NP.shape[1]
