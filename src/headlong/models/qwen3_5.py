"""Qwen3.5, Qwen3.5-MoE and Qwen3-Next: Gated DeltaNet layers with a gated attention layer now and then.

A config is that of the text model, or has one inside (the multimodal form). All norms but the DeltaNet's own are stored
as w where 1 + w is meant. Qwen3-Next stores the DeltaNet's projections interleaved, key head by key head.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from headlong.checkpoint.gguf_config import Keys, short
from headlong.checkpoint.gguf_names import ATTENTION, EXPERTS, MLP, QK_NORMS, GgufNames, suffixed
from headlong.checkpoint.names import Naming
from headlong.checkpoint.transforms import (
    AS_IS,
    CONV,
    IDENTITY,
    LOG_DECAY,
    MLX_CONV,
    NORM,
    SHARED_GATE,
    Order,
    Shape,
    Transform,
    tiled_row_order,
)
from headlong.errors import CheckpointError, ConfigError
from headlong.layers.attention import Attention
from headlong.layers.decoder import DecoderLayer
from headlong.layers.delta_net import DeltaNetConfig, GatedDeltaNet
from headlong.layers.weights import Scope
from headlong.models.config import FULL, LINEAR, MAX_LAYERS, ModelConfig
from headlong.models.config_fields import attention, check_divides, decoder
from headlong.models.experts import (
    expert_keys,
    feed_forward,
    layers_without_experts,
    softmax_experts,
    softmax_fields,
)
from headlong.models.family import Family
from headlong.models.fields import Fields
from headlong.models.gguf import GgufSpec, Tensors


def read_config(config: Mapping[str, Any], *, moe: bool, interleaved: bool) -> ModelConfig:
    """`interleaved` is Qwen3-Next's layout of the DeltaNet projections."""
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise ConfigError(f"config.json: text_config must be an object, not {text!r}")
    f = Fields(text, "config.json: text_config" if text is not config else "config.json")
    hidden = f.int("hidden_size")
    bias = f.bool("attention_bias", False)
    head_dim, kv_heads = f.int("head_dim", 256), f.int("num_key_value_heads")
    sizes = attention(f, head_dim, kv_heads, bias=bias, out_bias=bias)
    if not f.bool("attn_output_gate", True):
        raise ConfigError(
            f"{f.where}: attn_output_gate false is not supported: this family gates its attention"
        )
    layer_types = _layer_types(f)
    normalise = not interleaved or f.bool("norm_topk_prob", True)
    return decoder(
        f,
        sizes,
        rotary_part=0.25,
        max_position=32768,
        model_type=str(config.get("model_type")),
        intermediate_size=f.int("intermediate_size", hidden) if moe else f.int("intermediate_size"),
        layer_types=layer_types,
        tied=Fields(config, "config.json").bool("tie_word_embeddings", f.bool("tie_word_embeddings", False)),
        delta_net=_delta_net(f, hidden, sizes.eps, interleaved=interleaved),
        moe=softmax_experts(f, normalise=normalise, shared=True) if moe else None,
        dense_layers=layers_without_experts(f, len(layer_types)) if moe else frozenset(),
    )


def _delta_net(f: Fields, hidden: int, eps: float, *, interleaved: bool) -> DeltaNetConfig:
    key_heads, value_heads = f.int("linear_num_key_heads", 16), f.int("linear_num_value_heads", 32)
    check_divides(f, "linear_num_key_heads", key_heads, value_heads)
    tiled = f.bool("linear_value_heads_tiled", False)
    if tiled and interleaved:
        raise ConfigError(
            f"{f.where}: linear_value_heads_tiled is not supported: this family stores value heads by key head"
        )
    return DeltaNetConfig(
        hidden_size=hidden,
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=f.int("linear_key_head_dim", 128),
        value_dim=f.int("linear_value_head_dim", 128),
        conv_kernel=f.int("linear_conv_kernel_dim", 4, low=2, high=64),
        eps=eps,
        interleaved=interleaved,
        tiled=tiled,
    )


def _layer_types(f: Fields) -> tuple[str, ...]:
    count = f.int("num_hidden_layers", high=MAX_LAYERS)
    types = f.data.get("layer_types")
    if types is None:
        interval = f.int("full_attention_interval", 4)
        return tuple(FULL if (i + 1) % interval == 0 else LINEAR for i in range(count))
    if not isinstance(types, list) or len(types) != count or any(t not in (FULL, LINEAR) for t in types):
        raise ConfigError(f"{f.where}: layer_types must list {count} entries, each {FULL!r} or {LINEAR!r}")
    return tuple(types)


def decoder_layer(config: ModelConfig, index: int | None, scope: Scope) -> DecoderLayer:
    """The head's block is a full-attention layer, and in a model of experts never a dense one."""
    hidden = config.hidden_size
    if index is None or config.layer_types[index] == FULL:
        mixer = Attention(config.attention, scope("self_attn"))
    else:
        assert config.delta_net is not None
        mixer = GatedDeltaNet(config.delta_net, scope("linear_attn"))
    mlp, name = feed_forward(config, index, scope), scope.prefix.rstrip(".")
    return DecoderLayer(name, mixer, mlp, scope, hidden, config.eps, centred=config.centred_norms)


def _is_norm(name: str) -> bool:
    """One that is stored around zero."""
    module, _, last = name.rpartition(".")
    kind = module.rpartition(".")[2]
    named = kind.endswith("norm") or kind.startswith("pre_fc_norm_")
    return named and last == "weight" and not module.endswith("linear_attn.norm")


def _stored_by_mlx(name: str, stored: Shape) -> Transform:
    """Norms with 1 added, convolutions with the taps in the middle."""
    if name.endswith("conv1d.weight"):
        return MLX_CONV
    return NORM if len(stored) == 1 and _is_norm(name) else IDENTITY


def _stored_in_gguf(name: str) -> Transform:
    module, _, last = name.rpartition(".")
    if last == "A_log":
        return LOG_DECAY
    if module.endswith("linear_attn.conv1d"):
        return CONV
    if module.endswith("mlp.shared_expert_gate"):
        return SHARED_GATE
    return NORM if _is_norm(name) else IDENTITY


_LINEAR_ATTENTION = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_BARE = {
    # Whole names: these have no `.weight`, or not the same one on both sides.
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
}
_VALUE_ROWS = re.compile(
    r"layers\.\d+\.linear_attn\.(in_proj_z|in_proj_a|in_proj_b|A_log|dt_bias)(\.weight)?"
)
_MIXED_ROWS = re.compile(r"layers\.\d+\.linear_attn\.(in_proj_qkv|conv1d)\.weight")
_VALUE_COLUMNS = re.compile(r"layers\.\d+\.linear_attn\.out_proj\.weight")


def _order(name: str, config: ModelConfig) -> Order:
    """How tiled value heads, as GGUF has them, are put back into groups."""
    c = config.delta_net
    if c is None or c.num_value_heads == c.num_key_heads:
        return AS_IS
    if match := _VALUE_ROWS.fullmatch(name):
        per_head = c.value_dim if match[1] == "in_proj_z" else 1
        return Order(rows=tiled_row_order(c.num_key_heads, c.num_value_heads, per_head))
    values = tiled_row_order(c.num_key_heads, c.num_value_heads, c.value_dim)
    if _MIXED_ROWS.fullmatch(name):
        before = 2 * c.num_key_heads * c.key_dim
        return Order(rows=torch.cat([torch.arange(before), before + values]))
    return Order(columns=values) if _VALUE_COLUMNS.fullmatch(name) else AS_IS


def _fields(keys: Keys, tensors: Tensors, num_layers: int) -> dict[str, Any]:  # noqa: ARG001 - sizes say it all
    key_heads = keys.int("ssm.group_count")
    value_heads = keys.int("ssm.time_step_rank")
    inner = keys.int("ssm.inner_size")
    if value_heads % key_heads:
        raise keys.fault(
            "ssm.time_step_rank", f"must be a multiple of ssm.group_count ({key_heads}), not {value_heads}"
        )
    if inner % value_heads:
        raise keys.fault(
            "ssm.inner_size", f"must be a multiple of ssm.time_step_rank ({value_heads}), not {inner}"
        )
    fields: dict[str, Any] = {
        "attn_output_gate": True,
        "layer_types": _stored_layer_types(keys, num_layers),
        "linear_conv_kernel_dim": keys.int("ssm.conv_kernel", low=2, high=64),
        "linear_key_head_dim": keys.int("ssm.state_size"),
        "linear_value_head_dim": inner // value_heads,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
    }
    if value_heads > key_heads:
        fields["linear_value_heads_tiled"] = True
    if keys.arch == "qwen35":
        return fields | {"intermediate_size": keys.int("feed_forward_length")}
    return (
        fields
        | softmax_fields(keys)
        | {
            "shared_expert_intermediate_size": keys.int("expert_shared_feed_forward_length"),
        }
    )


def _stored_layer_types(keys: Keys, num_layers: int) -> list[str]:
    name = "attention.recurrent_layers"
    if keys.has(name):
        flags = keys.metadata[f"{keys.arch}.{name}"]
        # Blocks of the head may be listed too.
        if not isinstance(flags, list) or len(flags) < num_layers or not all(type(f) is bool for f in flags):
            raise keys.fault(
                name, f"must be a truth value for each of {num_layers} layers, not {short(flags)}"
            )
        return [LINEAR if recurrent else FULL for recurrent in flags[:num_layers]]
    interval = keys.int("full_attention_interval", 4)
    return [FULL if (i + 1) % interval == 0 else LINEAR for i in range(num_layers)]


def _keys(config: ModelConfig, text: Mapping[str, Any], head_layers: int) -> dict[str, Any]:
    c, moe = config.delta_net, config.moe
    assert c is not None
    if config.dense_layers:
        raise CheckpointError(
            "config.json: some layers have no experts, which GGUF cannot say of this family"
        )
    fields: dict[str, Any] = {"feed_forward_length": config.intermediate_size}
    if moe is not None:
        fields = expert_keys(config) | {
            "expert_shared_feed_forward_length": moe.shared_intermediate_size,
        }
    fields |= {
        "rope.dimension_sections": [*(config.rope_sections or _rope_sections(config.rotary_dim // 2)), 0],
        "ssm.conv_kernel": c.conv_kernel,
        "ssm.state_size": c.key_dim,
        "ssm.group_count": c.num_key_heads,
        "ssm.time_step_rank": c.num_value_heads,
        "ssm.inner_size": c.num_value_heads * c.value_dim,
    }
    types, given = config.layer_types, text.get("full_attention_interval")
    interval = given or (types.index(FULL) + 1 if FULL in types else 4)
    if list(types) == [FULL if (i + 1) % interval == 0 else LINEAR for i in range(len(types))]:
        return fields | {"full_attention_interval": interval}
    recurrent = [kind == LINEAR for kind in types] + [False] * head_layers
    return fields | {"attention.recurrent_layers": recurrent}


def _rope_sections(pairs: int) -> list[int]:
    """How many pairs turn with each coordinate of a multimodal position, taking turns: 11, 11, 10 of 32. Of no effect
    on text, but llama.cpp asks for them, and turns by nothing a pair that belongs to none."""
    return [(pairs + 2 - i) // 3 for i in range(3)]


_NAMING = Naming(mlx=_stored_by_mlx)
_ORACLE = "transformers, a slow head on its layer"
_gguf = partial(GgufSpec, fields=_fields, keys=_keys, order=_order, runs_head=True)
_LAYER = suffixed(ATTENTION | QK_NORMS | MLP | _LINEAR_ATTENTION)

DENSE = Family(
    releases="Qwen3.5, 3.6 and 3.8, dense",
    oracle=_ORACLE,
    config=partial(read_config, moe=False, interleaved=False),
    layer=decoder_layer,
    naming=_NAMING,
    gguf=_gguf(GgufNames("qwen35", _LAYER | _BARE, _stored_in_gguf), "qwen3_5_text", "Qwen3_5ForCausalLM"),
)
MOE = Family(
    releases="Qwen3.5, 3.6 and 3.8 with experts, as 35B-A3B",
    oracle=_ORACLE,
    config=partial(read_config, moe=True, interleaved=False),
    layer=decoder_layer,
    naming=_NAMING,
    gguf=_gguf(
        GgufNames("qwen35moe", _LAYER | suffixed(EXPERTS) | _BARE, _stored_in_gguf),
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
    ),
)
NEXT = Family(
    releases="Qwen3-Next-80B-A3B",
    oracle=_ORACLE,
    config=partial(read_config, moe=True, interleaved=True),
    layer=decoder_layer,
    naming=_NAMING,
)
