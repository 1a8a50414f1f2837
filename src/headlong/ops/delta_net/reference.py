"""What lies between a DeltaNet layer's two projections: convolution, gates, gated delta rule, gated norm."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headlong.ops.causal_conv import reference as causal_conv
from headlong.ops.elementwise import sigmoid, softplus
from headlong.ops.gated_delta import reference as gated_delta
from headlong.ops.gated_delta.reference import DeltaState
from headlong.ops.linear.linear import Projected
from headlong.ops.norm.reference import RmsNorm, l2_norm
from headlong.ops.prepared import PreparedStep
from headlong.types import Rows

QK_EPS = 1e-6


@dataclass(frozen=True)
class DeltaNetWeights:
    """The weights of one layer's core. A projected token is [queries, keys, values | output gate | β | a]."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_TC: Tensor
    """The convolution's weights [kernel, channels]."""
    rate: Tensor
    """The rate of the decay, -exp(A_log)."""
    dt_bias: Tensor
    norm: RmsNorm
    tiled: bool = False
    """Whether value head h reads key head h % num_key_heads; else the value heads of one key head are neighbours."""

    @property
    def conv_channels(self) -> int:
        return self.conv_TC.shape[1]


@dataclass(frozen=True)
class PreparedDeltaNet(PreparedStep):
    conv: causal_conv.PreparedConv
    delta: gated_delta.PreparedDelta


class ReferenceDeltaNet:
    """The DeltaNet core in plain torch, which other backends are tested against."""

    name = "reference"

    def __init__(self, weights: DeltaNetWeights) -> None:
        self.weights = w = weights
        value_size = w.num_value_heads * w.value_dim
        self.sizes = [w.conv_channels, value_size, w.num_value_heads, w.num_value_heads]
        value_heads = torch.arange(w.num_value_heads, device=w.rate.device)
        per_key = w.num_value_heads // w.num_key_heads
        self.key_head = value_heads % w.num_key_heads if w.tiled else value_heads // per_key
        self.qk_eps = torch.full((), QK_EPS, dtype=w.rate.dtype, device=w.rate.device)

    @staticmethod
    def prepare(rows: Rows, kernel: int, window: int, device: torch.device) -> PreparedDeltaNet:
        return PreparedDeltaNet(
            causal_conv.prepare(rows, kernel, window, device), gated_delta.prepare(rows, device)
        )

    def __call__(
        self, projected: Projected, delta: DeltaState, windows_SWC: Tensor, step: PreparedStep
    ) -> Tensor:
        """Returns [N, value heads · value dim], and updates the slots of the step."""
        assert isinstance(projected, Tensor) and isinstance(step, PreparedDeltaNet)
        w, num_tokens = self.weights, projected.shape[0]
        mixed, gate, b, a = projected.split_with_sizes(self.sizes, dim=-1)
        mixed = causal_conv.causal_conv(mixed, windows_SWC, w.conv_TC, step.conv)
        key_size = 2 * w.num_key_heads * w.key_dim
        qk = l2_norm(mixed[:, :key_size].view(num_tokens, 2, w.num_key_heads, w.key_dim), self.qk_eps)
        if w.num_value_heads != w.num_key_heads:
            qk = qk.index_select(2, self.key_head)
        v = mixed[:, key_size:].view(num_tokens, w.num_value_heads, w.value_dim)
        decay = torch.exp(w.rate * softplus(a + w.dt_bias))
        out = gated_delta.gated_delta(qk[:, 0], qk[:, 1], v, decay, sigmoid(b), delta, step.delta)
        return w.norm.gated(out, gate.view(out.shape)).flatten(1)
