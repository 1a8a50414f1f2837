"""Typed reads of a config.json, and the parts that families have in common. A config may be hostile: every complaint
names the field. What is one family's alone is read in its own file."""

import math
from collections.abc import Mapping
from typing import Any

from headlong.errors import ConfigError
from headlong.layers.attention import AttentionConfig
from headlong.models.config import FULL, MAX_LAYERS, ModelConfig
from headlong.ops.rope.reference import Llama3Scaling


class Fields:
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


def decoder(
    f: Fields, attention: AttentionConfig, *, rotary_part: float, max_position: int, **own: Any
) -> ModelConfig:
    """What is read alike in every family, and a family's `own` fields. `rotary_part` of the head is rotated and
    `max_position` tokens are read where the config does not say."""
    theta, rotary_dim, scaling, sections = rope(f, attention.head_dim, rotary_part)
    return ModelConfig(
        vocab_size=f.int("vocab_size"),
        hidden_size=attention.hidden_size,
        eps=attention.eps,
        max_position=f.int("max_position_embeddings", max_position, high=1 << 30),
        rope_theta=theta,
        rotary_dim=rotary_dim,
        rope_scaling=scaling,
        rope_sections=sections,
        attention=attention,
        eos_token_ids=_token_ids(f.data.get("eos_token_id"), f.where),
        **own,
    )


def attention(f: Fields, head_dim: int, kv_heads: int, **own: bool) -> AttentionConfig:
    """`own` are a family's own: whether there are gates, norms and biases."""
    heads = f.int("num_attention_heads")
    check_divides(f, "num_key_value_heads", kv_heads, heads)
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
        **own,
    )


def without_nulls(config: Mapping[str, Any]) -> dict[str, Any]:
    """Older configs write null where they mean the default."""
    return {name: value for name, value in config.items() if value is not None}


def divided_head_dim(f: Fields) -> int:
    """Where the config does not say it, heads divide the hidden size."""
    hidden, heads = f.int("hidden_size"), f.int("num_attention_heads")
    if "head_dim" not in f.data and hidden % heads:
        raise ConfigError(
            f"{f.where}: num_attention_heads ({heads}) must divide hidden_size ({hidden}) where head_dim is missing"
        )
    return f.int("head_dim", hidden // heads)


def full_layers(f: Fields) -> tuple[str, ...]:
    """Every layer attends to all that came before. A config that switches its sliding window on is refused; many name
    one that is off."""
    count = f.int("num_hidden_layers", high=MAX_LAYERS)
    types = f.data.get("layer_types", [FULL] * count)
    if not isinstance(types, list) or len(types) != count:
        raise ConfigError(f"{f.where}: layer_types must list {count} entries, not {types!r}")
    sliding = f.bool("use_sliding_window", False) and f.int("max_window_layers", 28, low=0) < count
    if "sliding_window" in f.data and sliding:
        raise ConfigError(
            f"{f.where}: use_sliding_window true is not supported, only attention to all tokens"
        )
    if any(kind != FULL for kind in types):
        other = next(kind for kind in types if kind != FULL)
        raise ConfigError(f"{f.where}: layer_types: {other!r} is not supported, only {FULL!r}")
    return (FULL,) * count


def check_divides(f: Fields, name: str, small: int, big: int) -> None:
    if big % small:
        raise ConfigError(f"{f.where}: {name} ({small}) must divide the number of heads it serves ({big})")


def rope(
    f: Fields, head_dim: int, rotary_part: float
) -> tuple[float, int, Llama3Scaling | None, tuple[int, ...]]:
    """The base of the rotation, how many dimensions of a head it turns, its scaling, and its sections."""
    rope = f.data.get("rope_parameters") or f.data.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"{f.where}: rope_parameters must be an object, not {rope!r}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "mrope", "llama3"):
        raise ConfigError(f"{f.where}: rope_type {kind!r} is not supported, only 'default' and 'llama3'")
    merged = Fields({**f.data, **rope}, f"{f.where}: rope_parameters")
    theta = merged.float("rope_theta", 10000.0, low=0.0, high=1e12)
    rotary_dim = int(head_dim * merged.float("partial_rotary_factor", rotary_part, low=0.0, high=1.0))
    if rotary_dim < 2 or rotary_dim % 2:
        raise ConfigError(
            f"{f.where}: partial_rotary_factor leaves {rotary_dim} rotary dimensions; needs an even number"
        )
    scaling = _llama3_scaling(merged) if kind == "llama3" else None
    return theta, rotary_dim, scaling, _rope_sections(merged, rotary_dim // 2)


def _rope_sections(f: Fields, num_frequencies: int) -> tuple[int, ...]:
    """How many frequencies each of a token's positions turns; empty where tokens have one position alone. Where they
    follow each other in runs instead of taking turns, no op knows the layout: then only text, whose positions are all
    equal, may be read, and sections are checked and dropped."""
    sections = f.data.get("mrope_section")
    if sections is None:
        return ()
    counts = [n for n in sections if type(n) is int and n >= 0] if isinstance(sections, list) else []
    if not counts or counts != sections or sum(counts) != num_frequencies:
        raise ConfigError(
            f"{f.where}: mrope_section must list how many of the {num_frequencies} rotary frequencies each position "
            f"of a token turns, in sum {num_frequencies}, not {sections!r}"
        )
    return tuple(counts) if f.bool("mrope_interleaved", True) else ()


def _llama3_scaling(f: Fields) -> Llama3Scaling:
    low, high = (f.float(f"{end}_freq_factor", low=0.0, high=1e6) for end in ("low", "high"))
    if not low < high:
        raise ConfigError(f"{f.where}: high_freq_factor ({high:g}) must be above low_freq_factor ({low:g})")
    original = f.int("original_max_position_embeddings", high=1 << 30)
    return Llama3Scaling(f.float("factor", low=0.0, high=1e6), low, high, original)


def _token_ids(value: object, where: str) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ConfigError(f"{where}: eos_token_id must be a token id or a list of them, not {value!r}")
    return tuple(ids)  # type: ignore[arg-type]
