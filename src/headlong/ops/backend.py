"""What an engine's layers ask for: the one seam between them and whoever computes.

Ops that hold weights are made by methods, one for each layer. Whoever serves, results are batch-invariant and roll back
alike. Knows ops and weights, no model.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from headlong.ops.compressed_attention.weights import CompressedAttentionWeights
from headlong.ops.compressor.weights import CompressorWeights
from headlong.ops.delta_net.reference import DeltaNetWeights
from headlong.ops.gated_attention.reference import GatedAttentionWeights
from headlong.ops.hyper_connection.weights import HyperWeights
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
from headlong.ops.latent_attention.weights import LatentAttentionWeights
from headlong.ops.linear.linear import Argmax, Linear, Projection, Shard
from headlong.ops.moe.weights import ExpertWeights, MoeWeights
from headlong.ops.norm.normed import Norm
from headlong.ops.prepared import PreparedStep
from headlong.ops.program import CompiledProgram, Instruction
from headlong.ops.silu_mul.activation import SILU, Activation
from headlong.ops.silu_mul.swiglu import SwiGlu
from headlong.ops.step.ops import StepOps
from headlong.quant.format import Format, Weight
from headlong.types import Rows

NEAR_TIES = "drafting may decide a near-tie differently"
"""The warning that GPUs log if the reference ops serve, which are not batch-invariant there."""

Draw = Callable[[Tensor, Tensor], Tensor]
"""A function (scores [M, V], keys [M, 4]) -> tokens [M]."""
Sample = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function (logits [M, V], filters [M, 4], keys [M, 4]) -> tokens [M]."""
Penalise = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor], Tensor]
"""A function (logits, slots, settings by slot, counts by slot, biases by slot, drafts) -> logits."""


class Backend(Protocol):
    """The ops of one engine on one device."""

    name: str
    dtype: torch.dtype
    """The dtype in which weights that are not packed are kept and multiplied."""
    device: torch.device
    argmax: Argmax
    """Finds the best token of each row of logits."""
    draw: Draw | None
    """Draws a token for each row of scores by its key; None where the sampler's own way serves."""
    sample: Sample | None
    """Filters the logits of each row and draws, in one call; None where the sampler does one after the other."""
    penalise: Penalise | None
    """Applies penalties and biases in steps that ask the host for nothing; None where there are no such steps."""
    step: StepOps
    """The ops that begin and end a step that asks the host for nothing."""

    @property
    def activation_dtype(self) -> torch.dtype:
        """The dtype of what flows between layers: float32 at least, whatever the weights are."""
        ...

    @property
    def lays_out_weights(self) -> bool:
        """Whether weights are laid out anew. They are then taken one by one, as narrow as they are stored, and may be
        mapped files."""
        ...

    @property
    def asks_host(self) -> bool:
        """Whether some op made so far asks the host for something while it runs."""
        ...

    @property
    def can_capture(self) -> bool:
        """Whether what was made so far can be captured as a CUDA graph."""
        ...

    def threads(self) -> AbstractContextManager[object]:
        """A context in which CPU threads belong to this backend's ops rather than to torch."""
        ...

    def linear(self, weight: Weight, bias: Tensor | None = None, *, shard: Shard = Shard.NONE) -> Linear:
        """Makes a weight [out, in] ready for the fastest batch-invariant GEMM here."""
        ...

    def stacked(
        self,
        weights: Sequence[Weight],
        order: Tensor | None,
        bias: Tensor | None = None,
        *,
        shard: Shard = Shard.NONE,
    ) -> Linear:
        """Makes one linear of several weights over the same input. Output i is row `order[i]` of the weights one below
        the other, plus `bias[i]`."""
        ...

    def projection(
        self,
        weights: Sequence[Weight],
        order: Tensor | None,
        bias: Tensor | None,
        gates: slice,
        *,
        shard: Shard = Shard.NONE,
    ) -> Projection:
        """Makes one linear of several weights as `stacked` does, for the core of an attention or a DeltaNet layer,
        which needs the outputs `gates` last."""
        ...

    def pick(self, linear: Linear, outs_T: Tensor) -> Linear:
        """Makes a linear of some outputs of another, from a copy of their weights. Where those cannot be told from the
        others, it computes all outputs."""
        ...

    def swiglu(self, gate_up: Linear, down: Linear, activation: Activation = SILU) -> SwiGlu:
        """Makes a feed-forward of these two linears, gated in one launch where the GEMM can."""
        ...

    def experts(self, weights: MoeWeights) -> Experts:
        """Makes the routing and the experts of a layer, in one call or a few kernels where they can be."""
        ...

    def expert(
        self, weights: ExpertWeights, shards: tuple[Shard, Shard], activation: Activation = SILU
    ) -> SwiGlu:
        """Makes one expert by itself; `shards` say how its gate_up and down may be split."""
        ...

    def norm(self, weight: Tensor, eps: float, *, inside: bool = False) -> Norm:
        """Makes a norm of whole hidden states. A norm `inside` a layer goes into GEMMs alone: its results need not be
        wider than those take them, and part of it may be left to them."""
        ...

    def gated_attention(self, weights: GatedAttentionWeights) -> GatedAttention: ...

    def latent_attention(self, weights: LatentAttentionWeights) -> LatentAttention: ...

    def compressed_attention(self, weights: CompressedAttentionWeights) -> CompressedAttention: ...

    def compressor(self, weights: CompressorWeights) -> Compressor: ...

    def indexer(self, sizes: IndexerSizes) -> Indexer: ...

    def hyper_connection(self, weights: HyperWeights) -> HyperConnection: ...

    def collapse(self, weights: HyperWeights) -> Collapse: ...

    def grouped_linear(self, weight: Weight, groups: int) -> GroupedLinear:
        """Makes a block-diagonal linear. The rows of `weight` are those of the groups' matrices, one group after the
        other; each has an equal part of the inputs, as many as `weight` has columns."""
        ...

    def delta_net(self, weights: DeltaNetWeights) -> DeltaNet: ...

    def embedding(self, weight: Weight, *, shard: Shard = Shard.NONE) -> Embedding: ...

    def prepare_attention(self, rows: Rows, pages_RP: Tensor, page_size: int) -> PreparedStep:
        """Prepares what the attention layers of one step share: which rows it feeds and where their pages are."""
        ...

    def prepare_delta_net(
        self, rows: Rows, kernel: int, window: int, attention: PreparedStep
    ) -> PreparedStep:
        """Prepares what the DeltaNet layers of one step share; `attention` is what its attention layers share."""
        ...

    def compile(self, instructions: Sequence[Instruction]) -> CompiledProgram | None:
        """Compiles a layer stack into one call. Returns None where its layers are called one by one, and logs the
        reason if that is unusual here."""
        ...

    def explain_linear(self, dtype: torch.dtype, packed: Format | None) -> tuple[str, str]:
        """Says who would multiply a weight that is packed so, or plain, and why nobody faster would. Which GEMM serves
        a weight in memory is decided by `linear`, by trial."""
        ...
