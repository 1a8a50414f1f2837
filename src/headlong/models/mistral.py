"""Mistral: the model of Llama, in some releases with a window, in Ministral for some of the layers. Its GGUF files are
Llama's."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headlong.models import llama
from headlong.models.config import ModelConfig
from headlong.models.config_fields import sliding_layers, sliding_window, without_nulls
from headlong.models.fields import Fields


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    f = Fields(without_nulls(config), "config.json")
    plain = llama.read_config({"max_position_embeddings": 131072, **f.data})
    return replace(plain, **sliding_layers(f, sliding_window(f)))


FAMILY = replace(
    llama.FAMILY,
    config=read_config,
    releases="Mistral-7B, Mistral-Nemo, Mistral-Small-24B",
)
MINISTRAL = replace(FAMILY, releases="Ministral-8B")
