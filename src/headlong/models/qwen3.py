"""Qwen3, dense: attention whose queries and keys have norms of their own, over the whole head, and a dense MLP."""

from collections.abc import Mapping
from typing import Any

from headlong.checkpoint.gguf_names import ATTENTION, MLP, MLP_NORM, QK_NORMS, GgufNames, suffixed
from headlong.layers.attention import AttentionConfig
from headlong.models.config import ModelConfig
from headlong.models.config_fields import attention, without_nulls
from headlong.models.dense import decoder_layer, dense
from headlong.models.family import Family
from headlong.models.fields import Fields
from headlong.models.gguf import GgufSpec
from headlong.models.qwen2 import window_layers


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    f = Fields(without_nulls(config), "config.json")
    return dense(f, attention_of(f), max_position=32768, **window_layers(f))


def attention_of(f: Fields) -> AttentionConfig:
    kv_heads = f.int("num_key_value_heads", f.int("num_attention_heads"))
    bias = f.bool("attention_bias", False)
    own = {"bias": bias, "out_bias": bias, "gated": False, "centred_norms": False}
    return attention(f, f.int("head_dim", 128), kv_heads, **own)


FAMILY = Family(
    releases="Qwen3 0.6B to 32B",
    config=read_config,
    layer=decoder_layer,
    gguf=GgufSpec(
        GgufNames("qwen3", suffixed(ATTENTION | QK_NORMS | MLP | MLP_NORM)), "qwen3", "Qwen3ForCausalLM"
    ),
)
