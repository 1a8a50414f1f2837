"""GGUF files of models with latent attention: the architecture `deepseek2`, which DeepSeek-V3, Kimi-K2 and
GLM-4.7-Flash share there.

What such files call heads of keys and values is what a token leaves behind: one head, as long as a latent with its
rotary part. The sizes that config.json knows have keys of their own. Older files say those under the usual keys, and
have the matrix that makes keys and values of latents as one tensor instead of two.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch

from headlong.checkpoint.gguf_config import Keys, short
from headlong.checkpoint.gguf_names import EXPERTS, EXPERTS_BIAS, MLP, MLP_NORM, GgufNames, suffixed
from headlong.checkpoint.transforms import AS_IS, Order, rope_row_order
from headlong.errors import CheckpointError
from headlong.models.config import ModelConfig
from headlong.models.experts import biased_fields, biased_keys
from headlong.models.gguf import GgufSpec, Tensors, rope, rope_scaling, rope_scaling_keys
from headlong.models.rope_fields import softmax_magnitude_field

LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
PER_LOG = 0.1
"""What the multiplier is of `mscale_all_dim`."""
LATENT_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "attn_output": "self_attn.o_proj",
}
_ROTARY_ROWS = re.compile(
    r"(mtp\.)?layers\.\d+\.self_attn\.(q_proj|q_b_proj|kv_a_proj_with_mqa)\.(weight|bias)"
)


def _heads(keys: Keys) -> dict[str, Any]:
    heads, rope_dim = keys.int("attention.head_count"), keys.int("rope.dimension_count")
    ending = "_mla" if keys.has("attention.key_length_mla") else ""
    key_dim = keys.int(f"attention.key_length{ending}")
    if key_dim <= rope_dim:
        raise keys.fault(
            f"attention.key_length{ending}", f"must be above rope.dimension_count ({rope_dim}), not {key_dim}"
        )
    return {
        "num_key_value_heads": heads,
        "q_lora_rank": keys.int("attention.q_lora_rank", 0, low=0) or None,
        "kv_lora_rank": keys.int("attention.kv_lora_rank"),
        "qk_nope_head_dim": key_dim - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": keys.int(f"attention.value_length{ending}"),
        "rope_interleave": True,
        "rope_parameters": rope(keys, rope_dim, _scaling),
    }


def _scaling(keys: Keys) -> dict[str, Any]:
    """Readers of such files stretch no waves, and queries and keys by the magnitude of the multiplier."""
    found = rope_scaling(keys)
    if found["rope_type"] == "default":
        return found
    if found["rope_type"] != "yarn":
        raise keys.fault(
            "rope.scaling.type",
            f"{short(found['rope_type'])} is not supported with latents, only 'none' and 'yarn'",
        )
    if keys.float("rope.scaling.attn_factor", 1.0, high=1e3) != 1.0:
        raise keys.fault("rope.scaling.attn_factor", "is not supported with latents, only 1")
    magnitude = float(f"{keys.float(LOG_MULTIPLIER, high=1e2) / PER_LOG:.6g}")
    del found["attention_factor"]
    return found | {"mscale": magnitude, "mscale_all_dim": magnitude}


def _head_keys(config: ModelConfig, text: Mapping[str, Any]) -> dict[str, Any]:
    c = config.latent
    assert c is not None
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": c.rank + c.rope_dim,
        "attention.value_length": c.rank,
        "attention.key_length_mla": c.plain_dim + c.rope_dim,
        "attention.value_length_mla": c.value_dim,
        "attention.kv_lora_rank": c.rank,
        "attention.q_lora_rank": c.query_rank or 0,
        **_scaling_keys(config, text),
    }


def _scaling_keys(config: ModelConfig, text: Mapping[str, Any]) -> dict[str, Any]:
    if config.rope_scaling is None:
        return {}
    found = rope_scaling_keys(config.rope_scaling)
    magnitude = softmax_magnitude_field(text)
    if found.get("rope.scaling.type") != "yarn" or config.rope_scaling.amplitude != 1.0 or not magnitude:
        raise CheckpointError(
            "config.json: rope_parameters: a deepseek2 GGUF knows YaRN where mscale and mscale_all_dim are equal, and "
            "no other scaling; convert the model to another format"
        )
    del found["rope.scaling.attn_factor"]
    return found | {LOG_MULTIPLIER: magnitude * PER_LOG}


def _fields(keys: Keys, tensors: Tensors, num_layers: int) -> dict[str, Any]:  # noqa: ARG001 - however many
    """Files from before groups of experts had keys are read without groups."""
    if not any(name.endswith(".exp_probs_b.bias") for name in tensors):
        raise CheckpointError(
            "blk.*.exp_probs_b.bias: a deepseek2 without it is of the family of DeepSeek-V2, which is not supported; "
            "the nearest that is served is DeepSeek-V3"
        )
    return {
        "intermediate_size": keys.int("feed_forward_length"),
        "topk_method": "noaux_tc",
        **biased_fields(keys),
    }


def _keys(config: ModelConfig, text: Mapping[str, Any], head_layers: int) -> dict[str, Any]:  # noqa: ARG001 - as it is
    return biased_keys(config)


def _order(name: str, config: ModelConfig) -> Order:
    """On disk the two numbers of a rotary pair are neighbours, as in most configs."""
    c, match = config.latent, _ROTARY_ROWS.fullmatch(name)
    if match is None or c is None or c.interleaved:
        return AS_IS
    heads, plain = (1, c.rank) if match[2].startswith("kv") else (c.num_heads, c.plain_dim)
    rows = torch.arange(heads * (plain + c.rope_dim)).view(heads, plain + c.rope_dim)
    rotary = rows[:, plain:][:, rope_row_order(1, c.rope_dim)]
    return Order(rows=torch.cat([rows[:, :plain], rotary], dim=1).reshape(-1))


_WEIGHTS = {f"{disk}.weight": f"{name}.weight" for disk, name in LATENT_ATTENTION.items()}
"""Names with their endings: files of this architecture have no place for biases of the attention."""

GGUF = GgufSpec(
    GgufNames(
        "deepseek2",
        _WEIGHTS | suffixed(MLP | MLP_NORM | EXPERTS) | EXPERTS_BIAS,
        joins_in_layers=True,
    ),
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    fields=_fields,
    keys=_keys,
    heads=_heads,
    head_keys=_head_keys,
    order=_order,
    reordered_on_load=True,
    runs_head=True,
)
