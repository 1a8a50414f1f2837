"""A checkpoint's config.json as the few numbers a model needs, checked before anything is built.

Reads the Qwen3.5 and Qwen3-Next families, alone or inside the multimodal wrapper, and Llama. Knows no tensors.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headlong.errors import ConfigError
from headlong.layers.attention import AttentionConfig
from headlong.layers.delta_net import DeltaNetConfig
from headlong.layers.mlp import MoeConfig
from headlong.ops.rope.reference import Llama3Scaling

FULL, LINEAR = "full_attention", "linear_attention"
MAX_LAYERS = 4096


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a decoder. `delta_net` is None where all layers are attention, `moe` in dense models; `dense_layers`
    have a plain MLP all the same. `centred_norms` are stored as w where 1 + w is meant."""

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
    rope_scaling: Llama3Scaling | None
    attention: AttentionConfig
    eos_token_ids: tuple[int, ...]
    delta_net: DeltaNetConfig | None = None
    moe: MoeConfig | None = None
    dense_layers: frozenset[int] = frozenset()
    mlp_bias: bool = False
    centred_norms: bool = True


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

    def float(self, name: str, default: float | None = None, *, low: float, high: float) -> float:
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


def parse_qwen(config: Mapping[str, Any], *, moe: bool, interleaved: bool) -> ModelConfig:
    """`interleaved` is Qwen3-Next's layout of the DeltaNet projections."""
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise ConfigError(f"config.json: text_config must be an object, not {text!r}")
    f = _Fields(text, "config.json: text_config" if text is not config else "config.json")
    hidden = f.int("hidden_size")
    attention = _attention(f, f.int("head_dim", 256), f.int("num_key_value_heads"))
    if not f.bool("attn_output_gate", True):
        raise ConfigError(
            f"{f.where}: attn_output_gate false is not supported: this family gates its attention"
        )
    layer_types = _layer_types(f)
    return _decoder(
        f,
        attention,
        rotary_part=0.25,
        max_position=32768,
        model_type=str(config.get("model_type")),
        intermediate_size=f.int("intermediate_size", hidden) if moe else f.int("intermediate_size"),
        layer_types=layer_types,
        tied=_Fields(config, "config.json").bool("tie_word_embeddings", f.bool("tie_word_embeddings", False)),
        delta_net=_delta_net(f, hidden, attention.eps, interleaved=interleaved),
        moe=_moe(f, hidden, normalise_always=not interleaved) if moe else None,
        dense_layers=_dense_layers(f, len(layer_types)) if moe else frozenset(),
    )


def parse_llama(config: Mapping[str, Any]) -> ModelConfig:
    # Older configs write null where they mean the default.
    f = _Fields({name: value for name, value in config.items() if value is not None}, "config.json")
    hidden, heads = f.int("hidden_size"), f.int("num_attention_heads")
    if "head_dim" not in f.data and hidden % heads:
        raise ConfigError(
            f"config.json: num_attention_heads ({heads}) must divide hidden_size ({hidden}) where head_dim is missing"
        )
    head_dim, kv_heads = f.int("head_dim", hidden // heads), f.int("num_key_value_heads", heads)
    return _decoder(
        f,
        _attention(f, head_dim, kv_heads, gated=False, normed=False),
        rotary_part=1.0,
        max_position=2048,
        model_type=str(config.get("model_type")),
        intermediate_size=f.int("intermediate_size"),
        layer_types=(FULL,) * f.int("num_hidden_layers", high=MAX_LAYERS),
        tied=f.bool("tie_word_embeddings", False),
        mlp_bias=f.bool("mlp_bias", False),
        centred_norms=False,
    )


def _decoder(
    f: _Fields, attention: AttentionConfig, *, rotary_part: float, max_position: int, **own: Any
) -> ModelConfig:
    """What is read alike in every family, and a family's `own` fields. `rotary_part` of the head is rotated and
    `max_position` tokens are read where the config does not say."""
    theta, rotary_dim, scaling = _rope(f, attention.head_dim, rotary_part)
    return ModelConfig(
        vocab_size=f.int("vocab_size"),
        hidden_size=attention.hidden_size,
        eps=attention.eps,
        max_position=f.int("max_position_embeddings", max_position, high=1 << 30),
        rope_theta=theta,
        rotary_dim=rotary_dim,
        rope_scaling=scaling,
        attention=attention,
        eos_token_ids=_token_ids(f.data.get("eos_token_id"), f.where),
        **own,
    )


def _attention(
    f: _Fields, head_dim: int, kv_heads: int, *, gated: bool = True, normed: bool = True
) -> AttentionConfig:
    heads = f.int("num_attention_heads")
    _check_divides(f, "num_key_value_heads", kv_heads, heads)
    if heads * head_dim > 1 << 24:
        raise ConfigError(
            f"{f.where}: num_attention_heads * head_dim must be at most {1 << 24}, not {heads * head_dim}"
        )
    if f.data.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{f.where}: hidden_act {f.data['hidden_act']!r} is not supported, only 'silu'")
    return AttentionConfig(
        hidden_size=f.int("hidden_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        eps=f.float("rms_norm_eps", 1e-6, low=0.0, high=1.0),
        bias=f.bool("attention_bias", False),
        gated=gated,
        normed=normed,
    )


def _delta_net(f: _Fields, hidden: int, eps: float, *, interleaved: bool) -> DeltaNetConfig:
    key_heads, value_heads = f.int("linear_num_key_heads", 16), f.int("linear_num_value_heads", 32)
    _check_divides(f, "linear_num_key_heads", key_heads, value_heads)
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


def _check_divides(f: _Fields, name: str, small: int, big: int) -> None:
    if big % small:
        raise ConfigError(f"{f.where}: {name} ({small}) must divide the number of heads it serves ({big})")


def _layer_types(f: _Fields) -> tuple[str, ...]:
    count = f.int("num_hidden_layers", high=MAX_LAYERS)
    types = f.data.get("layer_types")
    if types is None:
        interval = f.int("full_attention_interval", 4)
        return tuple(FULL if (i + 1) % interval == 0 else LINEAR for i in range(count))
    if not isinstance(types, list) or len(types) != count or any(t not in (FULL, LINEAR) for t in types):
        raise ConfigError(f"{f.where}: layer_types must list {count} entries, each {FULL!r} or {LINEAR!r}")
    return tuple(types)


def _rope(f: _Fields, head_dim: int, rotary_part: float) -> tuple[float, int, Llama3Scaling | None]:
    """Text positions are one-dimensional, so multimodal rotary sections change nothing here."""
    rope = f.data.get("rope_parameters") or f.data.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"{f.where}: rope_parameters must be an object, not {rope!r}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "mrope", "llama3"):
        raise ConfigError(f"{f.where}: rope_type {kind!r} is not supported, only 'default' and 'llama3'")
    merged = _Fields({**f.data, **rope}, f"{f.where}: rope_parameters")
    theta = merged.float("rope_theta", 10000.0, low=0.0, high=1e12)
    rotary_dim = int(head_dim * merged.float("partial_rotary_factor", rotary_part, low=0.0, high=1.0))
    if rotary_dim < 2 or rotary_dim % 2:
        raise ConfigError(
            f"{f.where}: partial_rotary_factor leaves {rotary_dim} rotary dimensions; needs an even number"
        )
    return theta, rotary_dim, _llama3_scaling(merged) if kind == "llama3" else None


def _llama3_scaling(f: _Fields) -> Llama3Scaling:
    low, high = (f.float(f"{end}_freq_factor", low=0.0, high=1e6) for end in ("low", "high"))
    if not low < high:
        raise ConfigError(f"{f.where}: high_freq_factor ({high:g}) must be above low_freq_factor ({low:g})")
    original = f.int("original_max_position_embeddings", high=1 << 30)
    return Llama3Scaling(f.float("factor", low=0.0, high=1e6), low, high, original)


def _moe(f: _Fields, hidden: int, *, normalise_always: bool) -> MoeConfig:
    experts, active = f.int("num_experts", high=1 << 14), f.int("num_experts_per_tok")
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
