"""Chooses, once at load, who computes each op. Asks every candidate why it could not serve and logs it.

Knows candidates and reasons, no model. Whoever is chosen, the result is batch-invariant and rolls back alike.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headlong.ops import native
from headlong.ops.argmax import native as native_argmax
from headlong.ops.argmax import reference as reference_argmax
from headlong.ops.delta_net.native import NativeDeltaNet
from headlong.ops.delta_net.reference import DeltaNetWeights, ReferenceDeltaNet
from headlong.ops.draw import native as native_draw
from headlong.ops.embedding.native import NativeEmbedding
from headlong.ops.embedding.reference import Embedding
from headlong.ops.gated_attention.native import NativeGatedAttention
from headlong.ops.gated_attention.reference import GatedAttentionWeights, ReferenceGatedAttention
from headlong.ops.linear.biased import BiasedLinear
from headlong.ops.linear.invariance import Linear, Norm, Projection, RowLinear, find_tile
from headlong.ops.linear.native import NativeLinear, Source
from headlong.ops.linear.onednn import OneDnnLinear, cpu_multiplies_bfloat16
from headlong.ops.linear.reference import ReferenceLinear
from headlong.ops.linear.stacked import StackedLinear
from headlong.ops.linear.unpacking import UnpackingLinear
from headlong.ops.moe.native import NativeExperts
from headlong.ops.moe.weights import MoeWeights
from headlong.ops.norm.native import NativeRmsNorm
from headlong.ops.norm.reference import RmsNorm
from headlong.ops.silu_mul import native as native_silu_mul
from headlong.ops.silu_mul import reference as reference_silu_mul
from headlong.ops.triton_step import refusal as triton_refusal
from headlong.quant.format import Format, PackedWeight, Weight
from headlong.types import Rows

if TYPE_CHECKING:
    from headlong.ops.delta_net.triton import TritonDeltaNet
    from headlong.ops.gated_attention.triton import TritonGatedAttention
    from headlong.ops.moe.triton import TritonExperts

    DeltaNet = ReferenceDeltaNet | NativeDeltaNet | TritonDeltaNet
    GatedAttention = ReferenceGatedAttention | NativeGatedAttention | TritonGatedAttention

log = logging.getLogger(__name__)
LINEARS = (OneDnnLinear, ReferenceLinear)
NEAR_TIES = "drafting may decide a near-tie differently"
TRITON_FORMATS = ("fp8", "nvfp4")
"""That are not whole numbers by group, which it knows too."""


@dataclass(frozen=True)
class Ops:
    """The ops of one engine. Those that hold weights are made by the methods, one for each layer."""

    dtype: torch.dtype
    device: torch.device
    _said: set[str] = field(default_factory=set, repr=False)
    _foreign_to_triton: list[str] = field(default_factory=list, repr=False)
    _multiplied_in: set[torch.dtype] = field(default_factory=set, repr=False)
    """By Triton's products."""

    @property
    def activation_dtype(self) -> torch.dtype:
        """What flows between layers: float32 at least, whatever the weights are."""
        return torch.promote_types(self.dtype, torch.float32)

    @cached_property
    def triton(self) -> ModuleType | None:
        """Triton's kernels, where they serve."""
        reason = triton_refusal(self.dtype, self.device)
        if reason is not None:
            if self.device.type == "cuda" and self.dtype != torch.float64:
                log.warning("Triton kernels %s: the reference ops serve, and %s", reason, NEAR_TIES)
            return None
        return import_module("headlong.ops.triton_ops")

    @property
    def all_triton(self) -> bool:
        """Whether Triton computes everything: what is not its own may ask the host."""
        return self.triton is not None and not self._foreign_to_triton

    @property
    def may_halve_norms(self) -> bool:
        """Whether products may be given what is not yet divided by its length: all of them must know of it, and it may
        be too large for float16."""
        return self.all_triton and torch.float16 not in self._multiplied_in

    @cached_property
    def native(self) -> bool:
        if self.triton is not None:
            return False
        reason = native.refusal(self.dtype, self.device)
        if reason is not None and self.device.type == "cpu":
            self._say(f"native kernels {reason}: the reference ops serve")
        return reason is None

    @property
    def unpacked_dtype(self) -> torch.dtype:
        """What packed weights are multiplied in: a CPU has nothing to gain from less than float32."""
        return self.dtype if self.device.type == "cuda" else self.activation_dtype

    def linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """Makes a weight [out, in] ready for the fastest batch-invariant multiplication here."""
        return self.stacked([weight], None, bias)

    def stacked(self, weights: Sequence[Weight], order: Tensor | None, bias: Tensor | None = None) -> Linear:
        """Several weights over the same input as one linear. Output i is row `order[i]` of the weights one below the
        other, plus `bias[i]`."""
        found = self._by_triton("linear", lambda triton: triton.linear(weights, order, bias, self.dtype))
        return self._stacked_by_others(weights, order, bias) if found is None else found

    def projection(
        self, weights: Sequence[Weight], order: Tensor | None, bias: Tensor | None, gates: slice
    ) -> Projection:
        """The same, for the core of an attention or a DeltaNet layer, which needs outputs `gates` last."""
        found = self._by_triton(
            "linear", lambda triton: triton.projection(weights, order, bias, gates, self.dtype)
        )
        return self._stacked_by_others(weights, order, bias) if found is None else found

    def _stacked_by_others(
        self, weights: Sequence[Weight], order: Tensor | None, bias: Tensor | None
    ) -> Linear:
        """Than Triton."""
        if self.native:
            sources = [part for weight in weights if (part := self._source(weight)) is not None]
            if len(sources) == len(weights):
                return NativeLinear(sources, order, bias)
        linear = self._foreign(weights[0]) if len(weights) == 1 else None
        if linear is None or order is not None:
            linear = StackedLinear([self._foreign(weight) for weight in weights], order)
        return linear if bias is None else BiasedLinear(linear, bias)

    def picked(self, linear: Linear, outs_T: Tensor) -> Linear:
        """Some outputs of a linear alone, from a copy of their weights. Where those cannot be told from the others,
        all are computed."""
        pick, rows = getattr(linear, "picked", None), getattr(linear, "rows", None)
        found = None
        if pick is not None:
            found = pick(outs_T)
        elif rows is not None:
            found = self.linear(rows(outs_T))
        return StackedLinear([linear], outs_T) if found is None else found

    def experts(self, weights: MoeWeights) -> "NativeExperts | TritonExperts | None":
        """Routing and experts in one call or a few kernels; None where each expert is multiplied on its own."""
        if self.native:
            return NativeExperts.load(weights, self._source)
        return self._by_triton("experts", lambda triton: triton.TritonExperts.load(weights, self.dtype))

    def _by_triton(self, what: str, make: Callable[[ModuleType], Any]) -> Any:
        """What Triton makes of weights; None where it does not serve, or gives a reason why it cannot, which is said
        once."""
        if self.triton is None:
            return None
        made = make(self.triton)
        if not isinstance(made, str):
            self._multiplied_in.add(made.dtype)
            return made
        self._foreign_to_triton.append(made)
        if made not in self._said:
            self._said.add(made)
            log.warning("%s: not triton: %s; %s", what, made, NEAR_TIES)
        return None

    def _source(self, weight: Weight) -> Source | None:
        return Source.of(weight, rounding=self.dtype == torch.bfloat16)

    def _foreign(self, weight: Weight) -> Linear:
        """By somebody else's product, which may have to be padded."""
        if isinstance(weight, PackedWeight):
            return UnpackingLinear(weight, self.unpacked_dtype)
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

    def explain_linear(self, dtype: torch.dtype, packed: Format | None) -> tuple[str, str]:
        """Who would multiply a weight that is packed so, or plain, and why nobody better; of weights in memory `linear`
        decides by trying."""
        if self.native and (packed is None or packed.whole_numbers):
            return NativeLinear.name, "as narrow as it is stored" if packed is not None else ""
        if self.triton is not None and (
            packed is None or packed.whole_numbers or packed.name in TRITON_FORMATS
        ):
            return self.triton.TritonLinear.name, "as narrow as it is stored" if packed is not None else ""
        if packed is not None:
            return UnpackingLinear.name, f"multiplied in {_short(self.unpacked_dtype)}, a tile at a time"
        for i, candidate in enumerate(LINEARS):
            if candidate.supports(dtype, self.device) is None:
                refusals = [
                    f"not {other.name}: {other.supports(dtype, self.device)}" for other in LINEARS[:i]
                ]
                return candidate.name, "; ".join(refusals)
        return RowLinear.name, "nothing faster serves"

    def norm(self, weight: Tensor, eps: float, *, inside: bool = False) -> Norm:
        """A norm of whole hidden states. One `inside` a layer goes into products alone, need not be wider than they
        take it, and may be left to them in part."""
        norm = RmsNorm(weight, eps)
        if self.triton is not None:
            if not inside:
                return self.triton.TritonRmsNorm(norm)
            return self.triton.TritonRmsNorm(norm, self.dtype, lambda: self.may_halve_norms)
        return NativeRmsNorm(norm) if self.native else norm

    def delta_net(self, weights: DeltaNetWeights) -> "DeltaNet":
        if self.triton is not None:
            return self.triton.TritonDeltaNet(weights, self.dtype)
        return NativeDeltaNet(weights) if self.native else ReferenceDeltaNet(weights)

    def gated_attention(self, weights: GatedAttentionWeights) -> "GatedAttention":
        if self.triton is not None:
            return self.triton.TritonGatedAttention(weights, self.dtype)
        return self._gated_attention(weights)

    @property
    def argmax(self) -> Callable[[Tensor], Tensor]:
        """Finds the best token of each row of logits."""
        if self.triton is not None:
            return self.triton.argmax
        return native_argmax.argmax if self.native else reference_argmax.argmax

    @property
    def draw(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Draws a token for each row of scores by its key; None where the sampler's own way serves."""
        if self.triton is not None:
            return self.triton.draw
        return native_draw.draw if self.native else None

    @property
    def sample(self) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        """Filters the logits of each row and draws, in one call; None where the sampler does one after the other."""
        if self.triton is not None:
            return self.triton.sample
        return native_draw.sample if self.native else None

    @property
    def penalise(self) -> Callable[..., Tensor] | None:
        """Penalties and biases of steps that ask the host for nothing; None where there are no such steps."""
        return None if self.triton is None else self.triton.penalise

    def embedding(self, weight: Weight) -> Embedding | NativeEmbedding:
        source = self._source(weight) if self.native else None
        if source is None:
            return Embedding(weight, self.activation_dtype)
        return NativeEmbedding(NativeLinear([source]))

    def gated(self, gate_up: Linear) -> Callable[[Tensor], Tensor]:
        """silu(gate) · up of a linear that gives the two side by side; in one go where it can."""
        in_one_go = getattr(gate_up, "gated", None)
        if in_one_go is not None:
            return partial(in_one_go, dtype=self.dtype)
        silu_mul = native_silu_mul.silu_mul if self.native else reference_silu_mul.silu_mul
        if self.triton is not None:
            silu_mul = partial(self.triton.silu_mul, dtype=self.dtype)
        return lambda x_ND: silu_mul(gate_up(x_ND))

    def prepare_delta_net(self, rows: Rows, kernel: int, window: int, attention: Any) -> Any:
        """What a step's DeltaNet layers share; `attention` is the plan of its attention layers."""
        if self.native or self.triton is not None:
            return attention
        return ReferenceDeltaNet.plan(rows, kernel, window, self.device)

    def prepare_attention(self, rows: Rows, pages_RP: Tensor, page_size: int) -> Any:
        """What a step's attention layers share."""
        return self._gated_attention.plan(rows, pages_RP, page_size)

    @property
    def _gated_attention(self) -> "type[GatedAttention]":
        if self.triton is not None:
            return self.triton.TritonGatedAttention
        return NativeGatedAttention if self.native else ReferenceGatedAttention

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            log.info(reason)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def default_dtype(device: torch.device, stored: torch.dtype | None) -> torch.dtype:
    """The checkpoint's own dtype where the device multiplies it well, else float32; `stored` is None where all of it
    is packed."""
    if device.type == "cpu":
        multiplied = native.refusal(torch.bfloat16, device) is None or cpu_multiplies_bfloat16()
        return torch.bfloat16 if stored == torch.bfloat16 and multiplied else torch.float32
    return stored if stored in (torch.bfloat16, torch.float16, torch.float32) else torch.bfloat16
