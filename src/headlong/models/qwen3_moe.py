"""Qwen3-MoE: the attention of Qwen3, and experts with softmax scores in every layer that does not say otherwise."""

from collections.abc import Mapping
from typing import Any

from headlong.checkpoint.gguf_config import Keys
from headlong.checkpoint.gguf_names import ATTENTION, EXPERTS, MLP_NORM, QK_NORMS, GgufNames, suffixed
from headlong.errors import CheckpointError
from headlong.models.config import ModelConfig
from headlong.models.config_fields import sliding_layers, switched_window, without_nulls
from headlong.models.dense import decoder_layer, dense
from headlong.models.experts import expert_keys, layers_without_experts, softmax_experts, softmax_fields
from headlong.models.family import Family
from headlong.models.fields import Fields
from headlong.models.gguf import GgufSpec, Tensors
from headlong.models.qwen3 import attention_of


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    f = Fields(without_nulls(config), "config.json")
    layers = sliding_layers(f, switched_window(f))
    return dense(
        f,
        attention_of(f),
        max_position=32768,
        **layers,
        moe=softmax_experts(f, normalise=f.bool("norm_topk_prob", False), shared=False),
        dense_layers=layers_without_experts(f, len(layers["layer_types"])),
    )


def _fields(keys: Keys, tensors: Tensors, num_layers: int) -> dict[str, Any]:  # noqa: ARG001 - keys say it all
    """Who reads such files divides weights by their sum."""
    sizes = {"intermediate_size": keys.int("feed_forward_length", keys.int("expert_feed_forward_length"))}
    return sizes | softmax_fields(keys) | {"norm_topk_prob": True}


def _keys(config: ModelConfig, text: Mapping[str, Any], head_layers: int) -> dict[str, Any]:  # noqa: ARG001 - no head
    assert config.moe is not None
    if config.dense_layers:
        raise CheckpointError("config.json: some layers have no experts, which a qwen3moe GGUF cannot say")
    if not config.moe.routing.normalise:
        raise CheckpointError("config.json: norm_topk_prob false is nothing that a qwen3moe GGUF can say")
    return expert_keys(config) | {"feed_forward_length": config.intermediate_size}


FAMILY = Family(
    releases="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
    config=read_config,
    layer=decoder_layer,
    gguf=GgufSpec(
        GgufNames("qwen3moe", suffixed(ATTENTION | QK_NORMS | EXPERTS | MLP_NORM)),
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        fields=_fields,
        keys=_keys,
    ),
)
