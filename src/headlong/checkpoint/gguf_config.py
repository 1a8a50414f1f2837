"""Typed reads of a GGUF file's metadata, and what they say of tokens and sampling whatever the architecture.

Metadata are hostile input: a read gives a sane value or raises a `CheckpointError` that names the key. What an
architecture's sizes are called its family knows. Reads no tensor.
"""

import struct
from collections.abc import Mapping
from typing import Any

from headlong.errors import CheckpointError


class Keys:
    """Typed reads of one architecture's metadata; every complaint names the key."""

    def __init__(self, metadata: Mapping[str, Any], arch: str) -> None:
        self.metadata = metadata
        self.arch = arch

    def int(self, name: str, default: int | None = None, *, low: int = 1, high: int = 1 << 24) -> int:
        value = self.metadata.get(f"{self.arch}.{name}", default)
        if type(value) is not int or not low <= value <= high:
            raise self.fault(name, f"must be a whole number from {low} to {high}, not {short(value)}")
        return value

    def float(self, name: str, default: float | None = None, *, high: float) -> float:
        value = self.metadata.get(f"{self.arch}.{name}", default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= high:
            raise self.fault(name, f"must be a number above 0 and at most {high:g}, not {short(value)}")
        return _shortest(float(value))

    def has(self, name: str) -> bool:
        return f"{self.arch}.{name}" in self.metadata

    def fault(self, name: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self.arch}.{name}: {what}")

    def flag(self, name: str, default: bool) -> bool:
        value = self.metadata.get(f"{self.arch}.{name}", default)
        if not isinstance(value, bool):
            raise self.fault(name, f"must be true or false, not {short(value)}")
        return value


def token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for field, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("eot", "eot")):
        value = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if value is not None:
            if type(value) is not int or not 0 <= value < 1 << 31:
                raise CheckpointError(
                    f"tokenizer.ggml.{key}_token_id: must be a token id, not {short(value)}"
                )
            found[f"{field}_token_id"] = value
    turn_end, end = found.pop("eot_token_id", None), found.get("eos_token_id")
    if turn_end is not None and turn_end != end:
        found["eos_token_id"] = turn_end if end is None else [end, turn_end]
    return found


def _shortest(value: float) -> float:
    """The number with the fewest digits that is the same float32, which is most likely the one that was narrowed."""
    try:
        narrow = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return value
    if narrow != value:
        return value
    for digits in range(1, 10):
        shorter = float(f"{value:.{digits}g}")
        if struct.unpack("f", struct.pack("f", shorter))[0] == narrow:
            return shorter
    return value


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""The fields of generation_config.json that GGUF knows, with what follows `general.sampling.` in their keys there."""


def sampling_metadata(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a GGUF file for the sampling that generation_config.json recommends."""
    found = {}
    for field, key in SAMPLING.items():
        value = generation.get(field)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found[f"general.sampling.{key}"] = value if field == "top_k" else float(value)
    return found


def generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The generation_config.json for the sampling that a GGUF file recommends; empty where it recommends none."""
    given = {field: metadata.get(f"general.sampling.{key}") for field, key in SAMPLING.items()}
    numbers = {
        field: _as_written(value)
        for field, value in given.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    return {"do_sample": True} | numbers if numbers else {}


def _as_written(value: float) -> float:
    """The short number that somebody wrote, such as 0.9, of the float32 that GGUF keeps of it."""
    if not isinstance(value, float):
        return value
    short = float(f"{value:.7g}")
    try:
        return short if struct.pack("f", short) == struct.pack("f", value) else value
    except OverflowError:  # a float64 that no float32 holds
        return value
