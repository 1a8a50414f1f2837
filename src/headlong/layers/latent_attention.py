"""Multi-head latent attention (MLA): keys and values of all heads come from one small latent, and only that is kept."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from headlong.layers.context import Context
from headlong.layers.weights import Scope
from headlong.ops import program
from headlong.ops.latent_attention.weights import LatentAttentionWeights, LatentSizes
from headlong.ops.linear.linear import Shard
from headlong.ops.norm.normed import Norm, Normed
from headlong.ops.norm.reference import RmsNorm
from headlong.ops.program import FIRST, SECOND, STREAM, THIRD, Instruction
from headlong.quant.format import PackedWeight, Weight
from headlong.state.latent_kv import LatentKv, LatentKvSpec
from headlong.state.layer_state import LayerState

EXPANDING, KEYS_OF_LATENTS, VALUES_OF_LATENTS = "kv_b_proj", "k_b_proj", "v_b_proj"
"""The matrix that makes keys and values of latents, and the two that it is in other files."""


@dataclass(frozen=True)
class LatentAttentionConfig:
    """A head's query and key have `plain_dim` numbers that positions leave alone and `rope_dim` that they turn."""

    hidden_size: int
    num_heads: int
    query_rank: int | None
    """The size of what queries are made from; None where they are made from the hidden state at once."""
    rank: int
    """The size of the latent that keys and values are made from."""
    plain_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    """What scores are multiplied with before their softmax."""
    eps: float
    """The eps of the norms of latents and of what queries are made from."""
    interleaved: bool = True
    """Whether the two numbers of a rotary pair are neighbours; else they lie in two halves."""
    bias: bool = False
    """Whether the projections of the hidden state and the last one have biases."""


class LatentAttention:
    """Queries and latents are projected, the core attends to latents alone, and heads' outputs are projected back."""

    def __init__(self, config: LatentAttentionConfig, scope: Scope) -> None:
        self.config = c = config
        query_size = c.num_heads * (c.plain_dim + c.rope_dim)
        self.q_a = self.q_norm = None
        if c.query_rank is None:
            self.queries = scope.linear("q_proj", query_size, c.hidden_size, shard=Shard.OUTPUT)
        else:
            self.q_a = scope.linear("q_a_proj", c.query_rank, c.hidden_size, shard=Shard.NONE, bias=c.bias)
            self.q_norm = scope.norm("q_a_layernorm", c.query_rank, c.eps, centred=False, inside=True)
            self.queries = scope.linear("q_b_proj", query_size, c.query_rank, shard=Shard.OUTPUT)
        self.latents = scope.linear(
            "kv_a_proj_with_mqa", c.rank + c.rope_dim, c.hidden_size, shard=Shard.NONE, bias=c.bias
        )
        self.attend = scope.ops.latent_attention(self._weights(scope))
        self.out = scope.linear(
            "o_proj", c.hidden_size, c.num_heads * c.value_dim, shard=Shard.INPUT, bias=c.bias
        )

    def _weights(self, scope: Scope) -> LatentAttentionWeights:
        c = self.config
        keys_HRP, values_HVR = self._expanding(scope)
        return LatentAttentionWeights(
            LatentSizes(c.num_heads, c.rank, c.plain_dim, c.rope_dim, c.value_dim, c.scale, c.interleaved),
            norm=RmsNorm(scope.norm_weight("kv_a_layernorm", c.rank, centred=False), c.eps),
            keys_HRP=keys_HRP,
            values_HVR=values_HVR,
        )

    def _expanding(self, scope: Scope) -> tuple[Tensor, Tensor]:
        """What would make keys and values of latents: one matrix, or two as GGUF files have them, head by head."""
        c, dtype = self.config, scope.ops.dtype
        if scope.has(f"{KEYS_OF_LATENTS}.weight"):
            keys = scope.experts(f"{KEYS_OF_LATENTS}.weight", c.num_heads, c.rank, c.plain_dim)
            values = scope.experts(f"{VALUES_OF_LATENTS}.weight", c.num_heads, c.value_dim, c.rank)
            return _stacked(keys, dtype), _stacked(values, dtype)
        size = c.plain_dim + c.value_dim
        stored = _plain(scope.matrix(EXPANDING, c.num_heads * size, c.rank), dtype)
        keys_HPR, values_HVR = stored.view(c.num_heads, size, c.rank).split((c.plain_dim, c.value_dim), dim=1)
        return keys_HPR.transpose(1, 2), values_HVR

    @property
    def state_spec(self) -> LatentKvSpec:
        return LatentKvSpec(self.config.rank, self.config.rope_dim)

    def __call__(
        self, normed: Normed, context: Context, state: LayerState, to_ND: Tensor, then: Norm
    ) -> tuple[Tensor, Normed]:
        """Added to `to_ND`, and what `then` makes of that. The state is what `state_spec` allocates."""
        given, kv = self.latents(normed), cast(LatentKv, state)
        if self.q_a is not None and self.q_norm is not None:
            normed = self.q_norm(self.q_a(normed))
        attended = self.attend(self.queries(normed), given, kv.latents, context.angles, context.attention)
        return self.out.add_to(attended, to_ND, then)

    def remember(self, normed: Normed, context: Context, state: LayerState) -> None:
        """Writes the tokens' latents, and computes nothing else."""
        kv = cast(LatentKv, state)
        self.attend.write(self.latents(normed), kv.latents, context.angles, context.attention)

    def instructions(self, name: str) -> list[Instruction]:
        """This layer, from the buffer FIRST, added to the stream. `name` is the layer's key in the state."""
        lowered: list[Instruction] = []
        if self.q_a is not None and self.q_norm is not None:
            lowered = [program.Gemm(self.q_a, FIRST, SECOND), program.Norm(self.q_norm, SECOND, FIRST)]
        return [
            program.Gemm(self.latents, FIRST, THIRD),
            *lowered,
            program.Gemm(self.queries, FIRST, SECOND),
            program.LatentAttention(self.attend, name, SECOND, THIRD, FIRST),
            program.Gemm(self.out, FIRST, STREAM, add=True),
        ]

    def remembering(self, name: str) -> list[Instruction]:
        """Writes the latents of what is in the buffer FIRST, and computes nothing else."""
        return [
            program.Gemm(self.latents, FIRST, SECOND),
            program.LatentAttention(self.attend, name, None, SECOND, None),
        ]


def _stacked(heads: list[Weight], dtype: torch.dtype) -> Tensor:
    return torch.stack([_plain(head, dtype) for head in heads])


def _plain(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The matrix unpacked, in this dtype: heads' parts of it are multiplied from either side."""
    if isinstance(weight, PackedWeight):
        return weight.dequantize(0, weight.out_features).to(dtype)
    return weight
