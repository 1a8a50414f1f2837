"""y = x Wᵀ with torch's matmul, made batch-invariant by padding. The truth other linears are measured by.

Weights keep their dtype; activations come and go in the wider dtype of the caller.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGN = 16
"""BLAS treats rows alike only where both weight dimensions fill whole vectors."""


def pad_rows(x: Tensor, tile: int) -> Tensor:
    missing = -x.shape[0] % tile
    return F.pad(x, (0, 0, 0, missing)) if missing else x


class ReferenceLinear:
    """Pads rows to a multiple of `tile`, and odd weight shapes to multiples of `ALIGN`."""

    name = "reference"

    def __init__(self, weight: Tensor, tile: int = 4) -> None:
        self.out_features, self.in_features = weight.shape
        pad_out, pad_in = -self.out_features % ALIGN, -self.in_features % ALIGN
        self.weight = F.pad(weight, (0, pad_in, 0, pad_out)) if pad_in or pad_out else weight
        self.pad_in = pad_in
        self.tile = tile

    @staticmethod
    def supports(dtype: torch.dtype, device: torch.device) -> str | None:  # noqa: ARG004
        """None if this linear can serve, else the reason why not."""
        return None

    def __call__(self, x_ND: Tensor) -> Tensor:
        num_rows, dtype = x_ND.shape[0], x_ND.dtype
        x_ND = x_ND.to(self.weight.dtype)
        if self.pad_in:
            x_ND = F.pad(x_ND, (0, self.pad_in))
        y = F.linear(pad_rows(x_ND, self.tile), self.weight)
        return y[:num_rows, : self.out_features].to(dtype).contiguous()
