"""Several linears over one input that act as one, where their weights are packed apart and cannot be joined."""

import torch
from torch import Tensor

from headlong.ops.linear.linear import Linear
from headlong.ops.norm.normed import Normed


class StackedLinear(Linear):
    """A linear of several parts: output i is output `order[i]` of the parts side by side."""

    name = "stacked"

    def __init__(self, parts: list[Linear], order: Tensor | None = None) -> None:
        self.parts = parts
        self.order = order
        self.in_features = parts[0].in_features
        self.out_features = sum(part.out_features for part in parts)

    def __call__(self, given: Normed) -> Tensor:
        out = torch.cat([part(given) for part in self.parts], dim=-1)
        if self.order is None:
            return out
        if self.order.device != out.device:
            self.order = self.order.to(out.device)
        return out.index_select(-1, self.order)
