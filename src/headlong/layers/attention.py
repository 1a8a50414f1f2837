"""Attention over pages: a window, sinks, query and key norms and an output gate where a family has them."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from headlong.layers.context import Context
from headlong.layers.weights import Scope
from headlong.ops import program
from headlong.ops.gated_attention.reference import GatedAttentionWeights
from headlong.ops.linear.linear import Shard
from headlong.ops.norm.normed import Norm, Normed
from headlong.ops.norm.reference import RmsNorm
from headlong.ops.program import FIRST, SECOND, STREAM, Instruction
from headlong.state.layer_state import LayerState
from headlong.state.paged_kv import PagedKv, PagedKvSpec


@dataclass(frozen=True)
class AttentionConfig:
    """`bias`: q, k and v have biases; `out_bias`: so has o. `gated`: q_proj gives an output gate beside each query.
    `normed`: queries and keys have norms of their own, stored as w where 1 + w is meant if they are `centred_norms`."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    bias: bool = False
    out_bias: bool = False
    gated: bool = True
    normed: bool = True
    centred_norms: bool = True
    sinks: bool = False
    """Whether each head has a score that takes part in its softmax and has no value."""


class Attention:
    """One projection gives queries, keys, gates (if any) and values, in this order, so that queries and keys share
    their norm and their rotation."""

    def __init__(self, config: AttentionConfig, scope: Scope, window: int | None = None) -> None:
        """`window` is how many positions a token attends to, its own the last of them; None for all up to its own."""
        self.config = c = config
        heads, kv, dim = c.num_heads, c.num_kv_heads, c.head_dim
        parts = (("q_proj", (1 + c.gated) * heads * dim), ("k_proj", kv * dim), ("v_proj", kv * dim))
        order = self._order() if c.gated else None
        first_gate = (heads + kv) * dim
        gates = slice(first_gate, first_gate + c.gated * heads * dim)
        self.project = scope.projection(
            *parts, in_features=c.hidden_size, gates=gates, order=order, bias=c.bias, shard=Shard.OUTPUT
        )
        self.out = scope.linear("o_proj", c.hidden_size, heads * dim, bias=c.out_bias, shard=Shard.INPUT)
        qk_norm = self._qk_norm(scope) if c.normed else None
        sinks_H = scope.vector("sinks", heads) if c.sinks else None
        self.attend = scope.ops.gated_attention(
            GatedAttentionWeights(heads, kv, dim, qk_norm, c.gated, window, sinks_H)
        )

    def _order(self) -> Tensor:
        """Which stored row each output is: q_proj has a query, then a gate per head; wanted are queries, keys, gates,
        values."""
        heads, dim = self.config.num_heads, self.config.head_dim
        kv_size = self.config.num_kv_heads * dim
        q_and_gate = torch.arange(2 * heads * dim).view(heads, 2, dim)
        k = torch.arange(2 * heads * dim, 2 * heads * dim + kv_size)
        return torch.cat([q_and_gate[:, 0].flatten(), k, q_and_gate[:, 1].flatten(), k + kv_size])

    def _qk_norm(self, scope: Scope) -> RmsNorm:
        """Rotation keeps lengths, so the softmax scale can ride on the queries' norm."""
        c, dim = self.config, self.config.head_dim
        q_norm, k_norm = (
            scope.norm_weight(name, dim, centred=c.centred_norms) for name in ("q_norm", "k_norm")
        )
        q_norm = q_norm * dim**-0.5
        return RmsNorm(
            torch.cat([q_norm.expand(c.num_heads, dim), k_norm.expand(c.num_kv_heads, dim)]), c.eps
        )

    @property
    def state_spec(self) -> PagedKvSpec:
        return PagedKvSpec(self.config.num_kv_heads, self.config.head_dim)

    def __call__(
        self, normed: Normed, context: Context, state: LayerState, to_ND: Tensor, then: Norm
    ) -> tuple[Tensor, Normed]:
        """Added to `to_ND`, and what `then` makes of that. The state is what `state_spec` allocates."""
        projected, kv = self.project(normed), cast(PagedKv, state)
        attended = self.attend(projected, kv.keys, kv.values, context.angles, context.attention)
        return self.out.add_to(attended, to_ND, then)

    def remember(self, normed: Normed, context: Context, state: LayerState) -> None:
        """Writes the tokens' keys and values, and computes nothing else."""
        projected, kv = self.project(normed), cast(PagedKv, state)
        self.attend.write(projected, kv.keys, kv.values, context.angles, context.attention)

    def instructions(self, name: str) -> list[Instruction]:
        """This layer, from the buffer FIRST, added to the stream. `name` is the layer's key in the state."""
        return [
            program.Gemm(self.project, FIRST, SECOND),
            program.Attention(self.attend, name, SECOND, FIRST),
            program.Gemm(self.out, FIRST, STREAM, add=True),
        ]

    def remembering(self, name: str) -> list[Instruction]:
        """Writes the keys and values of what is in the buffer FIRST, and computes nothing else."""
        c = self.config
        keys, size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        values = (1 + c.gated) * keys + size
        only = ((keys, keys + size), (values, values + size))
        return [
            program.Gemm(self.project, FIRST, SECOND, only=only),
            program.Attention(self.attend, name, SECOND, None),
        ]
