"""What every layer of a step shares: rotations, and where each op finds its rows. Made once per step."""

from dataclasses import dataclass
from typing import Any

from headlong.ops.rope.reference import Angles


@dataclass(frozen=True)
class Context:
    """Plans belong to the ops that made them; layers pass them on. `delta_net` is None for passes that touch
    attention alone (the head's)."""

    angles: Angles
    attention: Any
    delta_net: Any = None
