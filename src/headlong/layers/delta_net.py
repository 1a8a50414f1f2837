"""Gated DeltaNet: projection, causal convolution, gated delta rule, gated norm."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headlong.layers.context import Context
from headlong.layers.weights import Scope
from headlong.ops.causal_conv.reference import causal_conv
from headlong.ops.elementwise import sigmoid, softplus
from headlong.ops.gated_delta.reference import gated_delta
from headlong.ops.norm.reference import RmsNorm, l2_norm
from headlong.state.layer import DeltaNetState
from headlong.state.specs import DeltaNetSpec

QK_EPS = 1e-6


@dataclass(frozen=True)
class DeltaNetConfig:
    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    eps: float
    interleaved: bool = False
    """Qwen3-Next stores the projections mixed, key head by key head; Qwen3.5 stores them apart."""

    @property
    def conv_channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


class GatedDeltaNet:
    """One projection gives [queries, keys, values], output gate, β and a, in this order."""

    def __init__(self, config: DeltaNetConfig, scope: Scope) -> None:
        self.config = c = config
        value_size = c.num_value_heads * c.value_dim
        read = _interleaved_rows if c.interleaved else _separate_rows
        self.project = scope.ops.linear(read(c, scope))
        self.sizes = [c.conv_channels, value_size, c.num_value_heads, c.num_value_heads]
        conv = scope.vector("conv1d.weight", c.conv_channels, 1, c.conv_kernel)
        self.conv_TC = conv.squeeze(1).t().contiguous()
        self.rate = -scope.vector("A_log", c.num_value_heads).exp()
        self.dt_bias = scope.vector("dt_bias", c.num_value_heads)
        # Queries would be scaled by 1/√key_dim; the norm that follows takes it all out but for its eps.
        self.norm = RmsNorm(scope.vector("norm.weight", c.value_dim), c.eps * c.key_dim)
        self.qk_eps = torch.full((), QK_EPS, dtype=self.rate.dtype, device=self.rate.device)
        self.out = scope.linear("out_proj", c.hidden_size, value_size)

    @property
    def state_spec(self) -> DeltaNetSpec:
        c = self.config
        return DeltaNetSpec(c.num_value_heads, c.key_dim, c.value_dim, c.conv_channels, c.conv_kernel)

    def __call__(self, x_ND: Tensor, context: Context, state: DeltaNetState) -> Tensor:
        assert context.conv is not None and context.delta is not None
        c, num_tokens = self.config, x_ND.shape[0]
        mixed, gate, b, a = self.project(x_ND).split_with_sizes(self.sizes, dim=-1)
        mixed = causal_conv(mixed, state.windows, self.conv_TC, context.conv)

        key_size = 2 * c.num_key_heads * c.key_dim
        qk = l2_norm(mixed[:, :key_size].view(num_tokens, 2, c.num_key_heads, c.key_dim), self.qk_eps)
        if c.num_value_heads != c.num_key_heads:
            shape = (num_tokens, 2, c.num_key_heads, c.num_value_heads // c.num_key_heads, c.key_dim)
            qk = qk.unsqueeze(3).expand(shape).flatten(2, 3)
        v = mixed[:, key_size:].view(num_tokens, c.num_value_heads, c.value_dim)
        decay = torch.exp(self.rate * softplus(a + self.dt_bias))
        out = gated_delta(qk[:, 0], qk[:, 1], v, decay, sigmoid(b), state.delta, context.delta)
        return self.out(self.norm.gated(out, gate.view(out.shape)).flatten(1))


def _separate_rows(c: DeltaNetConfig, scope: Scope) -> Tensor:
    parts = (
        ("in_proj_qkv", c.conv_channels),
        ("in_proj_z", c.num_value_heads * c.value_dim),
        ("in_proj_b", c.num_value_heads),
        ("in_proj_a", c.num_value_heads),
    )
    return torch.cat([scope.tensor(f"{name}.weight", size, c.hidden_size) for name, size in parts])


def _interleaved_rows(c: DeltaNetConfig, scope: Scope) -> Tensor:
    """Per key head the file holds q, k, its value heads' v, their z; and, apart, their b, their a."""
    per_key = c.num_value_heads // c.num_key_heads
    sizes = [c.key_dim, c.key_dim, per_key * c.value_dim, per_key * c.value_dim]
    qkvz = scope.tensor("in_proj_qkvz.weight", c.num_key_heads * sum(sizes), c.hidden_size)
    ba = scope.tensor("in_proj_ba.weight", 2 * c.num_value_heads, c.hidden_size)
    parts = qkvz.view(c.num_key_heads, -1, c.hidden_size).split(sizes, dim=1)
    parts += ba.view(c.num_key_heads, -1, c.hidden_size).split([per_key, per_key], dim=1)
    return torch.cat([part.flatten(0, 1) for part in parts])
