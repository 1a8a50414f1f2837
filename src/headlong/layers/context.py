"""What every layer of a step shares: rotations, and where each op finds its rows. Made once per step."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from headlong.ops.prepared import PreparedStep
from headlong.ops.rope.reference import Angles


@dataclass(frozen=True)
class Context:
    """What is prepared belongs to the backend that made it; layers pass it on. `delta_net` is None for passes that
    touch attention alone (the head's)."""

    angles: Angles
    attention: PreparedStep
    delta_net: PreparedStep | None = None
    tokens_N: Tensor | None = None
    """The tokens themselves, which a target adds for layers that route by them."""

    @property
    def key(self) -> Hashable:
        """All that a captured step depends on besides its tensors."""
        return self.delta_net is None, self.attention.key

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.angles.cos, self.angles.sin, *self.attention.tensors

    def over(self, tensors: Sequence[Tensor]) -> "Context":
        """The same step, read from these tensors."""
        cos, sin, *rest = tensors
        step = self.attention.over(rest)
        return Context(replace(self.angles, cos=cos, sin=sin), step, None if self.delta_net is None else step)
