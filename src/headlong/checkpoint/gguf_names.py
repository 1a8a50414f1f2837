"""What a tensor is called in a GGUF file: one table per architecture between disk and canonical names.

Canonical names are those of `names`. The MTP head is the block after the main layers, so every question comes
with their number. Experts lie in one 3-D tensor per projection, which canonically is
`layers.0.mlp.experts.gate_proj.weight` of shape [experts, out, in]. Knows no shapes and reads no files.
"""

import re
from collections.abc import Mapping
from typing import Any

from headlong.checkpoint.transforms import CONV, IDENTITY, LOG_DECAY, NORM, SHARED_GATE, Transform
from headlong.errors import CheckpointError

QWEN35, QWEN35MOE, LLAMA = "qwen35", "qwen35moe", "llama"
ARCHITECTURES = (QWEN35, QWEN35MOE, LLAMA)
MAX_BLOCKS = 4096
ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies. A safetensors checkpoint says them in its config instead."""

# Below, a name ends in its module: `.weight` and `.bias` are the same on both sides and are added by `_suffixed`.
_WHOLE = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_HYBRID = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_BARE = {
    # Whole names: these have no `.weight`, or not the same one on both sides.
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
}
_HEAD = {
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "lm_head",
}


def _suffixed(table: dict[str, str]) -> dict[str, str]:
    return {f"{disk}.{kind}": f"{name}.{kind}" for disk, name in table.items() for kind in ("weight", "bias")}


_LAYER = {
    LLAMA: _suffixed(_ATTENTION | _MLP | {"ffn_norm": "post_attention_layernorm"}),
    QWEN35: _suffixed(_ATTENTION | _MLP | _HYBRID) | _BARE,
    QWEN35MOE: _suffixed(_ATTENTION | _MLP | _HYBRID | _EXPERTS) | _BARE,
}
_OUTSIDE = _suffixed(_WHOLE) | {ROPE_FACTORS: ROPE_FACTORS}
_OF_HEAD = _suffixed(_HEAD)


def _inverted(table: dict[str, str]) -> dict[str, str]:
    assert len(set(table.values())) == len(table), "two names on disk for one canonical name"
    return {name: disk for disk, name in table.items()}


_DISK_LAYER = {arch: _inverted(table) for arch, table in _LAYER.items()}
_DISK_OUTSIDE = _inverted(_OUTSIDE)
_DISK_OF_HEAD = _inverted(_OF_HEAD)

_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.(.+)")
_CANONICAL_LAYER = re.compile(r"(mtp\.)?layers\.(0|[1-9][0-9]{0,4})\.(.+)")


def num_main_layers(metadata: Mapping[str, Any]) -> int:
    """How many blocks stand before the head, from a GGUF file's metadata."""
    arch = metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"general.architecture: {arch!r} is not supported; Headlong reads {known}")
    counts = {f"{arch}.block_count": None, f"{arch}.nextn_predict_layers": 0}
    for key, default in counts.items():
        value = metadata.get(key, default)
        if type(value) is not int or not 0 <= value <= MAX_BLOCKS:
            raise CheckpointError(f"{key}: must be a whole number up to {MAX_BLOCKS}, not {value!r}")
        counts[key] = value
    blocks, in_head = counts.values()
    if blocks <= in_head:
        raise CheckpointError(
            f"{arch}.block_count: {blocks} blocks, {in_head} of them the head, leave no layers"
        )
    return blocks - in_head


def canonical(name: str, arch: str, num_layers: int) -> str | None:
    """The canonical name of a tensor on disk; None if the architecture has no such tensor."""
    match = _BLOCK.fullmatch(name)
    if match is None:
        return _OUTSIDE.get(name)
    block, rest = int(match[1]), match[2]
    if rest in _OF_HEAD:
        return f"mtp.{_OF_HEAD[rest]}" if block == num_layers else None
    inner = _LAYER[arch].get(rest)
    if inner is None:
        return None
    return f"layers.{block}.{inner}" if block < num_layers else f"mtp.layers.{block - num_layers}.{inner}"


def disk(canonical_name: str, arch: str, num_layers: int) -> str | None:
    """The inverse of `canonical`; None if a GGUF file has no place for such a tensor."""
    match = _CANONICAL_LAYER.fullmatch(canonical_name)
    if match is not None:
        rest = _DISK_LAYER[arch].get(match[3])
        block = int(match[2]) + (num_layers if match[1] else 0)
        inside = match[1] or block < num_layers
        return f"blk.{block}.{rest}" if rest is not None and inside else None
    if canonical_name.startswith("mtp."):
        rest = _DISK_OF_HEAD.get(canonical_name.removeprefix("mtp."))
        return None if rest is None else f"blk.{num_layers}.{rest}"
    return _DISK_OUTSIDE.get(canonical_name)


def transform(canonical_name: str, arch: str) -> Transform:
    """How the stored values become the model's. The order of rows and columns is another matter."""
    if arch == LLAMA:
        return IDENTITY
    module, _, last = canonical_name.rpartition(".")
    if last == "A_log":
        return LOG_DECAY
    if module.endswith("linear_attn.conv1d"):
        return CONV
    if module.endswith("mlp.shared_expert_gate"):
        return SHARED_GATE
    kind = module.rpartition(".")[2]
    is_norm = kind.endswith("norm") or kind.startswith("pre_fc_norm_")
    return NORM if is_norm and not module.endswith("linear_attn.norm") and last == "weight" else IDENTITY
