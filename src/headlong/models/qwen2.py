"""Qwen2 and Qwen2.5: attention with biases on queries, keys and values alone, and a dense MLP; small ones are tied."""

from collections.abc import Mapping
from typing import Any

from headlong.checkpoint.gguf_names import ATTENTION, MLP, MLP_NORM, GgufNames, suffixed
from headlong.models.config import ModelConfig
from headlong.models.config_fields import (
    attention,
    divided_head_dim,
    sliding_layers,
    switched_window,
    without_nulls,
)
from headlong.models.dense import decoder_layer, dense
from headlong.models.family import Family
from headlong.models.fields import Fields
from headlong.models.gguf import GgufSpec


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    f = Fields(without_nulls(config), "config.json")
    kv_heads = f.int("num_key_value_heads", f.int("num_attention_heads"))
    sizes = attention(f, divided_head_dim(f), kv_heads, bias=True, gated=False, normed=False)
    return dense(f, sizes, max_position=32768, **window_layers(f))


def window_layers(f: Fields) -> dict[str, Any]:
    """Where the window is switched on, layers from a number on attend through it."""
    first = f.int("max_window_layers", 28, low=0)
    return sliding_layers(f, switched_window(f), lambda i: i >= first)


FAMILY = Family(
    releases="Qwen2 and Qwen2.5, DeepSeek-R1-Distill-Qwen",
    config=read_config,
    layer=decoder_layer,
    gguf=GgufSpec(GgufNames("qwen2", suffixed(ATTENTION | MLP | MLP_NORM)), "qwen2", "Qwen2ForCausalLM"),
)
