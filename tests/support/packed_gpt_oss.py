"""gpt-oss as it is released: experts in MXFP4 blocks, gates and ups by turns, all else in floats."""

from pathlib import Path
from typing import Any

import torch

from support import packing, tiny

SIZES: dict[str, Any] = {"head": False, "hidden_size": 64, "intermediate_size": 96, "sliding_window": 9}
QUANTIZATION = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}


@torch.no_grad()
def make(folder: Path, **sizes: Any) -> tiny.Tiny:
    """Writes it, and gives the model of transformers what the blocks stand for."""
    made = tiny.make(folder / "plain", "gpt_oss", **SIZES | sizes)
    found = tiny.tensors(made)
    for layer, decoder in enumerate(made.model.model.layers):
        for projection in ("gate_up_proj", "down_proj"):
            stem = f"model.layers.{layer}.mlp.experts.{projection}"
            weights = found.pop(stem).transpose(1, 2)
            parts = [packing.pack(weight.contiguous(), "mxfp4_blocks") for weight in weights]
            for part in ("blocks", "scales"):
                found[f"{stem}_{part}"] = torch.stack([own[part] for own in parts])
            meant = [
                packing.unpacked("mxfp4_blocks", own, tuple(weight.shape))
                for own, weight in zip(parts, weights, strict=True)
            ]
            getattr(decoder.mlp.experts, projection).copy_(torch.stack(meant).transpose(1, 2))
    config = tiny.read_config(folder / "plain") | {"quantization_config": QUANTIZATION}
    tiny.write(folder / "packed", config, {name: w.contiguous() for name, w in found.items()})
    return tiny.Tiny(folder / "packed", made.model, None)


def real_config() -> dict[str, Any]:
    """What the config.json of gpt-oss-20b says."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "output_router_logits": False,
        "pad_token_id": 199999,
        "quantization_config": QUANTIZATION,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 201088,
    }
