"""Rotations of neighbours: the last dimensions of a head are pairs (x0, x1), (x2, x3), …, each turned by an angle.

Layers of one model may turn by different bases. The angles of all of them lie side by side in a step's `Angles`; a
`PairRope` says which ones a layer reads.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from headlong.ops.rope.reference import Angles


class PairRope(NamedTuple):
    """Which of a step's angles turn the last 2 · `num_pairs` dimensions of a head."""

    first: int
    """The number of the first pair's frequency among all that the step's angles are of."""
    num_pairs: int

    @property
    def dim(self) -> int:
        return 2 * self.num_pairs


class Turn(NamedTuple):
    """Cosines and sines of pairs, [N, pairs] each."""

    cos: Tensor
    sin: Tensor

    def back(self) -> "Turn":
        """Returns the turn the other way."""
        return Turn(self.cos, -self.sin)

    def of(self, tokens: Tensor) -> "Turn":
        """Returns the turns of these tokens alone."""
        return Turn(self.cos[tokens], self.sin[tokens])

    def earlier(self, by: "Turn") -> "Turn":
        """Returns the turns of positions that are `by` a fixed turn earlier."""
        return Turn(self.cos * by.cos + self.sin * by.sin, self.sin * by.cos - self.cos * by.sin)


def turn_of(angles: Angles, rope: PairRope) -> Turn:
    """Returns the turns of a step's tokens, as a layer with this rope reads them. The second half of `Angles` is the
    sines that are not negated."""
    half = angles.rotary_dim // 2
    columns = slice(rope.first, rope.first + rope.num_pairs)
    return Turn(angles.cos[:, 0, :half][:, columns], angles.sin[:, 0, half : 2 * half][:, columns])


def fixed_turn(positions: int, inv_freq_F: Tensor) -> Turn:
    """Returns the turn by so many positions."""
    phase_F = positions * inv_freq_F.double()
    return Turn(phase_F.cos().to(inv_freq_F.dtype)[None], phase_F.sin().to(inv_freq_F.dtype)[None])


def turned(x: Tensor, turn: Turn) -> Tensor:
    """Turns the last dimensions of x [N, …, D]; the others are left alone. Products and sums are rounded one by one,
    wherever an element lies."""
    size = 2 * turn.cos.shape[-1]
    between = [1] * (x.dim() - 2)
    cos, sin = (part.to(x.dtype).view(len(part), *between, -1) for part in turn)
    plain, rotary = x.split((x.shape[-1] - size, size), dim=-1)
    even, odd = rotary[..., 0::2], rotary[..., 1::2]
    pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return torch.cat((plain, pairs.flatten(-2)), dim=-1)
