"""Gated DeltaNet: projection, causal convolution, gated delta rule, gated norm."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from headlong.layers.context import Context
from headlong.layers.weights import Scope
from headlong.ops import program
from headlong.ops.delta_net.reference import DeltaNetWeights
from headlong.ops.linear.linear import Projection, Shard
from headlong.ops.norm.normed import Norm, Normed
from headlong.ops.norm.reference import RmsNorm
from headlong.ops.program import FIRST, SECOND, STREAM, Instruction
from headlong.state.delta_net import DeltaNetSpec, DeltaNetState
from headlong.state.layer_state import LayerState


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
    tiled: bool = False
    """Value head h belongs to key head h % num_key_heads (GGUF), not to h // (value heads per key head)."""

    @property
    def conv_channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def gates(self) -> slice:
        """The output gates among the outputs of the projection."""
        return slice(self.conv_channels, self.conv_channels + self.num_value_heads * self.value_dim)


class GatedDeltaNet:
    """One projection gives [queries, keys, values], output gate, β and a, in this order."""

    def __init__(self, config: DeltaNetConfig, scope: Scope) -> None:
        self.config = c = config
        self.project = (_interleaved if c.interleaved else _separate)(c, scope)
        conv = scope.vector("conv1d.weight", c.conv_channels, 1, c.conv_kernel)
        weights = DeltaNetWeights(
            num_key_heads=c.num_key_heads,
            num_value_heads=c.num_value_heads,
            key_dim=c.key_dim,
            value_dim=c.value_dim,
            conv_TC=conv.squeeze(1).t().contiguous(),
            rate=-scope.vector("A_log", c.num_value_heads).exp(),
            dt_bias=scope.vector("dt_bias", c.num_value_heads),
            # Queries would be scaled by 1/√key_dim; this norm takes it all out but for its eps.
            norm=RmsNorm(scope.vector("norm.weight", c.value_dim), c.eps * c.key_dim),
            tiled=c.tiled,
        )
        self.mix = scope.ops.delta_net(weights)
        self.out = scope.linear("out_proj", c.hidden_size, c.num_value_heads * c.value_dim, shard=Shard.INPUT)

    @property
    def state_spec(self) -> DeltaNetSpec:
        c = self.config
        return DeltaNetSpec(c.num_value_heads, c.key_dim, c.value_dim, c.conv_channels, c.conv_kernel)

    def __call__(
        self, normed: Normed, context: Context, state: LayerState, to_ND: Tensor, then: Norm
    ) -> tuple[Tensor, Normed]:
        """Added to `to_ND`, and what `then` makes of that. The state is what `state_spec` allocates."""
        assert context.delta_net is not None
        projected, own = self.project(normed), cast(DeltaNetState, state)
        mixed = self.mix(projected, own.delta, own.windows, context.delta_net)
        return self.out.add_to(mixed, to_ND, then)

    def instructions(self, name: str) -> list[Instruction]:
        """This layer, from the buffer FIRST, added to the stream. `name` is the layer's key in the state."""
        return [
            program.Gemm(self.project, FIRST, SECOND),
            program.DeltaNet(self.mix, name, SECOND, FIRST),
            program.Gemm(self.out, FIRST, STREAM, add=True),
        ]


def _separate(c: DeltaNetConfig, scope: Scope) -> Projection:
    parts = (
        ("in_proj_qkv", c.conv_channels),
        ("in_proj_z", c.num_value_heads * c.value_dim),
        ("in_proj_b", c.num_value_heads),
        ("in_proj_a", c.num_value_heads),
    )
    return scope.projection(*parts, in_features=c.hidden_size, gates=c.gates, shard=Shard.OUTPUT)


def _interleaved(c: DeltaNetConfig, scope: Scope) -> Projection:
    """Per key head the file holds q, k, its value heads' v, their z; and, apart, their b, their a."""
    per_key = c.num_value_heads // c.num_key_heads
    sizes = [c.key_dim, c.key_dim, per_key * c.value_dim, per_key * c.value_dim]
    qkvz, ba = c.num_key_heads * sum(sizes), 2 * c.num_value_heads
    parts = torch.arange(qkvz).view(c.num_key_heads, -1).split(sizes, dim=1)
    parts += torch.arange(qkvz, qkvz + ba).view(c.num_key_heads, -1).split([per_key, per_key], dim=1)
    order = torch.cat([part.flatten() for part in parts])
    stored = (("in_proj_qkvz", qkvz), ("in_proj_ba", ba))
    return scope.projection(
        *stored, in_features=c.hidden_size, gates=c.gates, order=order, shard=Shard.OUTPUT
    )
