"""A block-diagonal linear on a GPU: one GEMM, whose tiles of outputs read the inputs of their own group."""

from dataclasses import replace

import torch

from headlong.ops.linear.linear import Shard
from headlong.ops.linear.triton import TritonLinear
from headlong.quant.format import Weight


class TritonGroupedLinear(TritonLinear):
    """Groups of outputs, each of a group of the inputs."""

    shard = Shard.OUTPUT

    def __init__(self, weight: Weight, groups: int, dtype: torch.dtype) -> None:
        """The rows of `weight` are the outputs of all groups, its columns the inputs of each."""
        super().__init__([weight], dtype=dtype)
        self.in_features *= groups
        self.weights = [replace(self.weights[0], groups=groups)]

    @classmethod
    def load(cls, weight: Weight, groups: int, dtype: torch.dtype) -> "TritonGroupedLinear | None":
        """Returns None where a group's outputs are no whole tiles."""
        made = cls(weight, groups, dtype)
        (whole,) = made.weights
        return None if whole.num_outs // groups % whole.config.block_n else made
