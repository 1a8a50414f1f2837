"""y = x Wᵀ on a CPU with the weight packed once into oneDNN's blocked layout.

Twice as fast as packing at every call, and its cost hardly grows from one row to eight, which is what
verifying drafts lives on. Serves float32 everywhere, bfloat16 where the CPU multiplies it.
"""

from functools import cache

import torch
from torch import Tensor

from headlong.ops.linear.invariance import launch
from headlong.ops.linear.linear import Linear
from headlong.ops.norm.normed import Normed, whole

SPLIT_FEATURES = 1024
"""The inner size above which a single row may be split between threads; two or more rows never were."""


class OneDnnLinear(Linear):
    """A linear on oneDNN, which pads rows to a multiple of `tile`."""

    name = "onednn"

    def __init__(self, weight: Tensor, tile: int = 2) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.tile = tile if self.in_features <= SPLIT_FEATURES else max(tile, 2)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._product = torch.ops.mkldnn._linear_pointwise.default

    @staticmethod
    def supports(dtype: torch.dtype, device: torch.device) -> str | None:
        """Returns None if this linear can serve, else the reason why not."""
        if device.type != "cpu":
            return f"runs on the CPU, not on {device.type}"
        if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            return "this build of torch has no oneDNN"
        if dtype == torch.bfloat16 and not cpu_multiplies_bfloat16():
            return "this CPU has no bfloat16 instructions"
        if dtype not in (torch.float32, torch.bfloat16):
            return f"takes float32 and bfloat16, not {dtype}"
        return None

    def __call__(self, given: Normed) -> Tensor:
        x_ND = whole(given)
        return launch(self._multiply, x_ND.to(self.dtype), self.tile).to(x_ND.dtype)

    def rows(self, outs_T: Tensor) -> Tensor:
        return self._packed.to_dense(self.dtype)[outs_T]

    def _multiply(self, x_ND: Tensor) -> Tensor:
        return self._product(x_ND, self._packed, None, "none", [], "")


@cache
def cpu_multiplies_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 by instructions of its own. This is found by trial, because oneDNN may be
    restricted to fewer instructions than the CPU has."""
    if not torch.cpu._is_avx512_bf16_supported():
        return False
    try:
        OneDnnLinear(torch.ones(16, 16, dtype=torch.bfloat16))(torch.ones(2, 16, dtype=torch.bfloat16))
    except RuntimeError:
        return False
    return True
