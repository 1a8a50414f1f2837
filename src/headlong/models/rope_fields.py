"""How a config.json says that positions turn queries and keys: the base, the part of a head, scaling, sections.

Scalings whose frequencies follow the length of a sequence (`dynamic`, `longrope`) are pinned to one set for all of
them: else a token's bits would depend on tokens after it.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from headlong.errors import ConfigError
from headlong.models.fields import Fields
from headlong.ops.rope.scaling import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
)

UNSCALED = ("default", "mrope", "dynamic")
"""`dynamic` leaves frequencies alone up to the length that the model was trained on, which is the longest served."""
SCALED = ("linear", "llama3", "yarn", "longrope")
NEVER_NULL = ("rope_theta", "partial_rotary_factor")
"""Fields without which positions have no meaning; null elsewhere means the default."""


class Rope(NamedTuple):
    theta: float
    rotary_dim: int
    """How many dimensions of a head are turned."""
    scaling: RopeScaling | None
    sections: tuple[int, ...]
    """How many frequencies each of a token's positions turns; empty where tokens have one position alone."""


def rope(f: Fields, head_dim: int, rotary_part: float, max_position: int) -> Rope:
    """Reads them. `rotary_part` of a head is turned where the config does not say; `max_position` is the longest
    context."""
    rope = f.data.get("rope_parameters") or f.data.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"{f.where}: rope_parameters must be an object, not {rope!r}")
    way = rope.get("rope_type", rope.get("type", "default"))
    way = "longrope" if way == "su" else way  # its first name
    if way not in (*UNSCALED, *SCALED):
        known = ", ".join(repr(known) for known in (*UNSCALED, *SCALED))
        raise ConfigError(f"{f.where}: rope_type {way!r} is not supported, only {known}")
    given = {name: value for name, value in rope.items() if value is not None or name in NEVER_NULL}
    merged = Fields({**f.data, **given}, f"{f.where}: rope_parameters")
    theta = merged.float("rope_theta", 10000.0, low=0.0, high=1e12)
    rotary_dim = int(head_dim * merged.float("partial_rotary_factor", rotary_part, low=0.0, high=1.0))
    if rotary_dim < 2 or rotary_dim % 2:
        raise ConfigError(
            f"{f.where}: partial_rotary_factor leaves {rotary_dim} rotary dimensions; needs an even number"
        )
    return Rope(
        theta, rotary_dim, _scaling(way, merged, rotary_dim, max_position), _sections(merged, rotary_dim // 2)
    )


def _scaling(way: str, f: Fields, rotary_dim: int, max_position: int) -> RopeScaling | None:
    match way:
        case "linear":
            return LinearScaling(f.float("factor", low=0.0, high=1e6))
        case "llama3":
            return _llama3(f)
        case "yarn":
            return _yarn(f, max_position)
        case "longrope":
            return _longrope(f, rotary_dim, max_position)
    return None


def _llama3(f: Fields) -> Llama3Scaling:
    low, high = (f.float(f"{end}_freq_factor", low=0.0, high=1e6) for end in ("low", "high"))
    if not low < high:
        raise ConfigError(f"{f.where}: high_freq_factor ({high:g}) must be above low_freq_factor ({low:g})")
    return Llama3Scaling(f.float("factor", low=0.0, high=1e6), low, high, _original(f))


def _yarn(f: Fields, max_position: int) -> YarnScaling:
    original = _original(f)
    factor = f.float("factor", max_position / original, low=0.0, high=1e6)
    fast, slow = f.float("beta_fast", 32.0, low=0.0, high=1e6), f.float("beta_slow", 1.0, low=0.0, high=1e6)
    if slow > fast:
        raise ConfigError(f"{f.where}: beta_fast ({fast:g}) must not be below beta_slow ({slow:g})")
    mscale, of_all = (f.float(name, 0.0, low=-1.0, high=1e3) for name in ("mscale", "mscale_all_dim"))
    usual = (
        yarn_magnitude(factor, mscale) / yarn_magnitude(factor, of_all)
        if mscale and of_all
        else yarn_magnitude(factor, 1.0)
    )
    amplitude = f.float("attention_factor", usual, low=0.0, high=1e3)
    return YarnScaling(factor, original, fast, slow, amplitude, f.bool("truncate", True))


def yarn_magnitude(factor: float, mscale: float) -> float:
    """How much longer YaRN makes queries and keys together turn out to be, for the temperature of the softmax."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def softmax_magnitude(f: Fields) -> float:
    """What a config with `mscale_all_dim` stretches queries and keys by beside their rotation, each of them."""
    scaling, mscale = _softmax_scaling(f)
    return yarn_magnitude(scaling.float("factor", low=0.0, high=1e6), mscale) if mscale else 1.0


def softmax_magnitude_field(config: Mapping[str, Any]) -> float:
    """The `mscale_all_dim` of a config; 0 where it says none, or nothing is scaled."""
    return _softmax_scaling(Fields(config, "config.json"))[1]


def _softmax_scaling(f: Fields) -> tuple[Fields, float]:
    given = f.data.get("rope_parameters") or f.data.get("rope_scaling") or {}
    scaling = Fields(given if isinstance(given, Mapping) else {}, f"{f.where}: rope_parameters")
    way = scaling.data.get("rope_type", scaling.data.get("type", "default"))
    if way in UNSCALED or not scaling.data.get("mscale_all_dim"):
        return scaling, 0.0
    return scaling, scaling.float("mscale_all_dim", low=-1.0, high=1e3)


def _longrope(f: Fields, rotary_dim: int, max_position: int) -> LongRopeScaling:
    """The long factors, if the model's context is longer than the original one: chosen once, not by each length."""
    original = _original(f)
    name = "long_factor" if max_position > original else "short_factor"
    given, count = f.data.get(name), rotary_dim // 2
    listed = given if isinstance(given, list) else []
    divisors = tuple(float(d) for d in listed if type(d) in (int, float) and 0.0 < d < math.inf)
    if not len(divisors) == len(listed) == count:
        raise ConfigError(f"{f.where}: {name} must list {count} positive numbers, not {_short(given)}")
    factor = f.float("factor", max_position / original, low=0.0, high=1e6)
    usual = 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original))
    return LongRopeScaling(divisors, f.float("attention_factor", usual, low=0.0, high=1e3))


def _original(f: Fields) -> int:
    return f.int("original_max_position_embeddings", low=2, high=1 << 30)


def _sections(f: Fields, num_frequencies: int) -> tuple[int, ...]:
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


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
