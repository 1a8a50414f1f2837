# pyright: reportArgumentType=false, reportCallIssue=false
"""The layer norm on a GPU; a program holds a whole row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.ops.norm.reference import RmsNorm
from headlong.ops.triton_launch import OPTIONS, let_next_start, wait


# A row may start anywhere: how it is summed must not depend on where.
@triton.jit(do_not_specialize_on_alignment=["x"])
def _rms_norm(x, weight, eps, out, D: tl.constexpr, BLOCK: tl.constexpr):
    let_next_start()
    d = tl.arange(0, BLOCK)
    inside = d < D
    weight_D = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)  # which no kernel writes
    wait()
    at = tl.program_id(0).to(tl.int64) * D + d
    value = tl.load(x + at, mask=inside, other=0.0)
    scale = tl.rsqrt(tl.sum(value * value, 0) + eps)
    tl.store(out + at, value * scale * weight_D, mask=inside)


class TritonRmsNorm:
    """float32 in; out in `dtype`."""

    def __init__(self, norm: RmsNorm, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.weight = norm.weight
        self.eps = float(norm.eps)

    def __call__(self, x_ND: Tensor) -> Tensor:
        assert x_ND.is_contiguous() and x_ND.dtype == torch.float32
        rows, size = x_ND.shape
        out = torch.empty_like(x_ND, dtype=self.dtype)
        block = triton.next_power_of_2(size)
        _rms_norm[(rows,)](
            x_ND, self.weight, self.eps, out, D=size, BLOCK=block, num_warps=8 if block >= 2048 else 4,
            **OPTIONS,
        )  # fmt: skip
        return out
