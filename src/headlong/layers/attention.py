"""Full attention with query/key norms, partial rotary and an output gate."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headlong.layers.context import Context
from headlong.layers.weights import Scope
from headlong.ops.gated_attention.reference import GatedAttentionWeights
from headlong.ops.norm.reference import RmsNorm
from headlong.state.layer import KvState
from headlong.state.specs import KvSpec


@dataclass(frozen=True)
class AttentionConfig:
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    bias: bool = False


class GatedAttention:
    """One projection gives queries, keys, gates and values, in this order, so that queries and keys share
    their norm and their rotation."""

    def __init__(self, config: AttentionConfig, scope: Scope) -> None:
        self.config = c = config
        heads, kv, dim = c.num_heads, c.num_kv_heads, c.head_dim

        def rows(name: str, out: int) -> Tensor:
            """A projection's weight with its bias, if any, as one more column."""
            weight = scope.tensor(f"{name}.weight", out, c.hidden_size)
            return torch.cat([weight, scope.tensor(f"{name}.bias", out)[:, None]], 1) if c.bias else weight

        q_and_gate = rows("q_proj", heads * dim * 2).view(heads, 2, dim, -1)  # per head: query, then gate
        q, gate = q_and_gate[:, 0].flatten(0, 1), q_and_gate[:, 1].flatten(0, 1)
        weight = torch.cat([q, rows("k_proj", kv * dim), gate, rows("v_proj", kv * dim)])
        self.bias = weight[:, -1].contiguous() if c.bias else None
        self.project = scope.ops.linear(weight[:, :-1].contiguous() if c.bias else weight)
        self.out = scope.linear("o_proj", c.hidden_size, heads * dim)
        self.out_bias = scope.vector("o_proj.bias", c.hidden_size) if c.bias else None
        # Rotation keeps lengths, so the softmax scale can ride on the queries' norm.
        q_norm, k_norm = scope.norm_weight("q_norm", dim) * dim**-0.5, scope.norm_weight("k_norm", dim)
        qk_norm = RmsNorm(torch.cat([q_norm.expand(heads, dim), k_norm.expand(kv, dim)]), c.eps)
        self.attend = scope.ops.gated_attention(GatedAttentionWeights(heads, kv, dim, qk_norm))

    @property
    def state_spec(self) -> KvSpec:
        return KvSpec(self.config.num_kv_heads, self.config.head_dim)

    def __call__(self, x_ND: Tensor, context: Context, state: KvState) -> Tensor:
        projected = self.project(x_ND)
        if self.bias is not None:
            projected = projected + self.bias
        out = self.attend(projected, state.keys, state.values, context.angles, context.attention)
        out = self.out(out)
        return out if self.out_bias is None else out + self.out_bias
