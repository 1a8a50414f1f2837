"""Llama: attention over the whole head without norms of its own, and a dense MLP, either with biases in some models."""

import re
from collections.abc import Mapping
from typing import Any

from headlong.checkpoint.gguf_config import Keys
from headlong.checkpoint.gguf_names import ATTENTION, MLP, MLP_NORM, GgufNames, suffixed
from headlong.checkpoint.transforms import AS_IS, Order, rope_row_order
from headlong.models.config import FULL, MAX_LAYERS, ModelConfig
from headlong.models.config_fields import attention, divided_head_dim, without_nulls
from headlong.models.dense import decoder_layer, dense
from headlong.models.family import Family
from headlong.models.fields import Fields
from headlong.models.gguf import GgufSpec, Tensors

_ROTARY_ROWS = re.compile(r"(mtp\.)?layers\.\d+\.self_attn\.([qk])_proj\.(weight|bias)")


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    f = Fields(without_nulls(config), "config.json")
    head_dim = divided_head_dim(f)
    kv_heads = f.int("num_key_value_heads", f.int("num_attention_heads"))
    bias = f.bool("attention_bias", False)
    return dense(
        f,
        attention(f, head_dim, kv_heads, bias=bias, out_bias=bias, gated=False, normed=False),
        max_position=2048,
        layer_types=(FULL,) * f.int("num_hidden_layers", high=MAX_LAYERS),
        mlp_bias=f.bool("mlp_bias", False),
    )


def _fields(keys: Keys, tensors: Tensors, num_layers: int) -> dict[str, Any]:  # noqa: ARG001 - all alike
    if keys.int("expert_count", 0, low=0):
        raise keys.fault("expert_count", "a llama with experts is not supported")
    return {
        "intermediate_size": keys.int("feed_forward_length"),
        "mlp_bias": any(name.endswith(".ffn_up.bias") for name in tensors),
    }


def _order(name: str, config: ModelConfig) -> Order:
    """On disk the two numbers of a rotary pair are neighbours."""
    match = _ROTARY_ROWS.fullmatch(name)
    if match is None:
        return AS_IS
    heads = config.attention.num_heads if match[2] == "q" else config.attention.num_kv_heads
    return Order(rows=rope_row_order(heads, config.attention.head_dim))


FAMILY = Family(
    releases="Llama 2, 3, 3.1 and 3.2, SmolLM2",
    config=read_config,
    layer=decoder_layer,
    gguf=GgufSpec(
        names=GgufNames("llama", suffixed(ATTENTION | MLP | MLP_NORM)),
        model_type="llama",
        class_name="LlamaForCausalLM",
        fields=_fields,
        order=_order,
        reordered_on_load=True,
    ),
)
