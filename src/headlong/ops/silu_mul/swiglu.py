"""A feed-forward with a gate: down(silu(gate x) · up x), or with another activation."""

import torch
from torch import Tensor

from headlong.ops.linear.linear import Linear, SiluMul
from headlong.ops.norm.normed import Norm, Normed


class SwiGlu:
    """A feed-forward whose `gate_up` gives the gate and what it gates side by side."""

    def __init__(
        self, gate_up: Linear, down: Linear, silu_mul: SiluMul, dtype: torch.dtype, *, is_silu: bool = True
    ) -> None:
        """`silu_mul`, which is another activation where it `is_silu` not, serves where `gate_up` has no epilogue for
        it; one that has gives `dtype`."""
        self.gate_up = gate_up
        self.down = down
        self._silu_mul = silu_mul
        self._dtype = dtype
        self._is_silu = is_silu

    def __call__(self, given: Normed) -> Tensor:
        return self.down(self.gated(given))

    def add_to(self, given: Normed, residual_ND: Tensor, then: Norm) -> tuple[Tensor, Normed]:
        """Adds the feed-forward to `residual_ND`, and applies `then`."""
        return self.down.add_to(self.gated(given), residual_ND, then)

    def gated(self, given: Normed) -> Tensor:
        """Computes silu(gate x) · up x, or what the activation makes of the two."""
        if not self._is_silu:
            return self._silu_mul(self.gate_up(given))
        return self.gate_up.gated(given, self._silu_mul, self._dtype)
