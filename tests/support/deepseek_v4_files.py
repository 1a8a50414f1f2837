"""Tiny checkpoints with the names, shapes and packing of DeepSeek-V4's releases, among them a head in bfloat16 inside a
model in NVFP4 and FP8, which calibration leaves so.

Weights are random. `meant` is what the packed ones stand for, read by `packing` from the formats' definitions. Knows
the names on disk; of Headlong nothing.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from support import packing

ONE = "model.safetensors"
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "o_groups": 2,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "num_nextn_predict_layers": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "swiglu_limit": 10.0,
    "sliding_window": 8,
    "compress_ratios": [0, 4, 128, 4, 0],
    "compress_rope_theta": 160000,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
}
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
PROJECTIONS = r"attn\.(wq_a|wq_b|wkv|wo_a|wo_b)|ffn\.shared_experts\.w[123]|[eh]_proj"
EXPERTS = r"ffn\.experts\.\d+\.w[123]"
Packs = tuple[tuple[str, str], ...]


MIXED = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "config_groups": {
        "group_0": {
            "format": "nvfp4-pack-quantized",
            "targets": [r"re:.*ffn\.experts\..*"],
            "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        },
        "group_1": {
            "format": "float-quantized",
            "targets": [r"re:.*attn\.(wq_a|wq_b|wkv|wo_a|wo_b)$", r"re:.*shared_experts.*"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
        },
    },
}
"""What llmcompressor says of a model that it made of NVFP4 experts and FP8 projections."""


def packs(experts: str, projections: str = "fp8_powers", head: str | None = None) -> Packs:
    """Which modules are packed how: those of the main layers, and the head's as `head` says: `same`, or None for
    floats."""
    main = ((rf"layers\.\d+\.({EXPERTS})", experts), (rf"layers\.\d+\.({PROJECTIONS})", projections))
    if head is None:
        return main
    return (*main, (rf"mtp\.\d+\.({EXPERTS})", experts), (rf"mtp\.\d+\.({PROJECTIONS})", projections))


@dataclass(frozen=True)
class Files:
    """A checkpoint: its config, the tensors on disk and the floats that they stand for."""

    config: dict[str, Any]
    stored: dict[str, Tensor]
    meant: dict[str, Tensor]
    how: Packs
    """Which modules are packed how."""

    def write(self, folder: Path, **config: Any) -> Path:
        _write(folder, self.config | config, self.stored)
        return folder

    def write_meant(self, folder: Path) -> Path:
        """The same model in floats, as nobody packed it."""
        config = {key: value for key, value in self.config.items() if key != "quantization_config"}
        _write(folder, config, self.meant)
        return folder


RELEASES: dict[str, Packs] = {
    "deepseek-ai--DeepSeek-V4-Flash": packs("mxfp4_deepseek", head="same"),
    "sgl-project--DeepSeek-V4-Flash-FP8": packs("fp8_powers", head="same"),
    "nvidia--DeepSeek-V4-Flash-NVFP4": (
        *packs("nvfp4_modelopt"),
        *(pack for pack in packs("mxfp4_deepseek", head="same") if pack[0].startswith("mtp")),
    ),
}
"""Which modules published checkpoints pack how, by the beginning of their config's name in tests/data/configs."""


def write_release(folder: Path, name: str) -> Files:
    """Writes a checkpoint with the config of a published one, which has small sizes and the entries of four layers."""
    configs = Path(__file__).parents[1] / "data" / "configs"
    config = json.loads((configs / f"{name}_config.json").read_text())
    made = make(RELEASES[name], section=config["quantization_config"], **config)
    made.write(folder, **config)
    beside = configs / f"{name}_hf_quant_config.json"
    if beside.exists():
        (folder / "hf_quant_config.json").write_text(beside.read_text())
    return made


def make(
    how: Packs,
    *,
    head: bool = True,
    section: dict[str, Any] = FP8,
    ignore: list[str] | None = None,
    seed: int = 0,
    **sizes: Any,
) -> Files:
    """`section` is the quantisation config, with `ignore` in it where there is one."""
    config = CONFIG | sizes
    floats = tensors(config, seed, head=head)
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, weight in floats.items():
        module = name.removesuffix(".weight")
        kind = next((kind for pattern, kind in how if re.fullmatch(pattern, module)), None)
        if kind is None or not name.endswith(".weight"):
            keeps = not weight.is_floating_point() or "hc_" in name
            stored[name] = weight if keeps else weight.bfloat16()
            meant[name] = stored[name].float() if weight.is_floating_point() else weight
            continue
        parts = packing.pack(weight, kind)
        stored |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
        if kind == "nvfp4_modelopt":
            stored[f"{module}.input_scale"] = torch.tensor(0.5)
        meant[name] = packing.unpacked(kind, parts, tuple(weight.shape))
    section = section | ({} if ignore is None else {"ignore": ignore})
    return Files(config | {"quantization_config": section}, stored, meant, how)


def _write(folder: Path, config: dict[str, Any], stored: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / ONE)


def tensors(config: dict[str, Any], seed: int = 0, *, head: bool = True) -> dict[str, Tensor]:
    """Every tensor of such a model, random, in float32."""
    draw = _Draw(torch.Generator().manual_seed(seed))
    size, vocab = config["hidden_size"], config["vocab_size"]
    found = {
        "embed.weight": draw.wide(vocab, size),
        "head.weight": draw(vocab, size),
        "norm.weight": draw.norm(size),
    }
    found |= _collapse(draw, config, "")
    for layer in range(config["num_hidden_layers"]):
        ratio = config["compress_ratios"][layer]
        hashed = layer < config["num_hash_layers"]
        found |= _layer(draw, config, f"layers.{layer}.", ratio, hashed)
    for layer in range(config["num_nextn_predict_layers"] if head else 0):
        prefix = f"mtp.{layer}."
        found |= _layer(draw, config, prefix, 0, hashed=False) | _collapse(draw, config, prefix)
        found |= {f"{prefix}{name}.weight": draw(size, size) for name in ("e_proj", "h_proj")}
        found |= {f"{prefix}{name}.weight": draw.norm(size) for name in ("enorm", "hnorm", "norm")}
        found |= {
            f"{prefix}emb.tok_emb.weight": found["embed.weight"],
            f"{prefix}head.weight": found["head.weight"],
        }
    return found


class _Draw:
    """Random weights far from neutral values, so that one that is forgotten shows."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __call__(self, *shape: int) -> Tensor:
        return self.wide(*shape) / shape[-1] ** 0.5

    def wide(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def norm(self, size: int) -> Tensor:
        return 0.5 + torch.rand(size, generator=self.generator)

    def ids(self, rows: int, count: int, below: int) -> Tensor:
        return torch.rand(rows, below, generator=self.generator).argsort(-1)[:, :count].contiguous()


def _collapse(draw: _Draw, config: dict[str, Any], prefix: str) -> dict[str, Tensor]:
    count, size = config["hc_mult"], config["hidden_size"]
    return {
        f"{prefix}hc_head_fn": draw(count, count * size),
        f"{prefix}hc_head_base": draw.wide(count),
        f"{prefix}hc_head_scale": draw.norm(1),
    }


def _layer(draw: _Draw, config: dict[str, Any], prefix: str, ratio: int, hashed: bool) -> dict[str, Tensor]:
    size, count = config["hidden_size"], config["hc_mult"]
    found = {f"{prefix}{part}_norm.weight": draw.norm(size) for part in ("attn", "ffn")}
    mixes = (2 + count) * count
    for part in ("attn", "ffn"):
        found[f"{prefix}hc_{part}_fn"] = draw(mixes, count * size)
        found[f"{prefix}hc_{part}_base"] = draw.wide(mixes)
        found[f"{prefix}hc_{part}_scale"] = draw.norm(3)
    found |= {f"{prefix}attn.{name}": weight for name, weight in _attention(draw, config, ratio).items()}
    return found | {f"{prefix}ffn.{name}": weight for name, weight in _experts(draw, config, hashed).items()}


def _attention(draw: _Draw, config: dict[str, Any], ratio: int) -> dict[str, Tensor]:
    size, dim, heads = config["hidden_size"], config["head_dim"], config["num_attention_heads"]
    rank, groups, out = config["q_lora_rank"], config["o_groups"], config["o_lora_rank"]
    found = {
        "wq_a.weight": draw(rank, size),
        "q_norm.weight": draw.norm(rank),
        "wq_b.weight": draw(heads * dim, rank),
        "wkv.weight": draw(dim, size),
        "kv_norm.weight": draw.norm(dim),
        "wo_a.weight": draw(groups * out, heads * dim // groups),
        "wo_b.weight": draw(size, groups * out),
        "attn_sink": draw.wide(heads),
    }
    if ratio:
        found |= _compressor(draw, "compressor.", size, dim, ratio)
    if ratio == 4:
        heads, dim = config["index_n_heads"], config["index_head_dim"]
        found["indexer.wq_b.weight"] = draw(heads * dim, rank)
        found["indexer.weights_proj.weight"] = draw(heads, size)
        found |= _compressor(draw, "indexer.compressor.", size, dim, ratio)
    return found


def _compressor(draw: _Draw, prefix: str, size: int, dim: int, ratio: int) -> dict[str, Tensor]:
    width = (2 if ratio == 4 else 1) * dim
    return {
        f"{prefix}wkv.weight": draw(width, size),
        f"{prefix}wgate.weight": draw(width, size),
        f"{prefix}ape": draw.wide(ratio, width),
        f"{prefix}norm.weight": draw.norm(dim),
    }


def _experts(draw: _Draw, config: dict[str, Any], hashed: bool) -> dict[str, Tensor]:
    size, inner, count = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    found = {"gate.weight": draw(count, size)}
    if hashed:
        found["gate.tid2eid"] = draw.ids(config["vocab_size"], config["num_experts_per_tok"], count)
    else:
        found["gate.bias"] = draw.wide(count) / 8
    for expert in [f"experts.{e}" for e in range(count)] + ["shared_experts"]:
        found[f"{expert}.w1.weight"] = draw(inner, size)
        found[f"{expert}.w2.weight"] = draw(size, inner)
        found[f"{expert}.w3.weight"] = draw(inner, size)
    return found
