"""A layer's experts as one native call: routing, the routed experts, and the one that every token has."""

import ctypes
from collections.abc import Callable, Sequence

from torch import Tensor

from headlong.ops import native
from headlong.ops.linear.native import NativeLinear
from headlong.ops.linear.native_source import Source
from headlong.ops.moe.weights import ExpertWeights, MoeWeights
from headlong.ops.norm.normed import Norm, Normed, whole
from headlong.ops.silu_mul.native import ActivationStruct
from headlong.quant.format import Weight


class _Panel(ctypes.Structure):
    """Mirrors `Panel` in csrc/experts.h, as the ones below mirror what has their name there."""

    _fields_ = (("w", ctypes.c_void_p), ("first_out", ctypes.c_int64))


class _Linear(ctypes.Structure):
    _fields_ = (("panels", ctypes.c_void_p), ("num_panels", ctypes.c_int64), ("num_outs", ctypes.c_int64))


class _Expert(ctypes.Structure):
    _fields_ = (("gate_up", _Linear), ("down", _Linear))


class _Experts(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_experts", "num_active", "normalise", "hidden_size")),
        ("experts", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("sigmoid_scores", "num_groups", "kept_groups", "shared")),
        ("bias", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("activation", ActivationStruct),
    )


_NO_SHARED, _SHARED, _GATED = range(3)


class NativeExperts:
    """A layer's experts on native GEMMs, in any format that those take; a token's bits depend on its own row alone."""

    name = "native"
    has_shared = True

    def __init__(self, weights: MoeWeights, linears: Sequence[tuple[NativeLinear, NativeLinear]]) -> None:
        """`linears` are gate_up and down of every expert, those of the shared one last, if there is one."""
        self.linears = list(linears)
        self.hidden_size = self.linears[0][1].out_features
        self._panels: list[ctypes.Array[_Panel]] = []
        experts = [_Expert(self._struct(gate_up), self._struct(down)) for gate_up, down in self.linears]
        self._all = (_Expert * len(experts))(*experts)
        r, bias_E = weights.routing, weights.bias_E
        self._bias_E = None if bias_E is None else bias_E.float().contiguous()
        self._whole = _Experts(
            r.num_experts,
            r.num_active,
            r.normalise,
            self.hidden_size,
            ctypes.addressof(self._all),
            r.scores == "sigmoid",
            r.num_groups if r.is_grouped else 1,
            r.kept_groups if r.is_grouped else 1,
            _NO_SHARED if weights.shared is None else _GATED if weights.shared_gate else _SHARED,
            None if self._bias_E is None else self._bias_E.data_ptr(),
            r.scale,
            ActivationStruct(*weights.activation),
        )

    @classmethod
    def load(cls, weights: MoeWeights, source: Callable[[Weight], Source | None]) -> "NativeExperts | None":
        """Loads the experts; None where the native GEMM cannot take a weight, which `source` says, or the kernel does
        not route so."""
        if weights.routing.given or weights.routing.scores == "sqrtsoftplus":
            return None
        linears = []
        shared = [] if weights.shared is None else [weights.shared]
        for expert in range(weights.routing.num_experts + len(shared)):
            made = _linears(
                weights.load(expert) if expert < weights.routing.num_experts else shared[0], source
            )
            if made is None:
                return None
            for linear, shard in zip(made, weights.shards, strict=True):
                linear.shard = shard
            linears.append(made)
        return cls(weights, linears)

    @property
    def address(self) -> int:
        """The address of the structure that the kernel takes; valid as long as this object lives."""
        return ctypes.addressof(self._whole)

    def __call__(
        self,
        given: Normed,
        logits_NR: Tensor,
        shared_ND: Tensor | None,
        residual_ND: Tensor,
        then: Norm,
        chosen_NA: Tensor | None = None,
    ) -> tuple[Tensor, Normed]:
        """Adds the experts' outputs to `residual_ND`, and applies `then`."""
        assert shared_ND is None and chosen_NA is None, "computed here"
        x_ND, out = whole(given), residual_ND.clone()
        native.kernel("headlong_experts")(
            self.address,
            native.address(x_ND),
            native.address(logits_NR),
            native.address(out),
            len(x_ND),
            native.num_threads(),
        )
        return out, then(out)

    def _struct(self, linear: NativeLinear) -> _Linear:
        panels = [_Panel(ctypes.addressof(panels.struct), panels.column) for panels in linear.panels]
        array = (_Panel * len(panels))(*panels)
        self._panels.append(array)
        return _Linear(ctypes.addressof(array), len(panels), linear.out_features)


def _linears(
    weights: ExpertWeights, source: Callable[[Weight], Source | None]
) -> tuple[NativeLinear, NativeLinear] | None:
    gate_up = [found for weight in weights.gate_up if (found := source(weight)) is not None]
    down = source(weights.down)
    if down is None or len(gate_up) < len(weights.gate_up):
        return None
    return NativeLinear(gate_up, bias=weights.gate_up_bias), NativeLinear([down], bias=weights.down_bias)
