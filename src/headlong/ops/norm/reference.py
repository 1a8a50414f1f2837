"""Root-mean-square norms over the last dimension."""

import torch
from torch import Tensor

from headlong.ops.elementwise import silu


class RmsNorm:
    """x / √(mean x² + eps) · weight, with mean and eps multiplied out once:

    x · (|x|² + D eps)^-½ · (√D weight)
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        """`weight` multiplies as it is: 1 is already added where a family stores it zero-centred."""
        size = weight.shape[-1]
        self.weight = weight * size**0.5
        self.eps = torch.full((), eps * size, dtype=weight.dtype, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        return (x * _inverse_norm(x, self.eps)).mul_(self.weight)

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """Applies the norm first, then the gate."""
        return self(x).mul_(silu(gate))


def l2_norm(x: Tensor, eps: Tensor) -> Tensor:
    """Computes x · (|x|² + eps)^-½."""
    return x * _inverse_norm(x, eps)


def _inverse_norm(x: Tensor, eps: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(eps, norm, norm).rsqrt_()
