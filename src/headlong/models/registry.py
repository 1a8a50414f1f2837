"""Which code serves which `model_type`. One row per architecture."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from headlong.errors import ConfigError
from headlong.layers.weights import Scope
from headlong.models import llama, qwen3_5
from headlong.models.config import ModelConfig, parse_llama, parse_qwen
from headlong.models.decoder import DecoderModel, LayerFactory
from headlong.models.mtp import MtpHead


@dataclass(frozen=True)
class Architecture:
    """How to read a config and build the target and its head."""

    parse: Callable[[Mapping[str, Any]], ModelConfig]
    layer: LayerFactory

    def model(self, config: ModelConfig, scope: Scope) -> DecoderModel:
        return DecoderModel(config, self.layer, scope)

    def head(self, config: ModelConfig, scope: Scope) -> MtpHead:
        return MtpHead(config, self.layer, scope)


_DENSE = Architecture(partial(parse_qwen, moe=False, interleaved=False), qwen3_5.decoder_layer)
_MOE = Architecture(partial(parse_qwen, moe=True, interleaved=False), qwen3_5.decoder_layer)
_NEXT = Architecture(partial(parse_qwen, moe=True, interleaved=True), qwen3_5.decoder_layer)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(parse_llama, llama.decoder_layer),
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
