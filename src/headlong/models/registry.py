"""Which code serves which `model_type`. One row per architecture."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from headlong.errors import ConfigError
from headlong.layers.weights import Scope
from headlong.models.config import ModelConfig, parse
from headlong.models.mtp import MtpHead
from headlong.models.qwen3_5 import Qwen35Model


@dataclass(frozen=True)
class Architecture:
    """How to read a config and build the target and its head."""

    parse: Callable[[Mapping[str, Any]], ModelConfig]
    model: Callable[[ModelConfig, Scope], Qwen35Model] = Qwen35Model
    head: Callable[[ModelConfig, Scope], MtpHead] = MtpHead


_DENSE = Architecture(partial(parse, moe=False, interleaved=False))
_MOE = Architecture(partial(parse, moe=True, interleaved=False))
_NEXT = Architecture(partial(parse, moe=True, interleaved=True))

ARCHITECTURES: dict[str, Architecture] = {
    "qwen3_5": _DENSE,
    "qwen3_5_text": _DENSE,
    "qwen3_5_moe": _MOE,
    "qwen3_5_moe_text": _MOE,
    "qwen3_next": _NEXT,
}


def find(config: Mapping[str, Any]) -> Architecture:
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ConfigError(f"config.json: model_type {kind!r} is not supported; Headlong serves {known}")
    return ARCHITECTURES[kind]
