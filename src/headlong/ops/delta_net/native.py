"""The DeltaNet core as one native call per layer, in float32."""

import ctypes

from torch import Tensor

from headlong.ops import native
from headlong.ops.delta_net.reference import QK_EPS, DeltaNetWeights
from headlong.ops.gated_delta.reference import DeltaState
from headlong.ops.linear.linear import Projected
from headlong.ops.native_step import NativeStep
from headlong.ops.prepared import PreparedStep


class DeltaNetStruct(ctypes.Structure):
    """Mirrors `DeltaNet` in csrc/cores.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_key_heads", "num_value_heads", "key_dim", "value_dim")),
        *((name, ctypes.c_int64) for name in ("num_taps", "window_size", "max_drafts", "tiled")),
        *((name, ctypes.c_void_p) for name in ("conv", "rate", "dt_bias", "norm")),
        *((name, ctypes.c_float) for name in ("qk_eps", "norm_eps")),
        *((name, ctypes.c_void_p) for name in ("state", "drafts", "windows")),
    )


class NativeDeltaNet:
    """The DeltaNet core of one layer; its state is bound at the first call."""

    name = "native"

    def __init__(self, weights: DeltaNetWeights) -> None:
        self.weights = weights
        self._bound: tuple[DeltaState, DeltaNetStruct] | None = None

    @property
    def out_features(self) -> int:
        return self.weights.num_value_heads * self.weights.value_dim

    def __call__(
        self, projected: Projected, delta: DeltaState, windows_SWC: Tensor, step: PreparedStep
    ) -> Tensor:
        assert isinstance(projected, Tensor) and isinstance(step, NativeStep)
        if self._bound is None or self._bound[0] is not delta:
            self._bound = (delta, self.bind(delta, windows_SWC))
        out = projected.new_empty(projected.shape[0], self.out_features)
        native.kernel("headlong_delta_net")(
            ctypes.addressof(self._bound[1]), native.address(projected), out.data_ptr(), step.address()
        )
        return out

    def bind(self, delta: DeltaState, windows_SWC: Tensor) -> DeltaNetStruct:
        """Binds weights and state as the kernel takes them; they must outlive it."""
        w = self.weights
        return DeltaNetStruct(
            w.num_key_heads,
            w.num_value_heads,
            w.key_dim,
            w.value_dim,
            w.conv_TC.shape[0],
            windows_SWC.shape[1],
            delta.drafts_SKHX.shape[1],
            w.tiled,
            *(native.address(t) for t in (w.conv_TC, w.rate, w.dt_bias, w.norm.weight)),
            QK_EPS,
            float(w.norm.eps),
            *(native.address(t) for t in (delta.committed_SHDE, delta.drafts_SKHX, windows_SWC)),
        )
