"""DeepSeek-V3 and what is built like it (R1, V3.1, Kimi-K2, GLM-4.7-Flash): latent attention, and experts in all but
the first layers."""

from collections.abc import Mapping
from typing import Any

from headlong.errors import ConfigError
from headlong.layers.decoder import DecoderLayer
from headlong.layers.latent_attention import LatentAttention, LatentAttentionConfig
from headlong.layers.weights import Scope
from headlong.models.config import FULL, MAX_LAYERS, ModelConfig
from headlong.models.config_fields import attention, decoder, norm_eps, without_nulls
from headlong.models.deepseek_v3_gguf import GGUF
from headlong.models.experts import biased_experts, feed_forward, first_dense_layers
from headlong.models.family import Family
from headlong.models.fields import Fields
from headlong.models.glm4_moe import HEAD, NAMING
from headlong.models.rope_fields import softmax_magnitude


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    f = Fields(without_nulls(config), "config.json")
    latent = _latent(f)
    sizes = attention(f, latent.rope_dim, latent.num_heads, gated=False, normed=False)
    count = f.int("num_hidden_layers", high=MAX_LAYERS)
    return decoder(
        f,
        sizes,
        rotary_part=1.0,
        max_position=4096,
        model_type=str(config.get("model_type")),
        intermediate_size=f.int("intermediate_size"),
        layer_types=(FULL,) * count,
        tied=f.bool("tie_word_embeddings", False),
        latent=latent,
        moe=biased_experts(f),
        dense_layers=_dense_layers(f, count),
        centred_norms=False,
    )


def _dense_layers(f: Fields, count: int) -> frozenset[int]:
    """The layers without experts: listed layer by layer, or the first ones."""
    types = f.data.get("mlp_layer_types")
    if types is None:
        return first_dense_layers(f, count)
    if (
        not isinstance(types, list)
        or len(types) < count
        or not {"dense", "sparse"}.issuperset(map(str, types))
    ):
        raise ConfigError(
            f"{f.where}: mlp_layer_types must list {count} times 'dense' or 'sparse', not {types!r}"
        )
    return frozenset(i for i, kind in enumerate(types[:count]) if kind == "dense")


def _latent(f: Fields) -> LatentAttentionConfig:
    heads = f.int("num_attention_heads")
    if f.int("num_key_value_heads", heads) != heads:
        raise ConfigError(
            f"{f.where}: num_key_value_heads must be num_attention_heads ({heads}): keys come from one latent"
        )
    plain_dim, rope_dim = f.int("qk_nope_head_dim", 128), f.int("qk_rope_head_dim", 64)
    return LatentAttentionConfig(
        hidden_size=f.int("hidden_size"),
        num_heads=heads,
        query_rank=f.int("q_lora_rank") if "q_lora_rank" in f.data else None,
        rank=f.int("kv_lora_rank", 512),
        plain_dim=plain_dim,
        rope_dim=rope_dim,
        value_dim=f.int("v_head_dim", 128),
        scale=(plain_dim + rope_dim) ** -0.5 * softmax_magnitude(f) ** 2,
        eps=norm_eps(f),
        interleaved=f.bool("rope_interleave", True),
        bias=f.bool("attention_bias", False),
    )


def decoder_layer(config: ModelConfig, index: int | None, scope: Scope) -> DecoderLayer:
    """A layer of the model, or, without an index, of its head."""
    assert config.latent is not None
    attention = LatentAttention(config.latent, scope("self_attn"))
    name, eps = scope.prefix.rstrip("."), config.eps
    mlp = feed_forward(config, index, scope)
    return DecoderLayer(name, attention, mlp, scope, config.hidden_size, eps, centred=False)


def _family(releases: str, oracle: str) -> Family:
    return Family(
        config=read_config,
        layer=decoder_layer,
        naming=NAMING,
        mtp=HEAD,
        gguf=GGUF,
        releases=releases,
        oracle=oracle,
    )


FAMILY = _family("DeepSeek-V3, V3-0324, R1 and V3.1", "transformers, its MtpModel for the head")
KIMI = _family("Kimi-K2 and Kimi-K2-Thinking, which have no head", "transformers' DeepSeek-V3")
FLASH = _family("GLM-4.7-Flash", "transformers, its MtpModel for the head")
