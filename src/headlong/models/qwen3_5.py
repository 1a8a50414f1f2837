"""Qwen3.5, Qwen3.5-MoE and Qwen3-Next: Gated DeltaNet layers with a gated attention layer now and then.

The family's layers alone; what they are strung into is in decoder.py and mtp.py.
"""

from headlong.layers.attention import Attention
from headlong.layers.decoder import DecoderLayer
from headlong.layers.delta_net import GatedDeltaNet
from headlong.layers.mlp import Mlp, MoeMlp
from headlong.layers.weights import Scope
from headlong.models.config import FULL, ModelConfig


def decoder_layer(config: ModelConfig, index: int | None, scope: Scope) -> DecoderLayer:
    """The head's block is a full-attention layer, and in a model of experts never a dense one."""
    hidden = config.hidden_size
    if index is None or config.layer_types[index] == FULL:
        mixer = Attention(config.attention, scope("self_attn"))
    else:
        assert config.delta_net is not None
        mixer = GatedDeltaNet(config.delta_net, scope("linear_attn"))
    if config.moe is None or index in config.dense_layers:
        mlp = Mlp.load(hidden, config.intermediate_size, scope("mlp"))
    else:
        mlp = MoeMlp(config.moe, scope("mlp"))
    name = scope.prefix.rstrip(".")
    return DecoderLayer(name, mixer, mlp, scope, hidden, config.eps, centred=config.centred_norms)
