"""A linear as layers see it: a GEMM, what may follow it as an epilogue, and how it may be split between devices.

Knows no backend. Whoever multiplies overrides what it does in one launch; by default one op follows the other.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from headlong.ops.norm.normed import Norm, Normed

SiluMul = Callable[[Tensor], Tensor]
"""A function silu(gate) · up of a tensor [N, gate then up], or another activation of it."""
Argmax = Callable[[Tensor], Tensor]
"""A function that finds the argmax of each row of logits."""


class Shard(Enum):
    """How a weight [out, in] may be split between devices that compute one layer together."""

    OUTPUT = "output"
    """Each device has some of the outputs, whole heads of them where there are heads."""
    INPUT = "input"
    """Each device has what multiplies its part of the input; the devices' outputs are added up."""
    NONE = "none"
    """Every device has all of it."""


class PendingProjection:
    """A projection whose GEMMs the core of a layer launches when it needs them. Only cores of the backend that made it
    read it."""


Projected = Tensor | PendingProjection
"""What the core of an attention or a DeltaNet layer gets from the projection before it."""


class Projection(Protocol):
    """The linear that the core of an attention or a DeltaNet layer begins with."""

    shard: Shard

    def __call__(self, given: Normed, /) -> Projected: ...


class Linear(ABC):
    """A linear y = x Wᵀ + bias, with a row's bits independent of other rows. `name` says who multiplies, for people."""

    name: str
    in_features: int
    out_features: int
    shard: Shard = Shard.NONE

    @abstractmethod
    def __call__(self, given: Normed, /) -> Tensor:
        """Returns the outputs [N, out]."""

    def add_to(self, given: Normed, residual_ND: Tensor, then: Norm) -> tuple[Tensor, Normed]:
        """Computes the GEMM with residual and norm as its epilogue: `residual_ND` + y, and what `then` makes of
        that."""
        out_ND = residual_ND + self(given)
        return out_ND, then(out_ND)

    def gated(self, given: Normed, silu_mul: SiluMul, dtype: torch.dtype) -> Tensor:  # noqa: ARG002 - for epilogues
        """Computes silu(first half of the outputs) · second half. `silu_mul` computes the gate where the GEMM itself
        cannot; a GEMM that can gives it in `dtype`."""
        return silu_mul(self(given))

    def argmax(self, x_ND: Tensor, argmax: Argmax) -> Tensor:
        """Finds the largest output of each row. `argmax` finds it where the GEMM itself cannot."""
        return argmax(self(x_ND))

    def picked(self, outs_T: Tensor) -> "Linear | None":  # noqa: ARG002 - for those that can
        """Makes a linear of these outputs alone, from a copy of their weights as they are laid out; None where that is
        impossible."""
        return None

    def rows(self, outs_T: Tensor) -> Tensor | None:  # noqa: ARG002 - for those that can
        """Returns a copy of these rows of the weight; None where they cannot be told from the others."""
        return None
