"""Attention to a window of tokens and, in most layers, to compressed entries of all that came before.

One head of keys, which are its values too, serves all heads of queries. A compressor makes an entry of every `ratio`
tokens; where there would be too many entries an indexer, with a compressor of its own, chooses some for each token.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from headlong.layers.context import Context
from headlong.layers.weights import Scope
from headlong.ops.compressed_attention.weights import CompressedAttentionWeights
from headlong.ops.compressor.weights import CompressorWeights
from headlong.ops.indexer.weights import IndexerSizes
from headlong.ops.linear.linear import Shard
from headlong.ops.norm.normed import Normed
from headlong.ops.norm.reference import RmsNorm
from headlong.ops.rope.pairs import PairRope
from headlong.state.compressed_kv import CompressedKv, CompressedKvSpec, CompressorSpec
from headlong.state.latent_kv import LatentKv, LatentKvSpec
from headlong.state.layer_state import LayerState
from headlong.state.specs import LayerSpec


@dataclass(frozen=True)
class IndexerConfig:
    num_heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True)
class Compression:
    """How a layer's entries are made, and who chooses among them."""

    ratio: int
    num_series: int
    """The entries that each token counts for: its own, or the next one too."""
    indexer: IndexerConfig | None
    """None where a token attends to all entries before it."""
    inv_freq: tuple[float, ...]
    """The frequencies that entries are turned by."""


@dataclass(frozen=True)
class CompressedAttentionConfig:
    """What all such layers of a model have in common."""

    hidden_size: int
    num_heads: int
    head_dim: int
    query_rank: int
    """The size of what queries are made from."""
    num_groups: int
    """The groups of heads whose outputs are projected apart from each other at first."""
    group_rank: int
    """The size of what each group's outputs become."""
    window: int
    eps: float


class _Compressor:
    """A linear gives each token's values and gates; the core makes entries of them."""

    def __init__(
        self,
        config: CompressedAttentionConfig,
        compression: Compression,
        dim: int,
        rope: PairRope,
        scope: Scope,
    ) -> None:
        c, width = compression, compression.num_series * dim
        parts = (("kv_proj", width), ("gate_proj", width))
        self.project = scope.stacked(*parts, in_features=config.hidden_size, shard=Shard.NONE)
        norm = RmsNorm(scope.norm_weight("kv_norm", dim, centred=False), config.eps)
        bias_JX = scope.vector("position_bias", c.ratio, width)
        inv_freq_F = torch.tensor(c.inv_freq, dtype=bias_JX.dtype, device=bias_JX.device)
        weights = CompressorWeights(c.ratio, dim, c.num_series, bias_JX, norm, rope, inv_freq_F)
        self.make = scope.ops.compressor(weights)
        self.spec = CompressorSpec(c.ratio, weights.span, weights.width, dim)

    def __call__(self, normed: Normed, kept: tuple[Tensor, Tensor], context: Context) -> Tensor:
        """Makes the entries that end in this step; returns the tensor of all entries."""
        ring, entries = kept
        self.make(self.project(normed), ring, entries, context.angles, context.attention)
        return entries


class _Indexer:
    """Queries and gates are projected, entries are the indexer's own, and the core chooses."""

    def __init__(
        self,
        config: CompressedAttentionConfig,
        compression: Compression,
        own: IndexerConfig,
        rope: PairRope,
        scope: Scope,
    ) -> None:
        self.compress = _Compressor(config, compression, own.head_dim, rope, scope)
        size = own.num_heads * own.head_dim
        self.queries = scope.linear("q_b_proj", size, config.query_rank, shard=Shard.NONE)
        self.gates = scope.linear("scorer.weights_proj", own.num_heads, config.hidden_size, shard=Shard.NONE)
        self.choose = scope.ops.indexer(
            IndexerSizes(own.num_heads, own.head_dim, compression.ratio, own.top_k, rope)
        )

    def __call__(
        self, normed: Normed, lowered: Normed, kept: tuple[Tensor, Tensor], context: Context
    ) -> Tensor:
        entries = self.compress(normed, kept, context)
        queries, gates = self.queries(lowered), self.gates(normed)
        return self.choose(queries, gates, entries, context.angles, context.attention)


class CompressedAttention:
    """Queries and keys are projected, the core attends, and heads' outputs are projected back group by group."""

    def __init__(
        self,
        config: CompressedAttentionConfig,
        compression: Compression | None,
        rope: PairRope,
        scope: Scope,
        *,
        on_pages: bool,
    ) -> None:
        """Keys of the window lie `on_pages`, position by position, or in a ring of each slot."""
        self.config = c = config
        self.on_pages = on_pages
        assert not (on_pages and compression), "entries come with rings"
        size = c.num_heads * c.head_dim
        self.lower = scope.linear("q_a_proj", c.query_rank, c.hidden_size, shard=Shard.NONE)
        self.lower_norm = scope.norm("q_a_norm", c.query_rank, c.eps, centred=False, inside=True)
        self.queries = scope.linear("q_b_proj", size, c.query_rank, shard=Shard.OUTPUT)
        self.keys = scope.linear("kv_proj", c.head_dim, c.hidden_size, shard=Shard.NONE)
        self.compress = self.index = None
        if compression is not None:
            inner = scope("compressor")
            self.compress = _Compressor(c, compression, c.head_dim, rope, inner)
            if compression.indexer is not None:
                self.index = _Indexer(c, compression, compression.indexer, rope, inner("indexer"))
        self.attend = scope.ops.compressed_attention(
            CompressedAttentionWeights(
                num_heads=c.num_heads,
                head_dim=c.head_dim,
                window=c.window,
                ratio=0 if compression is None else compression.ratio,
                query_eps=c.eps,
                norm=RmsNorm(scope.norm_weight("kv_norm", c.head_dim, centred=False), c.eps),
                sinks_H=scope.vector("sinks", c.num_heads),
                rope=rope,
                on_pages=on_pages,
            )
        )
        inner_size = c.num_groups * c.group_rank
        self.group = scope.ops.grouped_linear(
            scope.matrix("o_a_proj", inner_size, size // c.num_groups), c.num_groups
        )
        self.out = scope.linear("o_b_proj", c.hidden_size, inner_size, shard=Shard.INPUT)

    @property
    def state_spec(self) -> LayerSpec:
        c = self.config
        if self.on_pages:
            return LatentKvSpec(c.head_dim, 0)
        compressors = [self.compress, None if self.index is None else self.index.compress]
        specs = tuple(each.spec for each in compressors if each is not None)
        return CompressedKvSpec(c.window, c.head_dim, specs)

    def __call__(self, normed: Normed, context: Context, state: LayerState) -> Tensor:
        """The layer's output. The state is what `state_spec` allocates."""
        lowered, given = self.lower_norm(self.lower(normed)), self.keys(normed)
        entries = chosen = None
        if self.compress is not None:
            kept = cast(CompressedKv, state)
            entries = self.compress(normed, kept.compressor(0), context)
            if self.index is not None:
                chosen = self.index(normed, lowered, kept.compressor(1), context)
        attended = self.attend(
            self.queries(lowered),
            given,
            self._window(state),
            entries,
            chosen,
            context.angles,
            context.attention,
        )
        return self.out(self.group(attended))

    def remember(self, normed: Normed, context: Context, state: LayerState) -> None:
        """Writes the tokens' keys, and computes nothing else."""
        self.attend.write(self.keys(normed), self._window(state), context.angles, context.attention)

    def _window(self, state: LayerState) -> Tensor:
        return cast(LatentKv, state).latents if self.on_pages else cast(CompressedKv, state).window
