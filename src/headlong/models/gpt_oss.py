"""gpt-oss: layers that attend through a window and to all by turns, with sinks, and experts with biases and a clamped
activation in every layer. Releases have the experts in MXFP4; gates and ups take turns there."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from headlong.checkpoint.gguf_config import Keys
from headlong.checkpoint.gguf_names import ATTENTION, EXPERTS, SINKS, GgufNames, suffixed
from headlong.checkpoint.names import Naming
from headlong.checkpoint.transforms import (
    IDENTITY,
    INTERLEAVED,
    TRANSPOSED,
    TRANSPOSED_INTERLEAVED,
    Transform,
)
from headlong.errors import CheckpointError
from headlong.layers.mlp import MoeConfig
from headlong.models.config import FULL, SLIDING, ModelConfig
from headlong.models.config_fields import attention, sliding_layers, sliding_window, without_nulls
from headlong.models.dense import decoder_layer, dense
from headlong.models.experts import expert_counts, expert_keys
from headlong.models.family import Family
from headlong.models.fields import Fields
from headlong.models.gguf import GgufSpec, Tensors, usual_head_keys, usual_heads
from headlong.ops.moe.routing import Routing
from headlong.ops.silu_mul.activation import Activation

ALPHA, LIMIT = 1.702, 7.0
"""What releases have, and GGUF files take for granted."""
USUAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_PACKED_GATE_UP = re.compile(r".*\.mlp\.experts\.gate_up_proj_(blocks|scales|bias)")


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    given = without_nulls(config)
    rope = given.get("rope_parameters") or given.get("rope_scaling") or USUAL_ROPE
    f = Fields({"rope_theta": USUAL_ROPE["rope_theta"], **given, "rope_parameters": rope}, "config.json")
    bias = f.bool("attention_bias", True)
    kv_heads = f.int("num_key_value_heads", f.int("num_attention_heads"))
    own = {"bias": bias, "out_bias": bias, "gated": False, "normed": False, "sinks": True}
    return dense(
        f,
        attention(f, f.int("head_dim", 64), kv_heads, **own),
        max_position=131072,
        moe=_experts(f),
        **sliding_layers(f, sliding_window(f), _usually_slides),
    )


def _usually_slides(index: int) -> bool:
    return index % 2 == 0


def _experts(f: Fields) -> MoeConfig:
    count, active = expert_counts(f, "num_local_experts")
    alpha = f.float("swiglu_alpha", ALPHA, low=0.0, high=1e3)
    return MoeConfig(
        hidden_size=f.int("hidden_size"),
        routing=Routing(count, active),
        intermediate_size=f.int("intermediate_size"),
        activation=Activation(alpha, f.float("swiglu_limit", LIMIT, low=0.0, high=1e6), plus=1.0),
        biased=True,
    )


def _stored(name: str) -> Transform:
    if _PACKED_GATE_UP.fullmatch(name):
        return INTERLEAVED
    if name.endswith(".mlp.experts.gate_up_proj"):
        return TRANSPOSED_INTERLEAVED
    return TRANSPOSED if name.endswith(".mlp.experts.down_proj") else IDENTITY


def _fields(keys: Keys, tensors: Tensors, num_layers: int) -> dict[str, Any]:  # noqa: ARG001 - keys say it all
    count = keys.int("expert_count")
    return {
        "intermediate_size": keys.int("expert_feed_forward_length"),
        "num_local_experts": count,
        "num_experts_per_tok": keys.int("expert_used_count", high=count),
        "sliding_window": keys.int("attention.sliding_window", high=1 << 30),
        "layer_types": [SLIDING if _usually_slides(i) else FULL for i in range(num_layers)],
    }


def _keys(config: ModelConfig, text: Mapping[str, Any], head_layers: int) -> dict[str, Any]:  # noqa: ARG001 - as it is
    types, moe = config.layer_types, config.moe
    assert moe is not None
    if any((kind == SLIDING) != _usually_slides(i) for i, kind in enumerate(types)) or config.window is None:
        raise CheckpointError(
            "config.json: layer_types: GGUF can say of a gpt-oss that every other layer slides, the first one too, "
            "nothing else"
        )
    if moe.activation != Activation(ALPHA, LIMIT, 1.0):
        raise CheckpointError(
            f"config.json: swiglu_alpha, swiglu_limit: GGUF has no keys for others than {ALPHA} and {LIMIT}"
        )
    return expert_keys(config) | {"attention.sliding_window": config.window}


_LAYER = suffixed(ATTENTION | EXPERTS | {"post_attention_norm": "post_attention_layernorm"}) | SINKS

FAMILY = Family(
    releases="gpt-oss-20b, gpt-oss-120b",
    config=read_config,
    layer=decoder_layer,
    naming=Naming(router="router", stored=_stored),
    gguf=GgufSpec(
        GgufNames("gpt-oss", _LAYER),
        "gpt_oss",
        "GptOssForCausalLM",
        fields=_fields,
        keys=_keys,
        windows=True,
        heads=partial(usual_heads, truncate=False),
        head_keys=partial(usual_head_keys, truncate=False),
    ),
)
