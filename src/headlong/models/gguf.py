"""A GGUF file's metadata as the config.json of the same model, and back: what architectures share.

Metadata are hostile input: whatever a file says, `config_from_gguf` gives a config whose sizes are sane or raises a
`CheckpointError` that names the key. Factors of the rotary frequencies are a tensor and stay one. What is an
architecture's alone is in its family's file, as a `GgufSpec`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from headlong.checkpoint.gguf_config import Keys, short, token_ids
from headlong.checkpoint.gguf_names import GgufNames, num_main_layers
from headlong.checkpoint.tensor_info import TensorInfo
from headlong.checkpoint.transforms import AS_IS, Order
from headlong.errors import CheckpointError
from headlong.models.config import ModelConfig
from headlong.models.head_spec import HeadSpec
from headlong.models.rope_fields import yarn_magnitude
from headlong.ops.rope.scaling import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling

Tensors = Mapping[str, TensorInfo]


def no_fields(keys: Keys, tensors: Tensors, num_layers: int) -> dict[str, Any]:  # noqa: ARG001 - whatever the file
    return {"intermediate_size": keys.int("feed_forward_length")}


def no_keys(config: ModelConfig, text: Mapping[str, Any], head_layers: int) -> dict[str, Any]:  # noqa: ARG001 - as above
    return {"feed_forward_length": config.intermediate_size}


def usual_heads(keys: Keys, *, truncate: bool = True) -> dict[str, Any]:
    """The fields of heads that keep keys and values of one size each. `truncate`: whether YaRN's range of frequencies
    is widened to whole numbers in models of such files, which do not say."""
    hidden, heads = keys.int("embedding_length"), keys.int("attention.head_count")
    head_dim = keys.int("attention.key_length", hidden // heads)
    if keys.int("attention.value_length", head_dim) != head_dim:
        raise keys.fault(
            "attention.value_length", f"differs from key_length ({head_dim}), which is not supported"
        )
    return {
        "num_key_value_heads": _key_value_heads(keys, heads),
        "head_dim": head_dim,
        "rope_parameters": rope(keys, head_dim, partial(rope_scaling, truncate=truncate)),
    }


def usual_head_keys(
    config: ModelConfig,
    text: Mapping[str, Any],  # noqa: ARG001 - the config says all
    *,
    truncate: bool = True,
) -> dict[str, Any]:
    sizes = config.attention
    return {
        "attention.head_count_kv": sizes.num_kv_heads,
        "attention.key_length": sizes.head_dim,
        "attention.value_length": sizes.head_dim,
        **rope_scaling_keys(config.rope_scaling, truncate=truncate),
    }


def as_they_lie(name: str, config: ModelConfig) -> Order:  # noqa: ARG001 - whatever the tensor
    return AS_IS


@dataclass(frozen=True)
class GgufSpec:
    """One architecture of GGUF files."""

    names: GgufNames
    model_type: str
    """What config.json would call it."""
    class_name: str
    """What transformers calls it."""
    fields: Callable[[Keys, Tensors, int], dict[str, Any]] = no_fields
    """The architecture's own fields of config.json, for so many layers."""
    keys: Callable[[ModelConfig, Mapping[str, Any], int], dict[str, Any]] = no_keys
    """The inverse: its own keys, from the checked config, the fields as they were written and the head's layers."""
    heads: Callable[[Keys], dict[str, Any]] = usual_heads
    """The fields of config.json about the sizes of heads and about positions."""
    head_keys: Callable[[ModelConfig, Mapping[str, Any]], dict[str, Any]] = usual_head_keys
    """The inverse, from the checked config and the fields as they were written."""
    order: Callable[[str, ModelConfig], Order] = as_they_lie
    """For a canonical name, the indices into the stored rows and columns that put them into the order of
    safetensors."""
    reordered_on_load: bool = False
    """Whether the loader applies `order`; else the model computes with what is stored."""
    windows: bool = False
    """Whether such files can say that layers attend through a window."""
    runs_head: bool = False
    """Whether llama.cpp knows this architecture's MTP head, and reads it from the model's own file."""
    head_apart: bool = False
    """Whether it reads the head from a file of its own, `mtp-` before the model's name."""

    @property
    def arch(self) -> str:
        return self.names.arch


def config_from_gguf(
    spec: GgufSpec, head: HeadSpec, metadata: Mapping[str, Any], tensors: Tensors
) -> dict[str, Any]:
    """What config.json would say of the model."""
    num_layers = num_main_layers(metadata)
    keys = Keys(metadata, spec.arch)
    config: dict[str, Any] = {
        "architectures": [spec.class_name],
        "model_type": spec.model_type,
        "vocab_size": _vocab_size(keys, tensors),
        "hidden_size": keys.int("embedding_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": keys.int("attention.head_count"),
        "hidden_act": "silu",
        "max_position_embeddings": keys.int("context_length", high=1 << 30),
        "rms_norm_eps": keys.float("attention.layer_norm_rms_epsilon", high=1.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": any(name.endswith(".attn_q.bias") for name in tensors),
        **spec.heads(keys),
    }
    config |= spec.fields(keys, tensors, num_layers)
    if in_head := keys.int("nextn_predict_layers", 0, low=0):
        config |= head.config_fields(in_head)
    return {name: value for name, value in config.items() if value is not None} | token_ids(metadata)


def gguf_metadata(
    spec: GgufSpec, config: ModelConfig, text: Mapping[str, Any], head_layers: int
) -> dict[str, Any]:
    """The keys of the architecture; lists are arrays, floats are float32. `text` is what `config` was read from."""
    fields: dict[str, Any] = {
        "block_count": len(config.layer_types) + head_layers,
        "context_length": config.max_position if spec.windows else _context_length(config),
        "embedding_length": config.hidden_size,
        "attention.head_count": config.attention.num_heads,
        "attention.layer_norm_rms_epsilon": config.eps,
        "rope.freq_base": config.rope_theta,
        "rope.dimension_count": config.rotary_dim,
        "vocab_size": config.vocab_size,
        **spec.head_keys(config, text),
    }
    fields |= spec.keys(config, text, head_layers)
    if head_layers:
        fields["nextn_predict_layers"] = head_layers
    return {"general.architecture": spec.arch} | {
        f"{spec.arch}.{key}": value for key, value in fields.items()
    }


def _context_length(config: ModelConfig) -> int:
    """The context ends with the window where a file cannot name one: up to there it changes nothing."""
    return config.max_position if config.window is None else min(config.max_position, config.window)


def _vocab_size(keys: Keys, tensors: Mapping[str, TensorInfo]) -> int:
    embedding = tensors.get("token_embd.weight")
    if embedding is not None:
        if len(embedding.shape) != 2:
            raise CheckpointError(f"token_embd.weight: must be a matrix, not {list(embedding.shape)}")
        return embedding.shape[0]
    # The file of a head alone may lack the embedding.
    tokens = keys.metadata.get("tokenizer.ggml.tokens")
    return keys.int("vocab_size", len(tokens) if isinstance(tokens, list) else None)


def _key_value_heads(keys: Keys, heads: int) -> int:
    """One number, or one for each block with 0 where a block has no attention."""
    name = "attention.head_count_kv"
    value = keys.metadata.get(f"{keys.arch}.{name}", heads)
    if isinstance(value, list):
        different = {count for count in value if count != 0}
        if len(different) != 1:
            raise keys.fault(name, f"must be the same in every block that has attention, not {short(value)}")
        (value,) = different
    if type(value) is not int or not 1 <= value <= heads or heads % value:
        raise keys.fault(name, f"must divide attention.head_count ({heads}), not {short(value)}")
    return value


def rope(keys: Keys, head_dim: int, scaling: Callable[[Keys], dict[str, Any]]) -> dict[str, Any]:
    """The fields of `rope_parameters` where positions turn heads, or parts of them, of this size."""
    rotary_dim = keys.int("rope.dimension_count", head_dim, high=head_dim)
    factor = rotary_dim / head_dim
    if int(head_dim * factor) != rotary_dim:  # what is read back by multiplying must not be rounded down
        factor = math.nextafter(factor, 1.0)
    return {
        **scaling(keys),
        "rope_theta": keys.float("rope.freq_base", 10000.0, high=1e12),
        "partial_rotary_factor": factor,
    }


def rope_scaling(keys: Keys, *, truncate: bool = True) -> dict[str, Any]:
    """Readers of GGUF stretch YaRN's waves by its usual magnitude and by a factor of the file's."""
    way = keys.metadata.get(f"{keys.arch}.rope.scaling.type", "none")
    if way == "none":
        return {"rope_type": "default"}
    if way not in ("linear", "yarn"):
        raise keys.fault(
            "rope.scaling.type", f"{short(way)} is not supported, only 'none', 'linear' and 'yarn'"
        )
    factor = keys.float("rope.scaling.factor", high=1e6)
    if way == "linear":
        return {"rope_type": way, "factor": factor}
    return {
        "rope_type": way,
        **({} if truncate else {"truncate": False}),
        "factor": factor,
        "original_max_position_embeddings": keys.int("rope.scaling.original_context_length", high=1 << 30),
        "beta_fast": keys.float("rope.scaling.yarn_beta_fast", 32.0, high=1e6),
        "beta_slow": keys.float("rope.scaling.yarn_beta_slow", 1.0, high=1e6),
        "attention_factor": yarn_magnitude(factor, 1.0)
        * keys.float("rope.scaling.attn_factor", 1.0, high=1e3),
    }


def rope_scaling_keys(scaling: RopeScaling | None, *, truncate: bool = True) -> dict[str, Any]:
    match scaling:
        case None | Llama3Scaling():  # whose factors are a tensor
            return {}
        case LinearScaling(factor):
            return {"rope.scaling.type": "linear", "rope.scaling.factor": factor}
        case YarnScaling(factor, original, fast, slow, amplitude, truncated) if truncated == truncate:
            return {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": factor,
                "rope.scaling.original_context_length": original,
                "rope.scaling.yarn_beta_fast": fast,
                "rope.scaling.yarn_beta_slow": slow,
                "rope.scaling.attn_factor": amplitude / yarn_magnitude(factor, 1.0),
            }
    raise CheckpointError(
        "config.json: rope_parameters: GGUF has no keys for this scaling; convert the model to another format"
    )
