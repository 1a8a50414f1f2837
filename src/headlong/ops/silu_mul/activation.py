"""How a feed-forward gates what it computes, as data: the one definition that all backends keep.

gate = min(gate, limit)
up = min(max(up, -limit), limit)
out = gate · sigmoid(alpha · gate) · (up + plus)
"""

import math
from typing import NamedTuple


class Activation(NamedTuple):
    alpha: float = 1.0
    limit: float = math.inf
    """The most that a gate may be; an up may be as much in either direction."""
    plus: float = 0.0


SILU = Activation()
"""The plain one: silu(gate) · up."""
