"""A GGUF file's metadata as the config.json of the same model, and back.

Metadata are hostile input: whatever a file says, `config_from_gguf` gives a config whose sizes are sane or raises a
`CheckpointError` that names the key. Factors of the rotary frequencies are a tensor and stay one. Knows keys, fields
and the ids that end a text; nothing else of tokenizers, and reads no tensor.
"""

import math
import struct
from collections.abc import Mapping
from typing import Any

from headlong.checkpoint.gguf_names import LLAMA, QWEN35, QWEN35MOE, num_main_layers
from headlong.checkpoint.tensor_info import TensorInfo
from headlong.errors import CheckpointError

FULL, LINEAR = "full_attention", "linear_attention"
MODEL_TYPES = {QWEN35: "qwen3_5_text", QWEN35MOE: "qwen3_5_moe_text", LLAMA: "llama"}
CLASSES = {QWEN35: "Qwen3_5ForCausalLM", QWEN35MOE: "Qwen3_5MoeForCausalLM", LLAMA: "LlamaForCausalLM"}
_ARCH_OF = {
    "qwen3_5": QWEN35,
    "qwen3_5_text": QWEN35,
    "qwen3_5_moe": QWEN35MOE,
    "qwen3_5_moe_text": QWEN35MOE,
    "llama": LLAMA,
}


class _Keys:
    """Typed reads of one architecture's metadata; every complaint names the key."""

    def __init__(self, metadata: Mapping[str, Any], arch: str) -> None:
        self.metadata = metadata
        self.arch = arch

    def int(self, name: str, default: int | None = None, *, low: int = 1, high: int = 1 << 24) -> int:
        value = self.metadata.get(f"{self.arch}.{name}", default)
        if type(value) is not int or not low <= value <= high:
            raise self.fault(name, f"must be a whole number from {low} to {high}, not {_short(value)}")
        return value

    def float(self, name: str, default: float | None = None, *, high: float) -> float:
        value = self.metadata.get(f"{self.arch}.{name}", default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= high:
            raise self.fault(name, f"must be a number above 0 and at most {high:g}, not {_short(value)}")
        return _shortest(float(value))

    def has(self, name: str) -> bool:
        return f"{self.arch}.{name}" in self.metadata

    def fault(self, name: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self.arch}.{name}: {what}")


def config_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """What config.json would say of the model."""
    num_layers = num_main_layers(metadata)
    keys = _Keys(metadata, metadata["general.architecture"])
    hidden, heads = keys.int("embedding_length"), keys.int("attention.head_count")
    head_dim = keys.int("attention.key_length", hidden // heads)
    if keys.int("attention.value_length", head_dim) != head_dim:
        raise keys.fault(
            "attention.value_length", f"differs from key_length ({head_dim}), which is not supported"
        )
    config: dict[str, Any] = {
        "architectures": [CLASSES[keys.arch]],
        "model_type": MODEL_TYPES[keys.arch],
        "vocab_size": _vocab_size(keys, tensors),
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _key_value_heads(keys, heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": keys.int("context_length", high=1 << 30),
        "rms_norm_eps": keys.float("attention.layer_norm_rms_epsilon", high=1.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": any(name.endswith(".attn_q.bias") for name in tensors),
        "rope_parameters": _rope(keys, head_dim),
    }
    if keys.arch == LLAMA:
        config |= _llama(keys, tensors)
    else:
        config |= _hybrid(keys, num_layers)
    if in_head := keys.int("nextn_predict_layers", 0, low=0):
        config |= {"mtp_num_hidden_layers": in_head, "mtp_use_dedicated_embeddings": False}
    return config | _token_ids(metadata)


def _vocab_size(keys: _Keys, tensors: Mapping[str, TensorInfo]) -> int:
    embedding = tensors.get("token_embd.weight")
    if embedding is not None:
        if len(embedding.shape) != 2:
            raise CheckpointError(f"token_embd.weight: must be a matrix, not {list(embedding.shape)}")
        return embedding.shape[0]
    # The file of a head alone may lack the embedding.
    tokens = keys.metadata.get("tokenizer.ggml.tokens")
    return keys.int("vocab_size", len(tokens) if isinstance(tokens, list) else None)


def _key_value_heads(keys: _Keys, heads: int) -> int:
    """One number, or one for each block with 0 where a block has no attention."""
    name = "attention.head_count_kv"
    value = keys.metadata.get(f"{keys.arch}.{name}", heads)
    if isinstance(value, list):
        different = {count for count in value if count != 0}
        if len(different) != 1:
            raise keys.fault(name, f"must be the same in every block that has attention, not {_short(value)}")
        (value,) = different
    if type(value) is not int or not 1 <= value <= heads or heads % value:
        raise keys.fault(name, f"must divide attention.head_count ({heads}), not {_short(value)}")
    return value


def _rope(keys: _Keys, head_dim: int) -> dict[str, Any]:
    kind = keys.metadata.get(f"{keys.arch}.rope.scaling.type", "none")
    if kind != "none":
        raise keys.fault("rope.scaling.type", f"{kind!r} is not supported, only unscaled positions")
    rotary_dim = keys.int("rope.dimension_count", head_dim, high=head_dim)
    factor = rotary_dim / head_dim
    if int(head_dim * factor) != rotary_dim:  # what is read back by multiplying must not be rounded down
        factor = math.nextafter(factor, 1.0)
    return {
        "rope_type": "default",
        "rope_theta": keys.float("rope.freq_base", 10000.0, high=1e12),
        "partial_rotary_factor": factor,
    }


def _llama(keys: _Keys, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    if keys.int("expert_count", 0, low=0):
        raise keys.fault("expert_count", "a llama with experts is not supported")
    return {
        "intermediate_size": keys.int("feed_forward_length"),
        "mlp_bias": any(name.endswith(".ffn_up.bias") for name in tensors),
    }


def _hybrid(keys: _Keys, num_layers: int) -> dict[str, Any]:
    key_heads = keys.int("ssm.group_count")
    value_heads = keys.int("ssm.time_step_rank")
    inner = keys.int("ssm.inner_size")
    if value_heads % key_heads:
        raise keys.fault(
            "ssm.time_step_rank", f"must be a multiple of ssm.group_count ({key_heads}), not {value_heads}"
        )
    if inner % value_heads:
        raise keys.fault(
            "ssm.inner_size", f"must be a multiple of ssm.time_step_rank ({value_heads}), not {inner}"
        )
    fields: dict[str, Any] = {
        "attn_output_gate": True,
        "layer_types": _layer_types(keys, num_layers),
        "linear_conv_kernel_dim": keys.int("ssm.conv_kernel", low=2, high=64),
        "linear_key_head_dim": keys.int("ssm.state_size"),
        "linear_value_head_dim": inner // value_heads,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
    }
    if value_heads > key_heads:
        fields["linear_value_heads_tiled"] = True
    if keys.arch == QWEN35:
        return fields | {"intermediate_size": keys.int("feed_forward_length")}
    experts = keys.int("expert_count", high=1 << 16)
    return fields | {
        "num_experts": experts,
        "num_experts_per_tok": keys.int("expert_used_count", high=experts),
        "moe_intermediate_size": keys.int("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.int("expert_shared_feed_forward_length"),
    }


def _layer_types(keys: _Keys, num_layers: int) -> list[str]:
    name = "attention.recurrent_layers"
    if keys.has(name):
        flags = keys.metadata[f"{keys.arch}.{name}"]
        # Blocks of the head may be listed too.
        if not isinstance(flags, list) or len(flags) < num_layers or not all(type(f) is bool for f in flags):
            raise keys.fault(
                name, f"must be a truth value for each of {num_layers} layers, not {_short(flags)}"
            )
        return [LINEAR if recurrent else FULL for recurrent in flags[:num_layers]]
    interval = keys.int("full_attention_interval", 4)
    return [FULL if (i + 1) % interval == 0 else LINEAR for i in range(num_layers)]


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for field, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("eot", "eot")):
        value = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if value is not None:
            if type(value) is not int or not 0 <= value < 1 << 31:
                raise CheckpointError(
                    f"tokenizer.ggml.{key}_token_id: must be a token id, not {_short(value)}"
                )
            found[f"{field}_token_id"] = value
    turn_end, end = found.pop("eot_token_id", None), found.get("eos_token_id")
    if turn_end is not None and turn_end != end:
        found["eos_token_id"] = turn_end if end is None else [end, turn_end]
    return found


def gguf_metadata(config: Mapping[str, Any], has_head: bool) -> dict[str, Any]:
    """The keys of the architecture for a checkpoint's config, wrapped or not; lists are arrays, floats are float32."""
    text = config.get("text_config", config)
    arch = gguf_architecture(config)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "mrope", "llama3"):
        raise CheckpointError(
            f"config.json: rope_type {kind!r} cannot be written as GGUF here, only unscaled and llama3"
        )
    heads, hidden = text["num_attention_heads"], text["hidden_size"]
    head_dim = text.get("head_dim") or (hidden // heads if arch == LLAMA else 256)
    longest = text.get("max_position_embeddings") or (2048 if arch == LLAMA else 32768)
    rotary = rope.get(
        "partial_rotary_factor", text.get("partial_rotary_factor", 1.0 if arch == LLAMA else 0.25)
    )
    fields: dict[str, Any] = {
        "block_count": text["num_hidden_layers"] + int(has_head),
        "context_length": longest,
        "embedding_length": hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": text.get("num_key_value_heads") or heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(text.get("rms_norm_eps", 1e-6)),
        "rope.freq_base": float(rope.get("rope_theta", text.get("rope_theta", 10000.0))),
        "rope.dimension_count": int(head_dim * rotary),
        "vocab_size": text["vocab_size"],
    }
    if arch == QWEN35MOE:
        fields |= {
            "expert_count": text["num_experts"],
            "expert_used_count": text["num_experts_per_tok"],
            "expert_feed_forward_length": text["moe_intermediate_size"],
            "expert_shared_feed_forward_length": text["shared_expert_intermediate_size"],
        }
    else:
        fields["feed_forward_length"] = text["intermediate_size"]
    if arch != LLAMA:
        sections = rope.get("mrope_section") or _rope_sections(fields["rope.dimension_count"] // 2)
        fields |= {"rope.dimension_sections": [*sections, 0]} | _hybrid_keys(text, has_head)
    if has_head:
        fields["nextn_predict_layers"] = 1
    return {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in fields.items()}


def gguf_architecture(config: Mapping[str, Any]) -> str:
    kind = config.get("model_type")
    if kind not in _ARCH_OF:
        known = ", ".join(sorted(_ARCH_OF))
        raise CheckpointError(
            f"config.json: model_type {kind!r} has no GGUF architecture here; known are {known}"
        )
    return _ARCH_OF[kind]


def _rope_sections(pairs: int) -> list[int]:
    """How many pairs turn with each coordinate of a multimodal position, taking turns: 11, 11, 10 of 32. Of no effect
    on text, but llama.cpp asks for them, and turns by nothing a pair that belongs to none."""
    return [(pairs + 2 - i) // 3 for i in range(3)]


def _hybrid_keys(text: Mapping[str, Any], has_head: bool) -> dict[str, Any]:
    value_heads = text.get("linear_num_value_heads", 32)
    fields: dict[str, Any] = {
        "ssm.conv_kernel": text.get("linear_conv_kernel_dim", 4),
        "ssm.state_size": text.get("linear_key_head_dim", 128),
        "ssm.group_count": text.get("linear_num_key_heads", 16),
        "ssm.time_step_rank": value_heads,
        "ssm.inner_size": value_heads * text.get("linear_value_head_dim", 128),
    }
    types, count = text.get("layer_types"), text["num_hidden_layers"]
    interval = text.get("full_attention_interval") or (
        types.index(FULL) + 1 if types and FULL in types else 4
    )
    if types is None or types == [FULL if (i + 1) % interval == 0 else LINEAR for i in range(count)]:
        return fields | {"full_attention_interval": interval}
    return fields | {"attention.recurrent_layers": [kind == LINEAR for kind in types] + [False] * has_head}


def _shortest(value: float) -> float:
    """The number with the fewest digits that is the same float32: what was written before it was narrowed."""
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


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""Fields of generation_config.json, and what follows `general.sampling.` in a GGUF file."""


def sampling_metadata(generation: Mapping[str, Any]) -> dict[str, Any]:
    """What a GGUF file says of the sampling that generation_config.json recommends."""
    found = {}
    for field, key in SAMPLING.items():
        value = generation.get(field)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found[f"general.sampling.{key}"] = value if field == "top_k" else float(value)
    return found


def generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse: nothing where the file recommends nothing."""
    given = {field: metadata.get(f"general.sampling.{key}") for field, key in SAMPLING.items()}
    numbers = {
        field: value
        for field, value in given.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    return {"do_sample": True} | numbers if numbers else {}
