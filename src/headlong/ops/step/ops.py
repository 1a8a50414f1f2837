"""The ops of a step that asks the host for nothing: where its rows are, what they are fed, which drafts stand."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class StepOps(NamedTuple):
    """One backend's. What each does is said in reference.py."""

    begin: Callable[..., tuple[Tensor, Tensor]]
    look_up: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    feed: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    accept: Callable[..., Tensor]
    carry: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    count_tokens: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    """Of ops/penalise: what stands is added to what penalised rows have seen."""
