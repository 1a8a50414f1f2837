"""The plainest decoder layer, which several families share: attention over all that came before, and a dense MLP."""

from headlong.layers.attention import Attention
from headlong.layers.decoder import DecoderLayer
from headlong.layers.mlp import Mlp
from headlong.layers.weights import Scope
from headlong.models.config import ModelConfig


def decoder_layer(config: ModelConfig, index: int | None, scope: Scope) -> DecoderLayer:  # noqa: ARG001 - all alike
    """A layer of the model, or, without an index, of its head."""
    attention = Attention(config.attention, scope("self_attn"))
    name, eps = scope.prefix.rstrip("."), config.eps
    mlp = Mlp.load(config.hidden_size, config.intermediate_size, scope("mlp"), bias=config.mlp_bias)
    return DecoderLayer(name, attention, mlp, scope, config.hidden_size, eps, centred=config.centred_norms)
