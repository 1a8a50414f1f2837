"""How rotary frequencies are scaled so that a model reads more than it was first trained on: one class for each way.

A scaling divides each frequency by a factor of its own, and may stretch cosines and sines by an amplitude. Both are the
same for all tokens of all sequences: a token's bits must not depend on how long a sequence will get, so nothing here
looks at a length.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class RopeScaling(Protocol):
    @property
    def amplitude(self) -> float:
        """What cosines and sines are multiplied with."""
        ...

    def factors(self, theta: float, rotary_dim: int) -> Tensor:
        """Returns the divisor of each of the rotary_dim / 2 frequencies."""
        ...


@dataclass(frozen=True)
class LinearScaling:
    """Every wave is stretched alike."""

    factor: float
    amplitude: float = 1.0

    def factors(self, theta: float, rotary_dim: int) -> Tensor:  # noqa: ARG002 - all alike
        return torch.full((rotary_dim // 2,), self.factor, dtype=torch.float64)


@dataclass(frozen=True)
class Llama3Scaling:
    """Scaling as Llama 3 does it: waves that turned fewer than `low_freq_factor` times in the original context are
    stretched by `factor`, those that turned more than `high_freq_factor` times are left alone, and between the two the
    factor changes smoothly."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int
    amplitude: float = 1.0

    def factors(self, theta: float, rotary_dim: int) -> Tensor:
        turns = self.original_max_position / (2.0 * math.pi * theta ** _exponents(rotary_dim))
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return _between(kept.clamp(0.0, 1.0), self.factor)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN: as Llama 3's, but the factor changes with a frequency's number, not with its wavelength, between those that
    turned `beta_slow` and `beta_fast` times. `truncate` widens the range to whole numbers."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    amplitude: float = 1.0
    truncate: bool = True

    def factors(self, theta: float, rotary_dim: int) -> Tensor:
        low, high = (self._number(turns, theta, rotary_dim) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        numbers = torch.arange(rotary_dim // 2, dtype=torch.float64)
        stretched = (numbers - low) / max(high - low, 1e-3)
        return _between(1.0 - stretched.clamp(0.0, 1.0), self.factor)

    def _number(self, turns: float, theta: float, rotary_dim: int) -> float:
        """The number, not always whole, of the frequency that turned so many times."""
        waves = math.log(self.original_max_position / (turns * 2.0 * math.pi))
        return rotary_dim * waves / (2.0 * math.log(theta))


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE: the divisors are the config's own, found by search."""

    divisors: tuple[float, ...]
    amplitude: float = 1.0

    def factors(self, theta: float, rotary_dim: int) -> Tensor:  # noqa: ARG002 - they are listed
        return torch.tensor(self.divisors, dtype=torch.float64)


def _exponents(rotary_dim: int) -> Tensor:
    return torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim


def _between(kept: Tensor, factor: float) -> Tensor:
    """The divisors of frequencies of which a part is `kept` and the rest divided by `factor`."""
    return 1.0 / ((1.0 - kept) / factor + kept)
