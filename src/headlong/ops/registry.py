"""Chooses, once at load, who computes each op. Asks every candidate why it could not serve and logs it.

Knows candidates and reasons, no model. Only linears have more than the reference so far.
"""

import logging
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headlong.ops.linear.invariance import Linear, RowLinear, find_tile
from headlong.ops.linear.onednn import OneDnnLinear, cpu_multiplies_bfloat16
from headlong.ops.linear.reference import ReferenceLinear

log = logging.getLogger(__name__)
LINEARS = (OneDnnLinear, ReferenceLinear)


@dataclass(frozen=True)
class Ops:
    """The ops of one engine: `linear(weight)` packs a weight for this device and dtype."""

    dtype: torch.dtype
    device: torch.device
    _reasons: set[str] = field(default_factory=set, repr=False)

    @property
    def activation_dtype(self) -> torch.dtype:
        """What flows between layers: float32 at least, whatever the weights are."""
        return torch.promote_types(self.dtype, torch.float32)

    def linear(self, weight: Tensor) -> Linear:
        if weight.is_meta:
            return ReferenceLinear(weight)
        for candidate in LINEARS:
            reason = candidate.supports(weight.dtype, weight.device)
            if reason is None and weight.device.type == "cpu":
                tile = find_tile(candidate, *weight.shape, weight.dtype)
                if tile is not None:
                    return candidate(weight, tile)
                reason = f"a row's bits depend on its neighbours at shape {tuple(weight.shape)}"
            elif reason is None:
                return candidate(weight)
            self._say(f"linear: not {candidate.name}: {reason}")
        return RowLinear(weight)

    def _say(self, reason: str) -> None:
        if reason not in self._reasons:
            self._reasons.add(reason)
            log.info(reason)


def default_dtype(device: torch.device, stored: torch.dtype) -> torch.dtype:
    """The checkpoint's own dtype where the device multiplies it well, else float32."""
    if device.type == "cpu":
        return torch.bfloat16 if stored == torch.bfloat16 and cpu_multiplies_bfloat16() else torch.float32
    return stored if stored in (torch.bfloat16, torch.float16, torch.float32) else torch.bfloat16
