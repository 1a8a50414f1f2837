"""What every layer of a step shares: where tokens lie, angles, and each op's plan. Made once per step."""

from dataclasses import dataclass

from torch import Tensor

from headlong.ops.causal_conv.reference import ConvPlan
from headlong.ops.gated_delta.reference import DeltaPlan
from headlong.ops.paged_attention.reference import AttentionPlan


@dataclass(frozen=True)
class Context:
    """`conv` and `delta` are None for passes that touch attention alone (the head's)."""

    cos: Tensor
    sin: Tensor
    attention: AttentionPlan
    slots_R: Tensor
    conv: ConvPlan | None = None
    delta: DeltaPlan | None = None
