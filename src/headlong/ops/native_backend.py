"""The native kernels' ops of an engine on a CPU. Weights that the native GEMM cannot take are the reference's."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from headlong.ops.argmax import native as argmax
from headlong.ops.delta_net.native import NativeDeltaNet
from headlong.ops.delta_net.reference import DeltaNetWeights
from headlong.ops.draw import native as draw
from headlong.ops.embedding.native import NativeEmbedding
from headlong.ops.gated_attention.native import NativeGatedAttention
from headlong.ops.gated_attention.reference import GatedAttentionWeights
from headlong.ops.hyper_connection.native import NativeHyperConnection
from headlong.ops.hyper_connection.weights import HyperWeights
from headlong.ops.interfaces import (
    DeltaNet,
    Embedding,
    Experts,
    GatedAttention,
    HyperConnection,
    LatentAttention,
)
from headlong.ops.latent_attention.native import NativeLatentAttention
from headlong.ops.latent_attention.weights import LatentAttentionWeights
from headlong.ops.linear.linear import Linear, Shard, SiluMul
from headlong.ops.linear.native import NativeLinear
from headlong.ops.linear.native_source import Source
from headlong.ops.moe.native import NativeExperts
from headlong.ops.moe.weights import MoeWeights
from headlong.ops.native import threads_for_native
from headlong.ops.native_program import NativeProgram
from headlong.ops.norm.native import NativeRmsNorm
from headlong.ops.norm.normed import Norm
from headlong.ops.norm.reference import RmsNorm
from headlong.ops.prepared import PreparedStep
from headlong.ops.program import CompiledProgram, Instruction
from headlong.ops.reference_backend import ReferenceBackend
from headlong.ops.silu_mul import native as silu_mul
from headlong.ops.silu_mul.activation import Activation
from headlong.quant.format import Format, Weight
from headlong.quant.scaled_inputs import ScaledInputs
from headlong.types import Rows


class NativeBackend(ReferenceBackend):
    """The native kernels' ops for float32 and bfloat16; a whole layer stack is one call where all of its weights are
    native."""

    name = "native"
    argmax = staticmethod(argmax.argmax)
    draw, sample = staticmethod(draw.draw), staticmethod(draw.sample)

    @property
    def lays_out_weights(self) -> bool:
        return True

    def threads(self) -> AbstractContextManager[object]:
        return threads_for_native

    def _stacked(self, weights: Sequence[Weight], order: Tensor | None, bias: Tensor | None) -> Linear:
        sources = [source for weight in weights if (source := self._source(weight)) is not None]
        if len(sources) < len(weights):
            return super()._stacked(weights, order, bias)
        return NativeLinear(sources, order, bias)

    def _source(self, weight: Weight) -> Source | None:
        return Source.of(weight, rounding=self.dtype == torch.bfloat16)

    def _silu_mul(self, activation: Activation) -> SiluMul:
        return partial(silu_mul.silu_mul, activation=activation)

    def experts(self, weights: MoeWeights) -> Experts:
        return NativeExperts.load(weights, self._source) or super().experts(weights)

    def norm(self, weight: Tensor, eps: float, *, inside: bool = False) -> Norm:  # noqa: ARG002 - never in part
        return NativeRmsNorm(RmsNorm(weight, eps))

    def gated_attention(self, weights: GatedAttentionWeights) -> GatedAttention:
        return NativeGatedAttention(weights)

    def latent_attention(self, weights: LatentAttentionWeights) -> LatentAttention:
        return NativeLatentAttention.load(weights, self._source)

    def hyper_connection(self, weights: HyperWeights) -> HyperConnection:
        return NativeHyperConnection(weights, self._multiplied(weights.fn_MX))

    def delta_net(self, weights: DeltaNetWeights) -> DeltaNet:
        return NativeDeltaNet(weights)

    def embedding(self, weight: Weight, *, shard: Shard = Shard.NONE) -> Embedding:
        source = self._source(weight)
        if source is None:
            return super().embedding(weight, shard=shard)
        embedding = NativeEmbedding(NativeLinear([source]))
        embedding.shard = embedding.linear.shard = shard
        return embedding

    def prepare_attention(self, rows: Rows, pages_RP: Tensor, page_size: int) -> PreparedStep:
        return NativeGatedAttention.prepare(rows, pages_RP, page_size)

    def prepare_delta_net(
        self, rows: Rows, kernel: int, window: int, attention: PreparedStep  # noqa: ARG002 - all is shared
    ) -> PreparedStep:  # fmt: skip
        return attention

    def compile(self, instructions: Sequence[Instruction]) -> CompiledProgram | None:
        made = NativeProgram.of(instructions)
        if isinstance(made, str):
            self._say(f"layers are called one by one: there is {made}")
            return None
        return made

    def explain_linear(self, dtype: torch.dtype, packed: Format | None) -> tuple[str, str]:
        if isinstance(packed, ScaledInputs):
            packed = packed.inner
        if packed is None or packed.whole_numbers or packed.has_float_coding:
            return NativeLinear.name, "as narrow as it is stored" if packed is not None else ""
        return super().explain_linear(dtype, packed)
