"""What every layer of a step shares: rotations, and where each op finds its rows. Made once per step."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from headlong.ops.rope.reference import Angles
from headlong.ops.triton_step import TritonStep


@dataclass(frozen=True)
class Context:
    """Plans belong to the ops that made them; layers pass them on. `delta_net` is None for passes that touch
    attention alone (the head's)."""

    angles: Angles
    attention: Any
    delta_net: Any = None

    @property
    def key(self) -> Hashable:
        """All that varies besides tensors, of a step of Triton's kernels."""
        step = self.attention
        assert isinstance(step, TritonStep)
        return self.delta_net is None, step.page_size, step.most_tokens, step.longest

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        assert isinstance(self.attention, TritonStep)
        return self.angles.cos, self.angles.sin, *self.attention.tensors

    def over(self, tensors: Sequence[Tensor]) -> "Context":
        """The same step, read from these."""
        cos, sin, *rest = tensors
        step = self.attention.over(rest)
        return Context(replace(self.angles, cos=cos, sin=sin), step, None if self.delta_net is None else step)
