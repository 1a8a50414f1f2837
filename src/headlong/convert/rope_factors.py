"""The scaling of rotary frequencies that a config describes, found again from the factors a GGUF file stores.

A wave shorter than `original / high` keeps its frequency, one longer than `original / low` is divided by `factor`, and
between the two 1 / divisor goes linearly with 1 / wavelength. The divisors fix the ratios alone, so `low` is set to 1.
"""

import math
from typing import Any

import torch
from torch import Tensor

from headlong.errors import CheckpointError

_TOLERANCE = 1e-4
_WIDEST = 1e6


def llama3_parameters(factors: Tensor, theta: float, rotary_dim: int) -> dict[str, Any]:
    """The fields of `rope_parameters` that give these factors; raises `CheckpointError` where none do."""
    stored = factors.double()
    rates = theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim) / (2 * math.pi)
    factor = float(stored.max())
    if factor <= 1.0 + _TOLERANCE:
        return {}
    smooth = (1 / stored - 1 / factor) / (1 - 1 / factor)
    between = (smooth > 1e-3) & (smooth < 1 - 1e-3)
    if int(between.sum()) >= 2:
        x, y = rates[between], smooth[between]
        slope = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
        offset = slope * float(x.mean()) - float(y.mean())
    else:  # no wave lies between: any bounds in the gap will do
        kept, divided = rates[smooth >= 0.5], rates[smooth < 0.5]
        low_rate, high_rate = float(divided.max()), float(kept.min()) if len(kept) else _WIDEST
        slope, offset = 1 / (high_rate - low_rate), low_rate / (high_rate - low_rate)
    found = {
        "rope_type": "llama3",
        "factor": _tidy(factor),
        "low_freq_factor": 1.0,
        "high_freq_factor": _tidy(1 + 1 / offset),
        "original_max_position_embeddings": round(slope / offset),
    }
    if not _gives(found, rates, stored):
        raise CheckpointError(
            "rope_freqs.weight: these factors follow no scaling that config.json can describe"
        )
    return found


def _gives(found: dict[str, Any], rates: Tensor, stored: Tensor) -> bool:
    low, high = found["low_freq_factor"], found["high_freq_factor"]
    smooth = ((found["original_max_position_embeddings"] * rates - low) / (high - low)).clamp(0, 1)
    factors = 1 / ((1 - smooth) / found["factor"] + smooth)
    return bool(((factors - stored).abs() <= 1e-3 * stored).all())


def _tidy(value: float) -> float:
    """`value` rounded to an integer where the fit comes that near to one."""
    return float(round(value)) if abs(value - round(value)) < 1e-3 * abs(value) else value
