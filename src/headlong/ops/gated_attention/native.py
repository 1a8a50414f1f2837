"""The attention core as one native call per layer; float32 arithmetic whatever the cache is."""

import ctypes

import torch
from torch import Tensor

from headlong.ops import native
from headlong.ops.gated_attention.reference import GatedAttentionWeights
from headlong.ops.linear.linear import Projected
from headlong.ops.native_step import NativeStep
from headlong.ops.prepared import PreparedStep
from headlong.ops.rope.reference import Angles
from headlong.types import Rows


class AttentionStruct(ctypes.Structure):
    """Mirrors `Attention` in csrc/cores.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "head_dim")),
        *((name, ctypes.c_int64) for name in ("half_rotary_dim", "page_size", "padded_dim", "gated")),
        ("qk_norm", ctypes.c_void_p),
        ("qk_eps", ctypes.c_float),
        ("q_scale", ctypes.c_float),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("is_float", ctypes.c_int),
        ("window", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
    )


class NativeGatedAttention:
    """The attention core of one layer; its cache is bound at the first call."""

    name = "native"

    def __init__(self, weights: GatedAttentionWeights) -> None:
        self.weights = weights
        self._sinks_H = None if weights.sinks_H is None else weights.sinks_H.float().contiguous()
        self._bound: tuple[Tensor, AttentionStruct] | None = None

    @staticmethod
    def prepare(rows: Rows, pages_RP: Tensor, page_size: int) -> NativeStep:
        return NativeStep.of(rows, pages_RP, page_size)

    @property
    def out_features(self) -> int:
        return self.weights.num_heads * self.weights.head_dim

    def __call__(
        self, projected: Projected, keys: Tensor, values: Tensor, angles: Angles, step: PreparedStep
    ) -> Tensor:
        assert isinstance(projected, Tensor)
        out = projected.new_empty(projected.shape[0], self.out_features)
        self._run(projected, keys, values, angles, step, out.data_ptr())
        return out

    def write(
        self, projected: Projected, keys: Tensor, values: Tensor, angles: Angles, step: PreparedStep
    ) -> None:
        """Writes the tokens' keys and values, and attends to nothing."""
        assert isinstance(projected, Tensor)
        self._run(projected, keys, values, angles, step, None)

    def _run(
        self,
        projected: Tensor,
        keys: Tensor,
        values: Tensor,
        angles: Angles,
        step: PreparedStep,
        out: int | None,
    ) -> None:
        assert isinstance(step, NativeStep)
        if self._bound is None or self._bound[0] is not keys:
            self._bound = (keys, self.bind(keys, values, angles.rotary_dim))
        native.kernel("headlong_attention")(
            ctypes.addressof(self._bound[1]), native.address(projected), out, step.address(angles)
        )

    def bind(self, keys: Tensor, values: Tensor, rotary_dim: int) -> AttentionStruct:
        """Binds weights and cache as the kernel takes them; they must outlive it."""
        w, norm = self.weights, self.weights.qk_norm
        assert keys.dtype in (torch.float32, torch.bfloat16) and keys.is_contiguous()
        return AttentionStruct(
            w.num_heads,
            w.num_kv_heads,
            w.head_dim,
            rotary_dim // 2,
            keys.shape[2],
            keys.shape[3],
            w.gated,
            None if norm is None else native.address(norm.weight),
            0.0 if norm is None else float(norm.eps),
            w.query_scale,
            keys.data_ptr(),
            values.data_ptr(),
            keys.dtype == torch.float32,
            0 if w.window is None else w.window,
            None if self._sinks_H is None else native.address(self._sinks_H),
        )
