"""Which family serves which `model_type`: one row for each. And what a family makes of an opened checkpoint."""

from collections.abc import Mapping
from typing import Any

from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.names import NameMap, Naming
from headlong.checkpoint.tensor_info import TensorInfo
from headlong.errors import CheckpointError, ConfigError
from headlong.models import (
    deepseek_v3,
    deepseek_v4,
    gguf,
    glm4_moe,
    gpt_oss,
    llama,
    mimo,
    mistral,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
)
from headlong.models.config import ModelConfig
from headlong.models.family import Family
from headlong.models.nearest import nearest

FAMILIES: dict[str, Family] = {
    "llama": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "ministral": mistral.MINISTRAL,
    "qwen2": qwen2.FAMILY,
    "mimo": mimo.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "glm4_moe": glm4_moe.FAMILY,
    "deepseek_v3": deepseek_v3.FAMILY,
    "kimi_k2": deepseek_v3.KIMI,
    "deepseek_v4": deepseek_v4.FAMILY,
    "deepseek_ref": deepseek_v4.FAMILY,
    "glm4_moe_lite": deepseek_v3.FLASH,
    "gpt_oss": gpt_oss.FAMILY,
    "qwen3_5": qwen3_5.DENSE,
    "qwen3_5_text": qwen3_5.DENSE,
    "qwen3_5_moe": qwen3_5.MOE,
    "qwen3_5_moe_text": qwen3_5.MOE,
    "qwen3_next": qwen3_5.NEXT,
}
BY_ARCHITECTURE = {
    family.gguf.arch: family for family in reversed(FAMILIES.values()) if family.gguf is not None
}
"""The families that have GGUF files, by the architecture's name there; of those that share one, the first."""


def find(config: Mapping[str, Any]) -> Family:
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ConfigError(
            f"config.json: model_type {kind!r} is not supported; Headlong serves {known}; "
            f"{nearest(config, FAMILIES)}"
        )
    return FAMILIES[kind]


def find_gguf(metadata: Mapping[str, Any]) -> tuple[Family, gguf.GgufSpec]:
    """The family of a GGUF file, by its metadata, and how that family writes such files."""
    arch = metadata.get("general.architecture")
    family = BY_ARCHITECTURE.get(arch) if isinstance(arch, str) else None
    if family is None or family.gguf is None:
        known = ", ".join(sorted(BY_ARCHITECTURE))
        raise CheckpointError(
            f"general.architecture: {arch!r} is not supported; Headlong reads {known}; "
            f"{nearest({'model_type': arch}, BY_ARCHITECTURE)}"
        )
    return family, family.gguf


def written_spec(config: Mapping[str, Any]) -> gguf.GgufSpec:
    """How a model with this config.json would be written as a GGUF file."""
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None or family.gguf is None:
        known = ", ".join(sorted(name for name, found in FAMILIES.items() if found.gguf is not None))
        raise CheckpointError(
            f"config.json: model_type {kind!r} has no GGUF architecture here; known are {known}"
        )
    return family.gguf


def config_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """What config.json would say of the model in a GGUF file."""
    family, spec = find_gguf(metadata)
    return gguf.config_from_gguf(spec, family.mtp, metadata, tensors)


def gguf_metadata(config: Mapping[str, Any], *, head_layers: int) -> dict[str, Any]:
    """The keys of the architecture for a config.json, wrapped or not, and a head of so many layers or none."""
    spec, text = written_spec(config), config.get("text_config", config)
    return gguf.gguf_metadata(spec, read_config(config), text, head_layers)


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    return find(config).config(config)


def config_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """The checkpoint's config.json, or what it would say."""
    if checkpoint.config or not checkpoint.is_gguf:
        return checkpoint.config
    try:
        return config_from_gguf(checkpoint.metadata, checkpoint.tensors)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.folder}: {error}") from error


def names_of(checkpoint: Checkpoint) -> NameMap:
    """The canonical names of its tensors; those of a model nobody knows are the usual ones."""
    in_gguf, spec = find_gguf(checkpoint.metadata) if checkpoint.gguf_layers else (None, None)
    text = checkpoint.config.get("text_config", checkpoint.config)
    family = FAMILIES.get(str(checkpoint.config.get("model_type")), in_gguf)
    count = text.get("num_hidden_layers") if isinstance(text, Mapping) else None
    if count is None and checkpoint.gguf_layers:  # safetensors of a head beside it count on from there
        count = max(checkpoint.gguf_layers.values())
    return NameMap(
        checkpoint,
        Naming() if family is None else family.naming,
        None if spec is None else spec.names,
        num_layers=count if type(count) is int else 0,
    )
