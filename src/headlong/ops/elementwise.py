"""Activations whose bits do not depend on where an element lies in its tensor.

torch's own sigmoid, silu and softplus use other code for the last few elements of a tensor than for the
rest, so the same number can give two results. Its exp, log1p and arithmetic do not; these are built of them.
"""

from functools import cache

import torch
from torch import Tensor


@cache
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A Python number as a tensor, made once: it would be converted at every use, which costs more than the
    arithmetic."""
    return torch.tensor(value, dtype=dtype, device=device)


def _one_plus_exp_of_minus(x: Tensor) -> Tensor:
    return torch.neg(x).exp_().add_(_constant(1.0, x.dtype, x.device))


def sigmoid(x: Tensor) -> Tensor:
    return _one_plus_exp_of_minus(x).reciprocal_()


def silu(x: Tensor) -> Tensor:
    return x / _one_plus_exp_of_minus(x)


def swish(x: Tensor, alpha: float) -> Tensor:
    """x · sigmoid(alpha · x)"""
    return x / _one_plus_exp_of_minus(x * alpha)


def softplus(x: Tensor) -> Tensor:
    return torch.where(x > _constant(20.0, x.dtype, x.device), x, torch.exp(x).log1p_())
