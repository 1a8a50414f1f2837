"""Rotary position embedding over the first part of each head, halves rotated against each other."""

import torch
from torch import Tensor


def inverse_frequencies(theta: float, rotary_dim: int) -> Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    return 1.0 / theta**exponents


def angles(positions_N: Tensor, inv_freq: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, each [N, 1, rotary_dim / 2], for all heads of all layers of a step."""
    phase = positions_N.to(torch.float32)[:, None, None] * inv_freq
    return phase.cos().to(dtype), phase.sin().to(dtype)


def rotate(x_NHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x_NHD[..., :half], x_NHD[..., half : 2 * half], x_NHD[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
