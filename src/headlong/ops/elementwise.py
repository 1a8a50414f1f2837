"""Activations whose bits do not depend on where an element lies in its tensor.

torch's own sigmoid, silu and softplus use other code for the last few elements of a tensor than for the
rest, so the same number can give two results. Its exp, log1p and arithmetic do not; these are built of them.
"""

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    return torch.exp(-x).add_(1.0).reciprocal_()


def silu(x: Tensor) -> Tensor:
    return x / torch.exp(-x).add_(1.0)


def softplus(x: Tensor) -> Tensor:
    return torch.where(x > 20.0, x, torch.exp(x).log1p_())
