"""GLM-4.5, 4.6 and 4.7: attention that turns half of each head, and after the first layers experts with sigmoid scores
and a shared one. The MTP head is the layer after the last, with copies of the embedding and the lm_head."""

from collections.abc import Mapping
from typing import Any

from headlong.checkpoint.gguf_config import Keys
from headlong.checkpoint.gguf_names import (
    ATTENTION,
    EXPERTS,
    EXPERTS_BIAS,
    MLP,
    QK_NORMS,
    GgufNames,
    suffixed,
)
from headlong.checkpoint.names import Naming
from headlong.models.config import ModelConfig
from headlong.models.config_fields import attention, divided_head_dim, full_layers, without_nulls
from headlong.models.dense import decoder_layer, dense
from headlong.models.experts import biased_experts, biased_fields, biased_keys, first_dense_layers
from headlong.models.family import Family
from headlong.models.fields import Fields
from headlong.models.gguf import GgufSpec, Tensors
from headlong.models.head_spec import HeadSpec

HEAD_MODULES = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
    "shared_head.head": "lm_head",
}
"""What the modules of a head are called where it is the layer after the last, as DeepSeek-V3 began it."""
NAMING = Naming("layers.{block}.", HEAD_MODULES, shared_experts="shared_experts", copies=True)
HEAD = HeadSpec(joins_in_layers=True, layers_field="num_nextn_predict_layers")


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    f = Fields(without_nulls(config), "config.json")
    layers = full_layers(f)
    kv_heads = f.int("num_key_value_heads", f.int("num_attention_heads"))
    own = {"bias": f.bool("attention_bias", False), "normed": f.bool("use_qk_norm", False)}
    return dense(
        f,
        attention(f, divided_head_dim(f), kv_heads, gated=False, centred_norms=False, **own),
        rotary_part=0.5,
        max_position=131072,
        layer_types=layers,
        moe=biased_experts(f),
        dense_layers=first_dense_layers(f, len(layers)),
    )


def _fields(keys: Keys, tensors: Tensors, num_layers: int) -> dict[str, Any]:  # noqa: ARG001 - keys say it all
    normed = any(name.endswith(".attn_q_norm.weight") for name in tensors)
    sizes = {"intermediate_size": keys.int("feed_forward_length"), "use_qk_norm": normed}
    return sizes | biased_fields(keys)


def _keys(config: ModelConfig, text: Mapping[str, Any], head_layers: int) -> dict[str, Any]:  # noqa: ARG001 - as it is
    return biased_keys(config)


_LAYER = suffixed(ATTENTION | QK_NORMS | MLP | EXPERTS | {"post_attention_norm": "post_attention_layernorm"})

FAMILY = Family(
    releases="GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7",
    oracle="transformers, its MtpModel for the head",
    config=read_config,
    layer=decoder_layer,
    naming=NAMING,
    mtp=HEAD,
    gguf=GgufSpec(
        GgufNames("glm4moe", _LAYER | EXPERTS_BIAS, joins_in_layers=True),
        "glm4_moe",
        "Glm4MoeForCausalLM",
        fields=_fields,
        keys=_keys,
        runs_head=True,
    ),
)
