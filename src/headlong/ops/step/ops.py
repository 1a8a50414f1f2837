"""The ops of a step that asks the host for nothing: where its rows are, what they are fed, which drafts are
accepted."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class StepOps(NamedTuple):
    """The functions of one backend. reference.py says what each does."""

    begin: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, Tensor], tuple[Tensor, Tensor]]
    look_up: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    feed: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    accept: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor
    ]
    carry: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    count_tokens: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    """The counting of ops/penalise: adds tokens that are valid to what penalised rows have seen."""
