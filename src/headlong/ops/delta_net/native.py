"""The DeltaNet core as one native call per layer; float32 arithmetic whatever the activations are."""

import ctypes

import torch
from torch import Tensor

from headlong.ops import native
from headlong.ops.delta_net.reference import QK_EPS, DeltaNetWeights
from headlong.ops.gated_delta.reference import DeltaState
from headlong.types import Rows


class _DeltaNet(ctypes.Structure):
    """Mirrors `DeltaNet` in csrc/native.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("key_heads", "value_heads", "key_dim", "value_dim")),
        *((name, ctypes.c_int64) for name in ("kernel", "window", "max_drafts", "tiled")),
        *((name, ctypes.c_void_p) for name in ("conv", "rate", "dt_bias", "norm")),
        *((name, ctypes.c_float) for name in ("qk_eps", "norm_eps")),
        *((name, ctypes.c_void_p) for name in ("memory", "drafts", "windows")),
    )


class NativeDeltaNet:
    """One layer's weights; its state is bound at the first call."""

    name = "native"

    def __init__(self, weights: DeltaNetWeights) -> None:
        self.weights = weights
        self._bound: tuple[DeltaState, _DeltaNet] | None = None

    @staticmethod
    def plan(rows: Rows, kernel: int, window: int, device: torch.device) -> Tensor:  # noqa: ARG004 - known here
        return rows.table

    def __call__(self, projected: Tensor, delta: DeltaState, windows_SWC: Tensor, plan: Tensor) -> Tensor:
        w = self.weights
        if self._bound is None or self._bound[0] is not delta:
            self._bound = (delta, self._bind(delta, windows_SWC))
        num_tokens = projected.shape[0]
        out = projected.new_empty(num_tokens, w.num_value_heads * w.value_dim)
        native.kernel("headlong_delta_net")(
            ctypes.addressof(self._bound[1]),
            native.address(projected),
            out.data_ptr(),
            native.is_wide(projected),
            plan.data_ptr(),
            plan.shape[0],
            num_tokens,
        )
        return out

    def _bind(self, delta: DeltaState, windows_SWC: Tensor) -> _DeltaNet:
        w = self.weights
        return _DeltaNet(
            w.num_key_heads,
            w.num_value_heads,
            w.key_dim,
            w.value_dim,
            w.conv_TC.shape[0],
            windows_SWC.shape[1],
            delta.drafts_SKHX.shape[1],
            w.tiled,
            *(t.data_ptr() for t in (w.conv_TC, w.rate, w.dt_bias, w.norm.weight)),
            QK_EPS,
            float(w.norm.eps),
            *(t.data_ptr() for t in (delta.committed_SHDE, delta.drafts_SKHX, windows_SWC)),
        )
