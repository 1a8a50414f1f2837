"""Rotary position embedding over the first part of each head, halves rotated against each other.

out = x · cos + swap(x) · sin      with sin negative on the first half, and (1, 0) past the rotary part
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """What all positions share; made at load."""

    inv_freq: Tensor
    swap_D: Tensor
    """Which element of the head each one is mixed with."""

    @classmethod
    def of(cls, theta: float, rotary_dim: int, head_dim: int, device: torch.device) -> "Rotary":
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        half = rotary_dim // 2
        swap = [*range(half, rotary_dim), *range(half), *range(rotary_dim, head_dim)]
        return cls((1.0 / theta**exponents).to(device), torch.tensor(swap, device=device))


@dataclass(frozen=True)
class Angles:
    """A step's rotations, [N, 1, head_dim] each, for all heads of all layers."""

    cos: Tensor
    sin: Tensor
    swap_D: Tensor
    rotary_dim: int

    def part(self, first: int, last: int) -> "Angles":
        """Those of tokens first…last − 1."""
        return replace(self, cos=self.cos[first:last], sin=self.sin[first:last])


def angles(positions_N: Tensor, rotary: Rotary, dtype: torch.dtype) -> Angles:
    phase = positions_N.to(torch.float32)[:, None, None] * rotary.inv_freq
    cos, sin = phase.cos().to(dtype), phase.sin().to(dtype)
    rest = cos.new_zeros(cos.shape[0], 1, rotary.swap_D.shape[0] - 2 * cos.shape[-1])
    return Angles(
        torch.cat((cos, cos, rest + 1.0), -1),
        torch.cat((-sin, sin, rest), -1),
        rotary.swap_D,
        2 * cos.shape[-1],
    )


def rotate(x_NHD: Tensor, angles: Angles) -> Tensor:
    return torch.addcmul(x_NHD * angles.cos, x_NHD.index_select(-1, angles.swap_D), angles.sin)
