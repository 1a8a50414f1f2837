"""y = x Wᵀ with torch's matmul, made batch-invariant by padding. The truth other linears are measured by.

Weights keep their dtype; activations come and go in the wider dtype of the caller.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from headlong.ops.linear.invariance import launch
from headlong.ops.linear.linear import Linear
from headlong.ops.norm.normed import Normed, whole

ALIGN = 16
"""BLAS treats rows alike only where both weight dimensions fill whole vectors."""


class ReferenceLinear(Linear):
    """A linear on torch's matmul, which pads rows to a multiple of `tile`, and odd weight shapes to multiples of
    `ALIGN`."""

    name = "reference"

    def __init__(self, weight: Tensor, tile: int = 4) -> None:
        self.out_features, self.in_features = weight.shape
        pad_out, pad_in = -self.out_features % ALIGN, -self.in_features % ALIGN
        self.weight = F.pad(weight, (0, pad_in, 0, pad_out)) if pad_in or pad_out else weight
        self.pad_in = pad_in
        self.tile = tile

    @staticmethod
    def supports(dtype: torch.dtype, device: torch.device) -> str | None:  # noqa: ARG004
        """Returns None if this linear can serve, else the reason why not."""
        return None

    def __call__(self, given: Normed) -> Tensor:
        x_ND = whole(given)
        x = x_ND.to(self.weight.dtype)
        if self.pad_in:
            x = F.pad(x, (0, self.pad_in))
        y = launch(self._multiply, x, self.tile)
        return y[:, : self.out_features].to(x_ND.dtype).contiguous()

    def rows(self, outs_T: Tensor) -> Tensor:
        return self.weight[outs_T.to(self.weight.device), : self.in_features]

    def _multiply(self, x_ND: Tensor) -> Tensor:
        return F.linear(x_ND, self.weight)
