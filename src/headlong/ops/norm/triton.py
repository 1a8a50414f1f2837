# pyright: reportArgumentType=false, reportCallIssue=false
"""The layer norm on a GPU, with the residual sum before it where wanted; a program holds a whole row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.ops.norm.reference import RmsNorm


# A row may start anywhere: how it is summed must not depend on where.
@triton.jit(do_not_specialize_on_alignment=["x", "y"])
def _rms_norm(x, y, weight, eps, total, out, D: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    d = tl.arange(0, BLOCK)
    inside = d < D
    at = tl.program_id(0).to(tl.int64) * D + d
    value = tl.load(x + at, mask=inside, other=0.0)
    if ADD:
        value += tl.load(y + at, mask=inside, other=0.0)
        tl.store(total + at, value, mask=inside)
    scale = tl.rsqrt(tl.sum(value * value, 0) + eps)
    tl.store(
        out + at, value * scale * tl.load(weight + d, mask=inside, other=0.0).to(tl.float32), mask=inside
    )


class TritonRmsNorm:
    """float32 in; out in `dtype`."""

    def __init__(self, norm: RmsNorm, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.weight = norm.weight
        self.eps = float(norm.eps)

    def __call__(self, x_ND: Tensor) -> Tensor:
        return self._launch(x_ND, x_ND, x_ND, add=False)

    def add(self, x_ND: Tensor, y_ND: Tensor) -> tuple[Tensor, Tensor]:
        """x + y, and its norm."""
        total_ND = torch.empty_like(x_ND)
        return total_ND, self._launch(x_ND, y_ND, total_ND, add=True)

    def _launch(self, x_ND: Tensor, y_ND: Tensor, total_ND: Tensor, *, add: bool) -> Tensor:
        assert x_ND.is_contiguous() and y_ND.is_contiguous() and x_ND.dtype == y_ND.dtype == torch.float32
        rows, size = x_ND.shape
        out = torch.empty_like(x_ND, dtype=self.dtype)
        block = triton.next_power_of_2(size)
        _rms_norm[(rows,)](
            x_ND, y_ND, self.weight, self.eps, total_ND, out,
            D=size, BLOCK=block, ADD=add, num_warps=8 if block >= 2048 else 4,
        )  # fmt: skip
        return out
