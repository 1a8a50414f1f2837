"""What a model's authors recommend for sampling: its generation_config.json, another one, or none.

Reads the file; turns its fields into those of `SamplingParams`, whose ranges are checked there. Knows no engine.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headlong.checkpoint.strict_json import read_object
from headlong.errors import ConfigError

GENERATION_CONFIG = "generation_config.json"
NONE = ("none", "vllm")
"""The words for no recommendation; the second is vLLM's for its own defaults."""
FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def read_beside(path: Path) -> dict[str, Any]:
    """The generation_config.json in a folder, or beside a file; empty where there is none."""
    file = (path if path.is_dir() else path.parent) / GENERATION_CONFIG
    return read_object(file) if file.exists() else {}


def chosen(choice: str, own: Mapping[str, Any]) -> Mapping[str, Any]:
    """The recommendation that `choice` names: `auto` is the model's own, `none` is empty, else a folder's."""
    if choice == "auto":
        return own
    if choice in NONE:
        return {}
    path = Path(choice).expanduser()
    file = path / GENERATION_CONFIG if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"generation_config: {choice!r} has no {GENERATION_CONFIG}; give auto, none or a folder that has one"
        )
    return read_object(file)


def sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling fields that are given, by their names in `SamplingParams`."""
    given = {name: generation[name] for name in FIELDS if generation.get(name) is not None}
    if given.get("top_k") == -1:  # another way to say that all are kept
        given["top_k"] = 0
    if generation.get("do_sample", bool(given)):
        return given
    return given | ({"temperature": 0.0} if "do_sample" in generation else {})


def output_tokens(generation: Mapping[str, Any]) -> int | None:
    """How long an answer may get where nobody says; None where the authors do not say either."""
    count = generation.get("max_new_tokens")
    return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else None


def in_words(values: Mapping[str, Any]) -> str:
    """Sampling parameters for people, such as `temperature 0.7, top_p 0.9`."""
    if values.get("temperature") == 0 and len(values) == 1:
        return "greedy"
    return ", ".join(f"{name} {value:g}" for name, value in values.items()) or "greedy"
