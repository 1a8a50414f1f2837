"""Random tiny Llama checkpoints on disk, each with the transformers model that wrote it and a head like it.

Knows nothing of Headlong but the names on disk.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama as llama
from transformers.models.llama.configuration_llama import LlamaConfig

from support.tiny import ReferenceHead, Tiny, _Family, randomise, tensors, write

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILY = _Family(LlamaConfig, llama.LlamaForCausalLM, llama.LlamaDecoderLayer, llama.LlamaRMSNorm, SIZES)
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def make(
    folder: Path,
    *,
    seed: int = 0,
    head: bool = True,
    rope: dict[str, Any] = DEFAULT_ROPE,
    rope_factors: Tensor | None = None,
    **sizes: Any,
) -> Tiny:
    """Builds a random model, writes it to `folder` and returns both. `rope_factors` are stored as a tensor, and
    divide the frequencies of the transformers model too."""
    generator = torch.Generator().manual_seed(seed)
    config = LlamaConfig(**(SIZES | sizes), rope_parameters=rope)
    model = llama.LlamaForCausalLM(config)
    reference_head = ReferenceHead(FAMILY, config) if head else None
    for module in (model, reference_head):
        if module is not None:
            randomise(module.eval(), generator)
            _centre_norms_on_one(module)
    tiny = Tiny(folder, model, reference_head)
    found = tensors(tiny)
    if rope_factors is not None:
        model.model.rotary_emb.inv_freq.div_(rope_factors)
        found["rope_freqs.weight"] = rope_factors
    write(folder, config.to_dict(), found)
    return tiny


@torch.no_grad()
def _centre_norms_on_one(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, llama.LlamaRMSNorm):
            part.weight.add_(1.0)
