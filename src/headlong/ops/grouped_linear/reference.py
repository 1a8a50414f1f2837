"""A block-diagonal linear as one linear for each group."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headlong.ops.linear.linear import Linear, Shard


class ReferenceGroupedLinear:
    """Groups of outputs, each of a group of the inputs."""

    name = "reference"
    shard = Shard.OUTPUT

    def __init__(self, groups: Sequence[Linear]) -> None:
        self.groups = groups

    def __call__(self, x_ND: Tensor) -> Tensor:
        parts = x_ND.chunk(len(self.groups), dim=-1)
        return torch.cat(
            [group(part.contiguous()) for group, part in zip(self.groups, parts, strict=True)], -1
        )
