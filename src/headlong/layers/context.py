"""What every layer of a step shares: where tokens lie, angles, and each op's plan. Made once per step."""

from dataclasses import dataclass

from headlong.ops.causal_conv.reference import ConvPlan
from headlong.ops.gated_delta.reference import DeltaPlan
from headlong.ops.paged_attention.reference import AttentionPlan
from headlong.ops.rope.reference import Angles


@dataclass(frozen=True)
class Context:
    """`conv` and `delta` are None for passes that touch attention alone (the head's)."""

    angles: Angles
    attention: AttentionPlan
    conv: ConvPlan | None = None
    delta: DeltaPlan | None = None
