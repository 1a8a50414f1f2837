"""Mistral: the model of Llama, in some releases with a window. GGUF files of it are Llama's."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headlong.models import llama
from headlong.models.config import ModelConfig
from headlong.models.config_fields import full_layers, without_nulls
from headlong.models.fields import Fields


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """A window is read, and refused where more tokens are served than it has."""
    f = Fields(without_nulls(config), "config.json")
    full_layers(f)
    window = f.int("sliding_window", high=1 << 30) if "sliding_window" in f.data else None
    return replace(llama.read_config({"max_position_embeddings": 131072, **f.data}), window=window)


FAMILY = replace(
    llama.FAMILY,
    config=read_config,
    releases="Mistral-7B (v0.1 up to its window), Mistral-Nemo, Mistral-Small-24B",
)
