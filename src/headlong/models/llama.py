"""Llama: plain attention over the whole head, and a dense MLP, either with biases in some models.

The family's layers alone; what they are strung into is in decoder.py and mtp.py.
"""

from headlong.layers.attention import Attention
from headlong.layers.decoder import DecoderLayer
from headlong.layers.mlp import Mlp
from headlong.layers.weights import Scope
from headlong.models.config import ModelConfig


def decoder_layer(config: ModelConfig, index: int | None, scope: Scope) -> DecoderLayer:  # noqa: ARG001 - all alike
    """The head's block is one like all others."""
    attention = Attention(config.attention, scope("self_attn"))
    name, eps = scope.prefix.rstrip("."), config.eps
    mlp = Mlp.load(config.hidden_size, config.intermediate_size, scope("mlp"), bias=config.mlp_bias)
    return DecoderLayer(name, attention, mlp, scope, config.hidden_size, eps, centred=config.centred_norms)
