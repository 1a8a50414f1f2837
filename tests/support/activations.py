"""Activations of families, and what a clamped one gives at the ends."""

import torch
from torch import Tensor

from headlong.ops.silu_mul.activation import Activation

CLAMPED = Activation(1.702, 7.0, 1.0)
OTHERS = (Activation(limit=10.0), Activation(alpha=0.5), Activation(plus=-2.0))
EXTREMES = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4, torch.nan, 1, 1, 1, -1e4, 1e4, 1]])
"""Gates, then as many ups."""


def check_clamped(out: Tensor) -> None:
    """What `CLAMPED` makes of `EXTREMES`: gates end at 7, ups at 7 in both directions."""
    most = 7.0 * torch.sigmoid(torch.tensor(7.0 * 1.702))
    wanted = torch.stack([0.0 * most, 0.0 * most, 0.0 * most, -6.0 * most, 8.0 * most])
    torch.testing.assert_close(out[:5], wanted, rtol=1e-6, atol=1e-6)
    assert out[5].isnan()
