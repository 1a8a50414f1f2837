"""What a layer of experts is made of, before it is decided who multiplies."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from headlong.ops.linear.linear import Shard
from headlong.quant.format import Weight


class ExpertWeights(NamedTuple):
    """The weights of a layer's experts, each of which computes down(silu(gate x) · up x)."""

    gate_up: list[Weight]
    """The weights of gate and up, one below the other."""
    down: Weight


@dataclass(frozen=True)
class MoeWeights:
    num_experts: int
    num_active: int
    normalise: bool
    load: Callable[[int], ExpertWeights]
    """Loads an expert's weights, as often as they are asked for: a backend that cannot take them all leaves them to the
    next."""
    shared: ExpertWeights
    """The weights of the shared expert, which every token is routed to."""
    shards: tuple[Shard, Shard] = (Shard.OUTPUT, Shard.INPUT)
    """How gate_up and down of every expert may be split."""
