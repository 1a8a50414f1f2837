"""The reference ops of an engine: plain torch on any device. Other backends leave to it what they cannot serve."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from headlong.ops.argmax import reference as argmax
from headlong.ops.backend import Backend, Draw, Penalise, Sample
from headlong.ops.compressed_attention.reference import ReferenceCompressedAttention
from headlong.ops.compressed_attention.weights import CompressedAttentionWeights
from headlong.ops.compressor.reference import ReferenceCompressor
from headlong.ops.compressor.weights import CompressorWeights
from headlong.ops.delta_net.reference import DeltaNetWeights, ReferenceDeltaNet
from headlong.ops.embedding.reference import ReferenceEmbedding
from headlong.ops.gated_attention.reference import GatedAttentionWeights, ReferenceGatedAttention
from headlong.ops.grouped_linear.reference import ReferenceGroupedLinear
from headlong.ops.grouped_linear.rows import rows_of
from headlong.ops.hyper_connection.reference import ReferenceCollapse, ReferenceHyperConnection
from headlong.ops.hyper_connection.weights import HyperWeights
from headlong.ops.indexer.reference import ReferenceIndexer
from headlong.ops.indexer.weights import IndexerSizes
from headlong.ops.interfaces import (
    Collapse,
    CompressedAttention,
    Compressor,
    DeltaNet,
    Embedding,
    Experts,
    GatedAttention,
    GroupedLinear,
    HyperConnection,
    Indexer,
    LatentAttention,
)
from headlong.ops.latent_attention.reference import ReferenceLatentAttention
from headlong.ops.latent_attention.weights import LatentAttentionWeights
from headlong.ops.linear.biased import BiasedLinear
from headlong.ops.linear.invariance import RowLinear, find_tile
from headlong.ops.linear.linear import Argmax, Linear, Projection, Shard, SiluMul
from headlong.ops.linear.onednn import OneDnnLinear
from headlong.ops.linear.reference import ReferenceLinear
from headlong.ops.linear.stacked import StackedLinear
from headlong.ops.linear.unpacking import UnpackingLinear
from headlong.ops.moe.reference import ReferenceExperts
from headlong.ops.moe.weights import ExpertWeights, MoeWeights
from headlong.ops.norm.normed import Norm
from headlong.ops.norm.reference import RmsNorm
from headlong.ops.prepared import PreparedStep
from headlong.ops.program import CompiledProgram, Instruction
from headlong.ops.silu_mul import reference as silu_mul
from headlong.ops.silu_mul.activation import SILU, Activation
from headlong.ops.silu_mul.swiglu import SwiGlu
from headlong.ops.step import reference as step
from headlong.ops.step.ops import StepOps
from headlong.quant.format import Format, PackedWeight, Weight
from headlong.types import Rows

log = logging.getLogger(__name__)
LINEARS = (OneDnnLinear, ReferenceLinear)


class ReferenceBackend(Backend):
    """The reference ops: any dtype, any device, any weight."""

    name = "reference"
    argmax: Argmax = staticmethod(argmax.argmax)
    draw: Draw | None = None
    sample: Sample | None = None
    penalise: Penalise | None = None
    step: StepOps = step.OPS

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._said: set[str] = set()

    @property
    def activation_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def lays_out_weights(self) -> bool:
        return False

    @property
    def asks_host(self) -> bool:
        return True

    @property
    def can_capture(self) -> bool:
        return self.device.type == "cuda" and not self.asks_host

    def threads(self) -> AbstractContextManager[object]:
        return nullcontext()

    def linear(self, weight: Weight, bias: Tensor | None = None, *, shard: Shard = Shard.NONE) -> Linear:
        return self.stacked([weight], None, bias, shard=shard)

    def stacked(
        self,
        weights: Sequence[Weight],
        order: Tensor | None,
        bias: Tensor | None = None,
        *,
        shard: Shard = Shard.NONE,
    ) -> Linear:
        linear = self._stacked(weights, order, bias)
        linear.shard = shard
        return linear

    def projection(
        self,
        weights: Sequence[Weight],
        order: Tensor | None,
        bias: Tensor | None,
        gates: slice,
        *,
        shard: Shard = Shard.NONE,
    ) -> Projection:
        projection = self._projection(weights, order, bias, gates)
        projection.shard = shard
        return projection

    def _stacked(self, weights: Sequence[Weight], order: Tensor | None, bias: Tensor | None) -> Linear:
        """Makes the linear; other backends override it for weights that they can take."""
        linear = self._multiplied(weights[0]) if len(weights) == 1 else None
        if linear is None or order is not None:
            linear = StackedLinear([self._multiplied(weight) for weight in weights], order)
        return linear if bias is None else BiasedLinear(linear, bias)

    def _projection(
        self, weights: Sequence[Weight], order: Tensor | None, bias: Tensor | None, gates: slice  # noqa: ARG002
    ) -> Projection:  # fmt: skip
        """Makes a linear that gives all outputs at once."""
        return self._stacked(weights, order, bias)

    def _multiplied(self, weight: Weight) -> Linear:
        """Makes a linear by the first GEMM that is batch-invariant at this shape, padded if it has to be."""
        if isinstance(weight, PackedWeight):
            return UnpackingLinear(weight, self._unpacked_dtype)
        if weight.is_meta:
            return ReferenceLinear(weight)
        outs, ins = weight.shape
        for candidate in LINEARS:
            reason = candidate.supports(weight.dtype, weight.device)
            if reason is None and weight.device.type == "cpu":
                tile = find_tile(candidate, outs, ins, weight.dtype)
                if tile is not None:
                    return candidate(weight, tile)
                reason = f"a row's bits depend on its neighbours at shape {tuple(weight.shape)}"
            elif reason is None:
                return candidate(weight)
            self._say(f"linear: not {candidate.name}: {reason}")
        return RowLinear(weight)

    @property
    def _unpacked_dtype(self) -> torch.dtype:
        """The dtype that packed weights are multiplied in: a CPU has nothing to gain from less than float32."""
        return self.dtype if self.device.type == "cuda" else self.activation_dtype

    def pick(self, linear: Linear, outs_T: Tensor) -> Linear:
        found = linear.picked(outs_T)
        if found is None and (rows := linear.rows(outs_T)) is not None:
            found = self.linear(rows)
        if found is None:
            found = StackedLinear([linear], outs_T)
        found.shard = linear.shard
        return found

    def swiglu(self, gate_up: Linear, down: Linear, activation: Activation = SILU) -> SwiGlu:
        return SwiGlu(gate_up, down, self._silu_mul(activation), self.dtype, is_silu=activation == SILU)

    def _silu_mul(self, activation: Activation) -> SiluMul:
        return partial(silu_mul.silu_mul, activation=activation)

    def experts(self, weights: MoeWeights) -> Experts:
        count = weights.routing.num_experts
        shards, activation = weights.shards, weights.activation
        experts = [self.expert(weights.load(i), shards, activation) for i in range(count)]
        return ReferenceExperts(experts, weights)

    def expert(
        self, weights: ExpertWeights, shards: tuple[Shard, Shard], activation: Activation = SILU
    ) -> SwiGlu:
        return self.swiglu(
            self.stacked(weights.gate_up, None, weights.gate_up_bias, shard=shards[0]),
            self.linear(weights.down, weights.down_bias, shard=shards[1]),
            activation,
        )

    def norm(self, weight: Tensor, eps: float, *, inside: bool = False) -> Norm:  # noqa: ARG002 - never in part
        return RmsNorm(weight, eps)

    def gated_attention(self, weights: GatedAttentionWeights) -> GatedAttention:
        return ReferenceGatedAttention(weights)

    def latent_attention(self, weights: LatentAttentionWeights) -> LatentAttention:
        return ReferenceLatentAttention(weights, self.activation_dtype)

    def compressed_attention(self, weights: CompressedAttentionWeights) -> CompressedAttention:
        return ReferenceCompressedAttention(weights)

    def compressor(self, weights: CompressorWeights) -> Compressor:
        return ReferenceCompressor(weights)

    def indexer(self, sizes: IndexerSizes) -> Indexer:
        return ReferenceIndexer(sizes)

    def hyper_connection(self, weights: HyperWeights) -> HyperConnection:
        return ReferenceHyperConnection(weights, self._multiplied(weights.fn_MX))

    def collapse(self, weights: HyperWeights) -> Collapse:
        return ReferenceCollapse(weights, self._multiplied(weights.fn_MX))

    def grouped_linear(self, weight: Weight, groups: int) -> GroupedLinear:
        return ReferenceGroupedLinear([self.linear(rows) for rows in rows_of(weight, groups)])

    def delta_net(self, weights: DeltaNetWeights) -> DeltaNet:
        return ReferenceDeltaNet(weights)

    def embedding(self, weight: Weight, *, shard: Shard = Shard.NONE) -> Embedding:
        embedding = ReferenceEmbedding(weight, self.activation_dtype)
        embedding.shard = shard
        return embedding

    def prepare_attention(self, rows: Rows, pages_RP: Tensor, page_size: int) -> PreparedStep:
        return ReferenceGatedAttention.prepare(rows, pages_RP, page_size)

    def prepare_delta_net(
        self, rows: Rows, kernel: int, window: int, attention: PreparedStep  # noqa: ARG002 - nothing is shared
    ) -> PreparedStep:  # fmt: skip
        return ReferenceDeltaNet.prepare(rows, kernel, window, self.device)

    def compile(self, instructions: Sequence[Instruction]) -> CompiledProgram | None:  # noqa: ARG002
        return None

    def explain_linear(self, dtype: torch.dtype, packed: Format | None) -> tuple[str, str]:
        if packed is not None:
            return UnpackingLinear.name, f"multiplied in {_short(self._unpacked_dtype)}, a tile at a time"
        refusals: list[str] = []
        for candidate in LINEARS:
            reason = candidate.supports(dtype, self.device)
            if reason is None:
                return candidate.name, "; ".join(refusals)
            refusals.append(f"not {candidate.name}: {reason}")
        return RowLinear.name, "nothing faster serves"

    def _say(self, reason: str) -> None:
        """Logs a reason once, however many weights it concerns."""
        if reason not in self._said:
            self._said.add(reason)
            log.info(reason)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
