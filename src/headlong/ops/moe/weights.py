"""What a layer of experts is made of, before it is decided who multiplies."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from headlong.ops.linear.linear import Shard
from headlong.ops.moe.routing import Routing
from headlong.ops.silu_mul.activation import SILU, Activation
from headlong.quant.format import Weight


class ExpertWeights(NamedTuple):
    """The weights of one of a layer's experts, which computes down(activation(gate x, up x))."""

    gate_up: list[Weight]
    """The weights of gate and up, one below the other."""
    down: Weight
    gate_up_bias: Tensor | None = None
    """What is added to the outputs of gate and up, float32, likewise one below the other."""
    down_bias: Tensor | None = None


@dataclass(frozen=True)
class MoeWeights:
    routing: Routing
    load: Callable[[int], ExpertWeights]
    """Loads an expert's weights, as often as they are asked for: a backend that cannot take them all leaves them to the
    next."""
    shared: ExpertWeights | None
    """The weights of the shared expert, which every token is routed to; None where there is none."""
    shared_gate: bool = True
    """Whether the last of the logits is the gate of the shared expert, which is else added as it is."""
    bias_E: Tensor | None = None
    """What is added to scores before experts are chosen."""
    shards: tuple[Shard, Shard] = (Shard.OUTPUT, Shard.INPUT)
    """How gate_up and down of every expert may be split."""
    activation: Activation = SILU
    """What every expert computes of gates and ups, the shared one too."""

    @property
    def is_gated(self) -> bool:
        """Whether there is one more of the logits than there are experts."""
        return self.shared is not None and self.shared_gate
