"""The layer norm as one native call that also rounds to the dtype the next matmul takes."""

import torch
from torch import Tensor

from headlong.ops import native
from headlong.ops.norm.reference import RmsNorm


class NativeRmsNorm:
    """float32 in, `dtype` out."""

    def __init__(self, norm: RmsNorm, dtype: torch.dtype) -> None:
        self.weight = norm.weight
        self.eps = float(norm.eps)
        self.dtype = dtype
        self._kernel = native.kernel("headlong_rms_norm")

    def __call__(self, x_ND: Tensor) -> Tensor:
        assert x_ND.dtype == torch.float32
        out = torch.empty_like(x_ND, dtype=self.dtype)
        rows, size = x_ND.shape
        wide = self.dtype == torch.float32
        self._kernel(native.address(x_ND), self.weight.data_ptr(), self.eps, out.data_ptr(), wide, rows, size)
        return out
