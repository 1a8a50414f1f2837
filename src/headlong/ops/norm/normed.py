"""What a norm makes of hidden states: the normed states, or rows that are still to be divided by their lengths.

A GEMM is linear, so it may be given x · weight and have its sums divided by |x|. Only Triton's GEMMs understand that;
they alone are ever given a `PartialNorm`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class PartialNorm:
    """Rows that are still to be divided by their lengths."""

    x_ND: Tensor
    """The product x · weight, as narrow as GEMMs take it."""
    squares_NP: Tensor
    """Sums of the squares of x, in parts."""
    eps: float
    """A number that is added to the sum of all squares of a row."""

    def some(self, tokens: slice) -> "PartialNorm":
        """Returns the rows of these tokens alone."""
        return PartialNorm(self.x_ND[tokens], self.squares_NP[tokens], self.eps)


Normed = Tensor | PartialNorm
"""What a linear takes: normed states, or a partial norm."""
Norm = Callable[[Tensor], Tensor]
"""A norm of whole hidden states. A GEMM whose epilogue is given one may leave its second half to the next GEMM."""


def whole(normed: Normed) -> Tensor:
    """Returns normed states, for a linear that takes nothing else: it is never given a `PartialNorm`."""
    assert isinstance(normed, Tensor), "only Triton's GEMMs take what is normed in part"
    return normed
