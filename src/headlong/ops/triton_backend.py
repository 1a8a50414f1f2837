"""Triton's ops of an engine. Imported only where they are to serve: Triton may be missing.

Weights that Triton's GEMMs cannot take are the reference's, which asks the host; each is logged with the reason.
"""

import logging
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from headlong.ops.argmax.triton import argmax
from headlong.ops.backend import NEAR_TIES
from headlong.ops.compressed_attention.triton import TritonCompressedAttention
from headlong.ops.compressed_attention.weights import CompressedAttentionWeights
from headlong.ops.compressor.triton import TritonCompressor
from headlong.ops.compressor.weights import CompressorWeights
from headlong.ops.delta_net.reference import DeltaNetWeights
from headlong.ops.delta_net.triton import TritonDeltaNet
from headlong.ops.draw.triton import draw
from headlong.ops.draw.triton_sample import sample
from headlong.ops.gated_attention.reference import GatedAttentionWeights
from headlong.ops.gated_attention.triton import TritonGatedAttention
from headlong.ops.grouped_linear.triton import TritonGroupedLinear
from headlong.ops.hyper_connection.triton import TritonCollapse, TritonHyperConnection
from headlong.ops.hyper_connection.weights import HyperWeights
from headlong.ops.indexer.triton import TritonIndexer
from headlong.ops.indexer.weights import IndexerSizes
from headlong.ops.interfaces import (
    Collapse,
    CompressedAttention,
    Compressor,
    DeltaNet,
    Experts,
    GatedAttention,
    GroupedLinear,
    HyperConnection,
    Indexer,
    LatentAttention,
)
from headlong.ops.latent_attention.triton import TritonLatentAttention
from headlong.ops.latent_attention.weights import LatentAttentionWeights
from headlong.ops.linear.linear import Linear, Projection, SiluMul
from headlong.ops.linear.triton import TritonLinear
from headlong.ops.linear.triton_projection import TritonProjection
from headlong.ops.moe.triton import TritonExperts
from headlong.ops.moe.weights import MoeWeights
from headlong.ops.norm.normed import Norm
from headlong.ops.norm.reference import RmsNorm
from headlong.ops.norm.triton import TritonRmsNorm
from headlong.ops.penalise.triton import penalise
from headlong.ops.prepared import PreparedStep
from headlong.ops.reference_backend import ReferenceBackend
from headlong.ops.silu_mul.activation import Activation
from headlong.ops.silu_mul.triton import silu_mul
from headlong.ops.step import triton as step
from headlong.quant.format import Format, Weight
from headlong.types import Rows

log = logging.getLogger(__name__)
FORMATS = ("fp8", "nvfp4", "mx", "torchao")
"""Packed formats that Triton's kernels take besides those of whole numbers with a scale by group, which they all
take."""


class TritonBackend(ReferenceBackend):
    """Triton's ops for bfloat16, float16 and float32."""

    name = "triton"
    argmax, draw, sample = staticmethod(argmax), staticmethod(draw), staticmethod(sample)
    penalise, step = staticmethod(penalise), step.OPS

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self.foreign: list[str] = []
        """The reason why each of the weights that Triton could not take was left to the reference."""
        self._multiplied_in: set[torch.dtype] = set()
        """The dtypes that Triton's GEMMs multiply in."""

    @property
    def asks_host(self) -> bool:
        return bool(self.foreign)

    @property
    def may_halve_norms(self) -> bool:
        """Whether GEMMs may be given partial norms, which are not yet divided by their length: all GEMMs must take
        them, and the numbers may be too large for float16."""
        return not self.foreign and torch.float16 not in self._multiplied_in

    def _stacked(self, weights: Sequence[Weight], order: Tensor | None, bias: Tensor | None) -> Linear:
        reason = _refusal(weights)
        if reason is not None:
            self._leave("linear", reason)
            return super()._stacked(weights, order, bias)
        linear = TritonLinear(weights, order, bias, dtype=self.dtype)
        self._multiplied_in.add(linear.dtype)
        return linear

    def _projection(
        self, weights: Sequence[Weight], order: Tensor | None, bias: Tensor | None, gates: slice
    ) -> Projection:
        reason = _refusal(weights)
        if reason is not None:
            self._leave("linear", reason)
            return super()._stacked(weights, order, bias)
        projection = TritonProjection(weights, order, bias, gates, self.dtype)
        self._multiplied_in.add(projection.dtype)
        return projection

    def grouped_linear(self, weight: Weight, groups: int) -> GroupedLinear:
        made = TritonGroupedLinear.load(weight, groups, self.dtype) if _refusal([weight]) is None else None
        if made is None:
            return super().grouped_linear(weight, groups)
        self._multiplied_in.add(made.dtype)
        return made

    def experts(self, weights: MoeWeights) -> Experts:
        made = TritonExperts.load(weights, self.dtype)
        if isinstance(made, str):
            self._leave("experts", made)
            return super().experts(weights)
        self._multiplied_in.add(made.dtype)
        return made

    def _leave(self, what: str, reason: str) -> None:
        """Leaves a weight to the reference, and logs the reason once."""
        self.foreign.append(reason)
        if reason not in self._said:
            self._said.add(reason)
            log.warning("%s: not triton: %s; %s", what, reason, NEAR_TIES)

    def _silu_mul(self, activation: Activation) -> SiluMul:
        return partial(silu_mul, dtype=self.dtype, activation=activation)

    def norm(self, weight: Tensor, eps: float, *, inside: bool = False) -> Norm:
        norm = RmsNorm(weight, eps)
        if not inside:
            return TritonRmsNorm(norm)
        return TritonRmsNorm(norm, self.dtype, lambda: self.may_halve_norms)

    def gated_attention(self, weights: GatedAttentionWeights) -> GatedAttention:
        return TritonGatedAttention(weights, self.dtype)

    def latent_attention(self, weights: LatentAttentionWeights) -> LatentAttention:
        return TritonLatentAttention(weights, self.dtype)

    def compressed_attention(self, weights: CompressedAttentionWeights) -> CompressedAttention:
        return TritonCompressedAttention(weights, self.dtype)

    def compressor(self, weights: CompressorWeights) -> Compressor:
        return TritonCompressor(weights)

    def indexer(self, sizes: IndexerSizes) -> Indexer:
        return TritonIndexer(sizes)

    def hyper_connection(self, weights: HyperWeights) -> HyperConnection:
        if (reason := TritonHyperConnection.supports(weights)) is not None:
            self._leave("hyper-connections", reason)
            return super().hyper_connection(weights)
        return TritonHyperConnection(weights, self.linear(weights.fn_MX))

    def collapse(self, weights: HyperWeights) -> Collapse:
        if (reason := TritonHyperConnection.supports(weights)) is not None:
            self._leave("hyper-connections", reason)
            return super().collapse(weights)
        return TritonCollapse(weights, self.linear(weights.fn_MX))

    def delta_net(self, weights: DeltaNetWeights) -> DeltaNet:
        return TritonDeltaNet(weights, self.dtype)

    def prepare_attention(self, rows: Rows, pages_RP: Tensor, page_size: int) -> PreparedStep:
        return TritonGatedAttention.prepare(rows, pages_RP, page_size)

    def prepare_delta_net(
        self, rows: Rows, kernel: int, window: int, attention: PreparedStep  # noqa: ARG002 - all is shared
    ) -> PreparedStep:  # fmt: skip
        return attention

    def explain_linear(self, dtype: torch.dtype, packed: Format | None) -> tuple[str, str]:
        if packed is None or packed.whole_numbers or packed.name in FORMATS:
            return TritonLinear.name, "as narrow as it is stored" if packed is not None else ""
        return super().explain_linear(dtype, packed)


def _refusal(weights: Sequence[Weight]) -> str | None:
    """Returns why these weights need another GEMM; None if Triton's takes them."""
    return next((reason for weight in weights if (reason := TritonLinear.supports(weight)) is not None), None)
