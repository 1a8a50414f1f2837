"""What the layers of one step share, made once per step by a backend for its own ops."""

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Self

from torch import Tensor

from headlong.ops.places import Places


class PreparedStep:
    """Which rows a step feeds and where their pages and slots are, in the form that one backend's ops read.

    Layers pass it on without looking inside. Where a backend's steps can be captured as CUDA graphs, it also says what
    a graph depends on, and can be read from other tensors.
    """

    @cached_property
    def places(self) -> Places:
        """Where each token is, for ops in plain torch."""
        raise NotImplementedError(f"{type(self).__name__} is for kernels alone")

    @property
    def key(self) -> Hashable:
        """Everything that varies between steps besides tensors."""
        raise NotImplementedError(f"{type(self).__name__} cannot be captured")

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything that kernels read."""
        raise NotImplementedError(f"{type(self).__name__} cannot be captured")

    def over(self, tensors: Sequence[Tensor]) -> Self:
        """Returns the same step, read from these tensors, which are in the order of `tensors`."""
        raise NotImplementedError(f"{type(self).__name__} cannot be captured")
