"""The attention core as one native call per layer; float32 arithmetic whatever activations and cache are."""

import ctypes
from dataclasses import dataclass

from torch import Tensor

from headlong.ops import native
from headlong.ops.gated_attention.reference import GatedAttentionWeights
from headlong.ops.rope.reference import Angles
from headlong.types import Rows


class _Attention(ctypes.Structure):
    """Mirrors `Attention` in csrc/native.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "head_dim")),
        *((name, ctypes.c_int64) for name in ("half", "page_size", "padded_dim", "gated")),
        ("qk_norm", ctypes.c_void_p),
        ("qk_eps", ctypes.c_float),
        ("q_scale", ctypes.c_float),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("wide_cache", ctypes.c_int),
    )


@dataclass(frozen=True)
class NativePlan:
    table: Tensor
    pages_RP: Tensor
    longest: int


class NativeGatedAttention:
    """One layer's weights; its cache is bound at the first call."""

    name = "native"

    def __init__(self, weights: GatedAttentionWeights) -> None:
        self.weights = weights
        self._bound: tuple[Tensor, _Attention] | None = None

    @staticmethod
    def plan(rows: Rows, pages_RP: Tensor, page_size: int) -> NativePlan:  # noqa: ARG004 - known from the cache
        longest = max(start + length for start, length in zip(rows.starts, rows.query_lens, strict=True))
        return NativePlan(rows.table, pages_RP, longest)

    def __call__(
        self, projected: Tensor, keys: Tensor, values: Tensor, angles: Angles, plan: NativePlan
    ) -> Tensor:
        out = projected.new_empty(projected.shape[0], self.weights.num_heads * self.weights.head_dim)
        self._run(projected, keys, values, angles, plan, out.data_ptr())
        return out

    def write(
        self, projected: Tensor, keys: Tensor, values: Tensor, angles: Angles, plan: NativePlan
    ) -> None:
        """The tokens' keys and values alone."""
        self._run(projected, keys, values, angles, plan, None)

    def _run(
        self,
        projected: Tensor,
        keys: Tensor,
        values: Tensor,
        angles: Angles,
        plan: NativePlan,
        out: int | None,
    ) -> None:
        if self._bound is None or self._bound[0] is not keys:
            self._bound = (keys, self._bind(keys, values, angles.rotary_dim // 2))
        native.kernel("headlong_attention")(
            ctypes.addressof(self._bound[1]),
            native.address(projected),
            out,
            native.is_wide(projected),
            native.address(angles.cos),
            native.address(angles.sin),
            plan.table.data_ptr(),
            plan.table.shape[0],
            native.address(plan.pages_RP),
            plan.pages_RP.shape[1],
            plan.longest,
        )

    def _bind(self, keys: Tensor, values: Tensor, half: int) -> _Attention:
        w, norm = self.weights, self.weights.qk_norm
        return _Attention(
            w.num_heads,
            w.num_kv_heads,
            w.head_dim,
            half,
            keys.shape[2],
            keys.shape[3],
            w.gated,
            None if norm is None else norm.weight.data_ptr(),
            0.0 if norm is None else float(norm.eps),
            w.query_scale,
            keys.data_ptr(),
            values.data_ptr(),
            native.is_wide(keys),
        )
