"""What tensors are called in a GGUF file: the words its architectures share, and the table a family makes of them.

Canonical names are those of `names`. The MTP head's layers are the blocks after the main ones, so every question comes
with the number of main layers. Experts lie in one 3-D tensor per projection, which canonically is
`layers.0.mlp.experts.gate_proj.weight` of shape [experts, out, in]. Knows no shapes and reads no files.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from headlong.checkpoint.transforms import IDENTITY, Transform
from headlong.errors import CheckpointError

MAX_BLOCKS = 4096
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor with divisors of the rotary frequencies, for which a safetensors checkpoint has fields in its config."""

# Below, a name ends in its module: `.weight` and `.bias` are the same on both sides and are added by `suffixed`.
WHOLE = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
SINKS = {"attn_sinks.weight": "self_attn.sinks"}
"""A whole name: the scores are a module's weight here alone."""
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
MLP_NORM = {"ffn_norm": "post_attention_layernorm"}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
EXPERTS_BIAS = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
"""A whole name: what is added to scores before experts are chosen is a module's bias here alone."""
HEAD = {
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "lm_head",
}

COLLAPSE = "output_hc_"
"""How the names begin of what makes one hidden state of several residual streams. In a head's own file it is the
head's."""
_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.(.+)")
_CANONICAL_LAYER = re.compile(r"(mtp\.)?layers\.(0|[1-9][0-9]{0,4})\.(.+)")


def suffixed(table: Mapping[str, str]) -> dict[str, str]:
    return {f"{disk}.{kind}": f"{name}.{kind}" for disk, name in table.items() for kind in ("weight", "bias")}


def as_stored(canonical_name: str) -> Transform:  # noqa: ARG001 - whatever the tensor
    return IDENTITY


_OUTSIDE = suffixed(WHOLE) | {ROPE_FACTORS: ROPE_FACTORS}
_OF_HEAD = suffixed(HEAD)


def _inverted(table: Mapping[str, str]) -> dict[str, str]:
    assert len(set(table.values())) == len(table), "two names on disk for one canonical name"
    return {name: disk for disk, name in table.items()}


_DISK_OF_HEAD = _inverted(_OF_HEAD)


@dataclass(frozen=True)
class GgufNames:
    """One architecture's tensors. `layer` leads from what stands after `blk.N.` to what stands after `layers.N.`;
    `transform` tells of a canonical name how the stored values become the model's (the order of rows and columns is
    another matter)."""

    arch: str
    layer: Mapping[str, str]
    transform: Callable[[str], Transform] = as_stored
    joins_in_layers: bool = False
    """Whether each of the head's layers has `nextn` tensors of its own; else the first block has them for all."""
    outside: Mapping[str, str] = field(default_factory=dict)
    """Tensors in no block that this architecture alone has."""
    of_head: Mapping[str, str] = field(default_factory=dict)
    """Tensors in no block that are the head's in a head's own file, with what stands after `mtp.layers.N.`"""
    joined: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Matrices of a head's layer that GGUF has side by side in one, which is named first."""

    @cached_property
    def _whole(self) -> dict[str, str]:
        return _OUTSIDE | dict(self.outside)

    @cached_property
    def _disk_whole(self) -> dict[str, str]:
        return _inverted(self._whole)

    @cached_property
    def _disk_layer(self) -> dict[str, str]:
        return _inverted(self.layer)

    def canonical(self, name: str, num_layers: int) -> str | None:
        """The canonical name of a tensor on disk; None if the architecture has no such tensor."""
        match = _BLOCK.fullmatch(name)
        if match is None:
            return self._whole.get(name)
        block, rest = int(match[1]), match[2]
        head_layer = block - num_layers
        if rest in self.of_head and head_layer >= 0:
            return f"mtp.layers.{head_layer}.{self.of_head[rest]}"
        if rest in _OF_HEAD:
            if self.joins_in_layers:
                return f"mtp.layers.{head_layer}.{_OF_HEAD[rest]}" if head_layer >= 0 else None
            return f"mtp.{_OF_HEAD[rest]}" if head_layer == 0 else None
        inner = self.layer.get(rest)
        if inner is None:
            return None
        return f"layers.{block}.{inner}" if head_layer < 0 else f"mtp.layers.{head_layer}.{inner}"

    def disk(self, canonical_name: str, num_layers: int) -> str | None:
        """The inverse of `canonical`; None if a GGUF file has no place for such a tensor."""
        match = _CANONICAL_LAYER.fullmatch(canonical_name)
        if match is not None:
            rest = self._disk_layer.get(match[3])
            if rest is None and match[1] and self.joins_in_layers:
                rest = (_DISK_OF_HEAD | _inverted(self.of_head)).get(match[3])
            block = int(match[2]) + (num_layers if match[1] else 0)
            inside = match[1] or block < num_layers
            return f"blk.{block}.{rest}" if rest is not None and inside else None
        if canonical_name.startswith("mtp."):
            rest = _DISK_OF_HEAD.get(canonical_name.removeprefix("mtp."))
            return None if rest is None or self.joins_in_layers else f"blk.{num_layers}.{rest}"
        return self._disk_whole.get(canonical_name)


def in_head(name: str, num_layers: int) -> bool:
    """Whether a tensor on disk lies in a block after the main layers."""
    match = _BLOCK.fullmatch(name)
    return match is not None and int(match[1]) >= num_layers


def name_in_head(name: str, num_layers: int) -> str:
    """What a tensor of a head's own file is called among those of its model: one that stands in no block there, and is
    the head's all the same, stands in the head's first block."""
    return f"blk.{num_layers}.{name}" if name.startswith(COLLAPSE) else name


def name_in_file(name: str, num_layers: int) -> str:
    """The inverse of `name_in_head`."""
    own = name.removeprefix(f"blk.{num_layers}.")
    return own if own.startswith(COLLAPSE) else name


def num_main_layers(metadata: Mapping[str, Any]) -> int:
    """How many blocks stand before the head, from a GGUF file's metadata."""
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise CheckpointError(f"general.architecture: must be the name of an architecture, not {arch!r}")
    if f"{arch}.block_count" not in metadata:
        raise CheckpointError(f"general.architecture: is {arch!r}, but there is no {arch}.block_count")
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
