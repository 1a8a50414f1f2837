"""Root-mean-square norms over the last dimension. Weights arrive ready to multiply (1 already added where a
family stores them zero-centred)."""

import torch
from torch import Tensor

from headlong.ops.elementwise import silu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps))
    return (x * scale).mul_(weight)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm first, then the gate: rms_norm(x) · silu(gate)."""
    return rms_norm(x, weight, eps).mul_(silu(gate))


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True).add_(eps))
