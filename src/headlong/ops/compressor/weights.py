"""The weights of a compressor, which makes one entry of every few tokens."""

from dataclasses import dataclass

from torch import Tensor

from headlong.ops.norm.reference import RmsNorm
from headlong.ops.rope.pairs import PairRope


@dataclass(frozen=True)
class CompressorWeights:
    """A token is given as [values | gates], each of `num_series` times `dim` numbers.

    With two series, the first counts for the entry after the token's own, the second for its own: an entry is then of
    twice as many tokens as lie between entries, each with one of its series.
    """

    ratio: int
    """How many tokens there are to an entry."""
    dim: int
    """The numbers of an entry."""
    num_series: int
    bias_JX: Tensor
    """What is added to gates, by a token's place in its window: [ratio, num_series · dim]."""
    norm: RmsNorm
    """The norm of an entry, before it is turned."""
    rope: PairRope
    inv_freq_F: Tensor
    """The frequencies of the pairs: an entry is turned as the first token of its own window is."""

    @property
    def span(self) -> int:
        """How many tokens an entry is made of."""
        return self.num_series * self.ratio

    @property
    def width(self) -> int:
        """The numbers that a token is given as."""
        return 2 * self.num_series * self.dim
