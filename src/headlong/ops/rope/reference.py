"""Rotary position embedding over the first part of each head, halves rotated against each other.

out = x · cos + swap(x) · sin      with sin negative on the first half, and (1, 0) past the rotary part

A model may stretch its wavelengths, and cosines and sines with them (`scaling.py`). A token may stand at several
positions at once, such as time, height and width of a piece of an image: each frequency is then turned by one of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

TABLE, LARGEST_TABLE = 1 << 10, 1 << 15
"""The number of positions that are looked up in a table: at first, and at most."""


@dataclass(frozen=True)
class Rotary:
    """Frequencies and layout of the rotation, which all positions share; made at load."""

    inv_freq: Tensor
    swap_D: Tensor
    """The element of the head that each element is mixed with."""
    axis_D: Tensor | None = None
    """The number, among a token's positions, of the one that turns each element of the head; None where tokens have one
    position alone."""
    amplitude: float = 1.0
    """What cosines and sines are multiplied with."""
    tables: dict[torch.dtype, "Angles"] = field(default_factory=dict, compare=False, repr=False)
    """Tables of the rotations of the first positions, by dtype."""

    @classmethod
    def of(
        cls,
        theta: float,
        rotary_dim: int,
        head_dim: int,
        device: torch.device,
        factors: Tensor | None = None,
        sections: Sequence[int] = (),
        amplitude: float = 1.0,
    ) -> "Rotary":
        """Makes a rotation. `factors` are one divisor for each frequency. `sections` say how many frequencies each of a
        token's positions turns: they take turns, and the first position turns all that the others leave."""
        half = rotary_dim // 2
        swap = [*range(half, rotary_dim), *range(half), *range(rotary_dim, head_dim)]
        axis_D = _axes(sections, half, head_dim).to(device) if sections else None
        inv_freq = frequencies_of(theta, rotary_dim, factors).to(device)
        return cls(inv_freq, torch.tensor(swap, device=device), axis_D, amplitude)

    @classmethod
    def beside(cls, inv_freqs: Sequence[Tensor], device: torch.device) -> "Rotary":
        """Makes a rotation of all these frequencies, for layers that each read some of its angles."""
        inv_freq = torch.cat([each.to(device) for each in inv_freqs])
        swap = torch.arange(2 * len(inv_freq), device=device).roll(len(inv_freq))
        return cls(inv_freq, swap)


def frequencies_of(theta: float, rotary_dim: int, factors: Tensor | None = None) -> Tensor:
    """Returns the frequencies of a base, one for every two of `rotary_dim` numbers; `factors` divide them."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    inv_freq = 1.0 / theta**exponents
    return inv_freq if factors is None else inv_freq / factors.to(torch.float32)


def _axes(sections: Sequence[int], half: int, head_dim: int) -> Tensor:
    """Returns, for each element of a head, which position turns it; the rotary part is two halves of the same
    frequencies."""
    axis_F = torch.zeros(half, dtype=torch.long)
    for axis, count in enumerate(sections[1:], start=1):
        axis_F[axis : count * len(sections) : len(sections)] = axis
    return torch.cat((axis_F, axis_F, axis_F.new_zeros(head_dim - 2 * half)))


@dataclass(frozen=True)
class Angles:
    """A step's rotations, [N, 1, head_dim] each, for all heads of all layers."""

    cos: Tensor
    sin: Tensor
    swap_D: Tensor
    rotary_dim: int

    def part(self, first: int, last: int) -> "Angles":
        """Returns the rotations of the tokens first … last − 1."""
        return self.picked(slice(first, last))

    def picked(self, tokens: Tensor | slice) -> "Angles":
        return replace(self, cos=self.cos[tokens], sin=self.sin[tokens])


def angles(positions: Tensor, rotary: Rotary, dtype: torch.dtype, last: int | None = None) -> Angles:
    """Returns rotations from a table that grows: looking up is quicker than computing, and a position's bits are always
    the same ones. `positions` are [N], or [A, N] where each token has A of them; A equal ones are as good as one.
    `last` is the largest of them, or more; without it the tensor is asked, for which a GPU would have to be waited
    for."""
    last = int(positions.max()) if last is None else last
    if last >= LARGEST_TABLE:
        return _angles(positions, rotary, dtype)
    table = rotary.tables.get(dtype)
    known = 0 if table is None else len(table.cos)
    if table is None or last >= known:
        end = max(TABLE, 1 << last.bit_length())
        more = _angles(torch.arange(known, end, device=positions.device), rotary, dtype)
        if table is not None:
            more = replace(more, cos=torch.cat((table.cos, more.cos)), sin=torch.cat((table.sin, more.sin)))
        table = rotary.tables[dtype] = more
    if positions.dim() == 1:
        return table.picked(positions)
    assert rotary.axis_D is not None, "these heads are turned by one position"
    position_ND, d = positions[rotary.axis_D].t(), torch.arange(len(rotary.axis_D), device=positions.device)
    return replace(
        table, cos=table.cos[position_ND, 0, d][:, None], sin=table.sin[position_ND, 0, d][:, None]
    )


def _angles(positions: Tensor, rotary: Rotary, dtype: torch.dtype) -> Angles:
    position_NF = positions[:, None]
    if positions.dim() == 2:
        assert rotary.axis_D is not None, "these heads are turned by one position"
        position_NF = positions[rotary.axis_D[: len(rotary.inv_freq)]].t()
    phase = position_NF.to(torch.float32)[:, None] * rotary.inv_freq
    cos, sin = ((wave * rotary.amplitude).to(dtype) for wave in (phase.cos(), phase.sin()))
    rest = cos.new_zeros(cos.shape[0], 1, rotary.swap_D.shape[0] - 2 * cos.shape[-1])
    return Angles(
        torch.cat((cos, cos, rest + 1.0), -1),
        torch.cat((-sin, sin, rest), -1),
        rotary.swap_D,
        2 * cos.shape[-1],
    )


def rotate(x_NHD: Tensor, angles: Angles) -> Tensor:
    return torch.addcmul(x_NHD * angles.cos, x_NHD.index_select(-1, angles.swap_D), angles.sin)
