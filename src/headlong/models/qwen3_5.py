"""Qwen3.5, Qwen3.5-MoE and Qwen3-Next: Gated DeltaNet layers with a gated attention layer now and then.

The target model alone; its MTP head is in mtp.py. Knows names and wiring, no checkpoints and no schedules.
"""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from headlong.layers.attention import GatedAttention
from headlong.layers.context import Context
from headlong.layers.decoder import DecoderLayer
from headlong.layers.delta_net import GatedDeltaNet
from headlong.layers.mlp import Mlp, MoeMlp
from headlong.layers.weights import Scope
from headlong.models.config import FULL, ModelConfig
from headlong.ops.rope.reference import Rotary
from headlong.state.layer import LayerState
from headlong.state.specs import LayerSpec


def decoder_layer(config: ModelConfig, kind: str, scope: Scope, *, dense: bool) -> DecoderLayer:
    """A layer of this family; the head's block is one too."""
    hidden = config.hidden_size
    if kind == FULL:
        mixer = GatedAttention(config.attention, scope("self_attn"))
    else:
        mixer = GatedDeltaNet(config.delta_net, scope("linear_attn"))
    if config.moe is None or dense:
        mlp = Mlp.load(hidden, config.intermediate_size, scope("mlp"))
    else:
        mlp = MoeMlp(config.moe, scope("mlp"))
    return DecoderLayer(scope.prefix.rstrip("."), mixer, mlp, scope, hidden, config.eps)


class Qwen35Model:
    """Tokens to hidden states after the final norm, and those to logits."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        self.config = config
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embedding = scope.tensor("embed_tokens.weight", vocab, hidden)
        self.layers = [
            decoder_layer(config, kind, scope(f"layers.{i}"), dense=i in config.dense_layers)
            for i, kind in enumerate(config.layer_types)
        ]
        self.norm = scope.norm("norm", hidden, config.eps, wide=True)
        # A stored lm_head wins over a config that calls it tied.
        own_head = not config.tied or scope.has("lm_head.weight")
        self.lm_head = (
            scope.linear("lm_head", vocab, hidden) if own_head else scope.ops.linear(self.embedding)
        )
        head_dim = config.attention.head_dim
        self.rotary = Rotary.of(config.rope_theta, config.rotary_dim, head_dim, scope.ops.device)
        self.ops = scope.ops

    @property
    def state_specs(self) -> dict[str, LayerSpec]:
        return {layer.name: layer.state_spec for layer in self.layers}

    def embed(self, tokens_N: Tensor) -> Tensor:
        return F.embedding(tokens_N, self.embedding).to(self.ops.activation_dtype)

    def forward(self, tokens_N: Tensor, context: Context, states: Mapping[str, LayerState]) -> Tensor:
        x_ND = self.embed(tokens_N)
        for layer in self.layers:
            x_ND = layer(x_ND, context, states[layer.name])
        return self.norm(x_ND)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return self.lm_head(hidden_ND)
