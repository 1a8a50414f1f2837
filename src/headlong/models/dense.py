"""The plainest decoder, which several families share: attention over all that came before, or through a window,
and a dense MLP or experts."""

from typing import Any

from headlong.layers.attention import Attention, AttentionConfig
from headlong.layers.decoder import DecoderLayer
from headlong.layers.weights import Scope
from headlong.models.config import SLIDING, ModelConfig
from headlong.models.config_fields import decoder
from headlong.models.experts import feed_forward
from headlong.models.fields import Fields


def dense(
    f: Fields, attention: AttentionConfig, *, max_position: int, rotary_part: float = 1.0, **own: Any
) -> ModelConfig:
    """What is read alike in all these families, and a family's `own` fields."""
    return decoder(
        f,
        attention,
        rotary_part=rotary_part,
        max_position=max_position,
        model_type=str(f.data.get("model_type")),
        intermediate_size=f.int("intermediate_size"),
        tied=f.bool("tie_word_embeddings", False),
        centred_norms=False,
        **own,
    )


def decoder_layer(config: ModelConfig, index: int | None, scope: Scope) -> DecoderLayer:
    """A layer of the model, or, without an index, of its head."""
    is_sliding = index is not None and config.layer_types[index] == SLIDING
    attention = Attention(config.attention, scope("self_attn"), config.window if is_sliding else None)
    name, eps = scope.prefix.rstrip("."), config.eps
    mlp = feed_forward(config, index, scope)
    return DecoderLayer(name, attention, mlp, scope, config.hidden_size, eps, centred=config.centred_norms)
