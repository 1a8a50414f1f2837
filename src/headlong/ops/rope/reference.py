"""Rotary position embedding over the first part of each head, halves rotated against each other.

out = x · cos + swap(x) · sin      with sin negative on the first half, and (1, 0) past the rotary part

A family may stretch its wavelengths: each frequency is divided by a factor of its own.
"""

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

TABLE, LARGEST_TABLE = 1 << 10, 1 << 15
"""Positions that are looked up: at first, and at most."""


@dataclass(frozen=True)
class Llama3Scaling:
    """Waves that turned fewer than `low_freq_factor` times in the original context are stretched by `factor`, those
    that turned more than `high_freq_factor` times are left alone, and between the two it goes over smoothly."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def factors(self, theta: float, rotary_dim: int) -> Tensor:
        """What each of the rotary_dim / 2 frequencies is divided by."""
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
        turns = self.original_max_position / (2.0 * math.pi * theta**exponents)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = kept.clamp(0.0, 1.0)
        return 1.0 / ((1.0 - kept) / self.factor + kept)


@dataclass(frozen=True)
class Rotary:
    """What all positions share; made at load."""

    inv_freq: Tensor
    swap_D: Tensor
    """Which element of the head each one is mixed with."""
    tables: dict[torch.dtype, "Angles"] = field(default_factory=dict, compare=False, repr=False)
    """Of the first positions, by dtype."""

    @classmethod
    def of(
        cls,
        theta: float,
        rotary_dim: int,
        head_dim: int,
        device: torch.device,
        factors: Tensor | None = None,
    ) -> "Rotary":
        """`factors` are one divisor for each frequency."""
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        half = rotary_dim // 2
        swap = [*range(half, rotary_dim), *range(half), *range(rotary_dim, head_dim)]
        inv_freq = (1.0 / theta**exponents).to(device)
        if factors is not None:
            inv_freq = inv_freq / factors.to(device, torch.float32)
        return cls(inv_freq, torch.tensor(swap, device=device))


@dataclass(frozen=True)
class Angles:
    """A step's rotations, [N, 1, head_dim] each, for all heads of all layers."""

    cos: Tensor
    sin: Tensor
    swap_D: Tensor
    rotary_dim: int

    def part(self, first: int, last: int) -> "Angles":
        """Those of tokens first…last − 1."""
        return self.picked(slice(first, last))

    def picked(self, tokens: Tensor | slice) -> "Angles":
        return replace(self, cos=self.cos[tokens], sin=self.sin[tokens])


def angles(positions_N: Tensor, rotary: Rotary, dtype: torch.dtype, last: int | None = None) -> Angles:
    """From a table that grows: looking up is quicker than computing, and a position's bits are always the same ones.
    `last` is the largest of these positions, or more; without it they are asked, for which a GPU would stand still."""
    last = int(positions_N.max()) if last is None else last
    if last >= LARGEST_TABLE:
        return _angles(positions_N, rotary, dtype)
    table = rotary.tables.get(dtype)
    known = 0 if table is None else len(table.cos)
    if table is None or last >= known:
        end = max(TABLE, 1 << last.bit_length())
        more = _angles(torch.arange(known, end, device=positions_N.device), rotary, dtype)
        if table is not None:
            more = replace(more, cos=torch.cat((table.cos, more.cos)), sin=torch.cat((table.sin, more.sin)))
        table = rotary.tables[dtype] = more
    return table.picked(positions_N)


def _angles(positions_N: Tensor, rotary: Rotary, dtype: torch.dtype) -> Angles:
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
