"""What families' configs have in common. What is one family's alone is read in its own file."""

from collections.abc import Callable, Mapping
from typing import Any

from headlong.errors import ConfigError
from headlong.layers.attention import AttentionConfig
from headlong.models.config import FULL, MAX_LAYERS, SLIDING, ModelConfig
from headlong.models.fields import Fields
from headlong.models.rope_fields import rope


def decoder(
    f: Fields, attention: AttentionConfig, *, rotary_part: float, max_position: int, **own: Any
) -> ModelConfig:
    """What is read alike in every family, and a family's `own` fields. `rotary_part` of the head is rotated and
    `max_position` tokens are read where the config does not say."""
    max_position = f.int("max_position_embeddings", max_position, high=1 << 30)
    turned = rope(f, attention.head_dim, rotary_part, max_position)
    return ModelConfig(
        vocab_size=f.int("vocab_size"),
        hidden_size=attention.hidden_size,
        eps=attention.eps,
        max_position=max_position,
        rope_theta=turned.theta,
        rotary_dim=turned.rotary_dim,
        rope_scaling=turned.scaling,
        rope_sections=turned.sections,
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
        eps=norm_eps(f),
        **own,
    )


def norm_eps(f: Fields) -> float:
    return f.float("rms_norm_eps", 1e-6, low=0.0, high=1.0)


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
    """Every layer attends to all that came before."""
    return _layer_types(f, lambda _: FULL, (FULL,))


def sliding_layers(
    f: Fields, window: int | None, is_sliding: Callable[[int], bool] = lambda _: True
) -> dict[str, Any]:
    """The fields of a model with a window or without: which layers attend through it the config says or, where it does
    not, `is_sliding` of a layer's number."""
    types = _layer_types(
        f, lambda i: SLIDING if window is not None and is_sliding(i) else FULL, (FULL, SLIDING)
    )
    if SLIDING not in types:
        return {"layer_types": types}
    if window is None:
        raise ConfigError(
            f"{f.where}: layer_types has {SLIDING!r}, but there is no sliding_window that is in use; give one"
        )
    return {"layer_types": types, "window": window}


def switched_window(f: Fields) -> int | None:
    """The window of families that can switch it off, and mostly do."""
    return sliding_window(f) if f.bool("use_sliding_window", False) else None


def sliding_window(f: Fields) -> int | None:
    return f.int("sliding_window", high=1 << 30) if "sliding_window" in f.data else None


def _layer_types(f: Fields, usual: Callable[[int], str], known: tuple[str, ...]) -> tuple[str, ...]:
    count = f.int("num_hidden_layers", high=MAX_LAYERS)
    types = f.data.get("layer_types", [usual(i) for i in range(count)])
    if not isinstance(types, list) or len(types) != count:
        raise ConfigError(f"{f.where}: layer_types must list {count} entries, not {types!r}")
    if other := [kind for kind in types if kind not in known]:
        raise ConfigError(
            f"{f.where}: layer_types: {other[0]!r} is not supported, only {' and '.join(map(repr, known))}"
        )
    return tuple(types)


def check_divides(f: Fields, name: str, small: int, big: int) -> None:
    if big % small:
        raise ConfigError(f"{f.where}: {name} ({small}) must divide the number of heads it serves ({big})")


def _token_ids(value: object, where: str) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ConfigError(f"{where}: eos_token_id must be a token id or a list of them, not {value!r}")
    return tuple(ids)  # type: ignore[arg-type]
