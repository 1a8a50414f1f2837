"""A checkpoint's config.json as the few numbers a model needs, checked before anything is built.

Reads the Qwen3.5 and Qwen3-Next families, alone or inside the multimodal wrapper. Knows no tensors.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headlong.errors import ConfigError
from headlong.layers.attention import AttentionConfig
from headlong.layers.delta_net import DeltaNetConfig
from headlong.layers.mlp import MoeConfig

FULL, LINEAR = "full_attention", "linear_attention"


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a hybrid decoder. `moe` is None in dense models; `dense_layers` have a plain MLP all the same."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    eps: float
    max_position: int
    tied: bool
    rope_theta: float
    rotary_dim: int
    attention: AttentionConfig
    delta_net: DeltaNetConfig
    moe: MoeConfig | None
    dense_layers: frozenset[int]
    eos_token_ids: tuple[int, ...]


class _Fields:
    """Typed reads from a config that may be hostile; every complaint names the field."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def int(self, name: str, default: int | None = None, *, low: int = 1, high: int = 1 << 24) -> int:
        value = self.data.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(
                f"{self.where}: {name} must be a whole number from {low} to {high}, not {value!r}"
            )
        return value

    def float(self, name: str, default: float, *, low: float, high: float) -> float:
        value = self.data.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ConfigError(f"{self.where}: {name} must be a finite number, not {value!r}")
        if not low < value <= high:
            raise ConfigError(
                f"{self.where}: {name} must be above {low:g} and at most {high:g}, not {value!r}"
            )
        return float(value)

    def bool(self, name: str, default: bool) -> bool:
        value = self.data.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {name} must be true or false, not {value!r}")
        return value


def parse(config: Mapping[str, Any], *, moe: bool, interleaved: bool) -> ModelConfig:
    """`interleaved` is Qwen3-Next's layout of the DeltaNet projections."""
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise ConfigError(f"config.json: text_config must be an object, not {text!r}")
    f = _Fields(text, "config.json: text_config" if text is not config else "config.json")
    hidden, heads = f.int("hidden_size"), f.int("num_attention_heads")
    head_dim, kv_heads = f.int("head_dim", 256), f.int("num_key_value_heads")
    eps = f.float("rms_norm_eps", 1e-6, low=0.0, high=1.0)
    key_heads, value_heads = f.int("linear_num_key_heads", 16), f.int("linear_num_value_heads", 32)
    for name, big, small in (
        ("num_key_value_heads", heads, kv_heads),
        ("linear_num_key_heads", value_heads, key_heads),
    ):
        if big % small:
            raise ConfigError(
                f"{f.where}: {name} ({small}) must divide the number of heads it serves ({big})"
            )
    if text.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{f.where}: hidden_act {text['hidden_act']!r} is not supported, only 'silu'")
    if not f.bool("attn_output_gate", True):
        raise ConfigError(
            f"{f.where}: attn_output_gate false is not supported: this family gates its attention"
        )
    layer_types = _layer_types(f)
    theta, rotary_dim = _rope(f, head_dim)
    return ModelConfig(
        model_type=str(config.get("model_type")),
        vocab_size=f.int("vocab_size"),
        hidden_size=hidden,
        intermediate_size=f.int("intermediate_size", hidden) if moe else f.int("intermediate_size"),
        layer_types=layer_types,
        eps=eps,
        max_position=f.int("max_position_embeddings", 32768, high=1 << 30),
        tied=_Fields(config, "config.json").bool("tie_word_embeddings", f.bool("tie_word_embeddings", False)),
        rope_theta=theta,
        rotary_dim=rotary_dim,
        attention=AttentionConfig(hidden, heads, kv_heads, head_dim, eps, f.bool("attention_bias", False)),
        delta_net=DeltaNetConfig(
            hidden_size=hidden,
            num_key_heads=key_heads,
            num_value_heads=value_heads,
            key_dim=f.int("linear_key_head_dim", 128),
            value_dim=f.int("linear_value_head_dim", 128),
            conv_kernel=f.int("linear_conv_kernel_dim", 4, low=2, high=64),
            eps=eps,
            interleaved=interleaved,
        ),
        moe=_moe(f, hidden, normalise_always=not interleaved) if moe else None,
        dense_layers=_dense_layers(f, len(layer_types)) if moe else frozenset(),
        eos_token_ids=_token_ids(text.get("eos_token_id"), f.where),
    )


def _layer_types(f: _Fields) -> tuple[str, ...]:
    count = f.int("num_hidden_layers", high=4096)
    types = f.data.get("layer_types")
    if types is None:
        interval = f.int("full_attention_interval", 4)
        return tuple(FULL if (i + 1) % interval == 0 else LINEAR for i in range(count))
    if not isinstance(types, list) or len(types) != count or any(t not in (FULL, LINEAR) for t in types):
        raise ConfigError(f"{f.where}: layer_types must list {count} entries, each {FULL!r} or {LINEAR!r}")
    return tuple(types)


def _rope(f: _Fields, head_dim: int) -> tuple[float, int]:
    """Text positions are one-dimensional, so multimodal rotary sections change nothing here."""
    rope = f.data.get("rope_parameters") or f.data.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"{f.where}: rope_parameters must be an object, not {rope!r}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise ConfigError(f"{f.where}: rope_type {kind!r} is not supported, only 'default'")
    merged = _Fields({**f.data, **rope}, f"{f.where}: rope_parameters")
    theta = merged.float("rope_theta", 10000.0, low=0.0, high=1e12)
    rotary_dim = int(head_dim * merged.float("partial_rotary_factor", 0.25, low=0.0, high=1.0))
    if rotary_dim < 2 or rotary_dim % 2:
        raise ConfigError(
            f"{f.where}: partial_rotary_factor leaves {rotary_dim} rotary dimensions; needs an even number"
        )
    return theta, rotary_dim


def _moe(f: _Fields, hidden: int, *, normalise_always: bool) -> MoeConfig:
    experts, active = f.int("num_experts"), f.int("num_experts_per_tok")
    if active > experts:
        raise ConfigError(f"{f.where}: num_experts_per_tok ({active}) is above num_experts ({experts})")
    return MoeConfig(
        hidden_size=hidden,
        num_experts=experts,
        num_active=active,
        intermediate_size=f.int("moe_intermediate_size"),
        shared_intermediate_size=f.int("shared_expert_intermediate_size"),
        normalise=normalise_always or f.bool("norm_topk_prob", True),
    )


def _dense_layers(f: _Fields, count: int) -> frozenset[int]:
    only = f.data.get("mlp_only_layers") or []
    step = f.int("decoder_sparse_step", 1)
    if not isinstance(only, list) or not all(isinstance(i, int) for i in only):
        raise ConfigError(f"{f.where}: mlp_only_layers must be a list of layer numbers, not {only!r}")
    return frozenset(i for i in range(count) if i in only or (i + 1) % step)


def _token_ids(value: object, where: str) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ConfigError(f"{where}: eos_token_id must be a token id or a list of them, not {value!r}")
    return tuple(ids)  # type: ignore[arg-type]
