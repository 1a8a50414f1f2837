"""Which of the served models is nearest to one that is not, for the sentence that refuses it.

Judged by what its config.json has (latent attention, recurrent layers, experts), then by its name.
"""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

LIKE = 0.75
"""How alike two names must be, of 1."""
RECURRENT = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
TRAITS = (
    ("latent attention", ("kv_lora_rank",), ("deepseek_v3",)),
    ("recurrent layers", ("linear_num_value_heads", "mamba_num_heads", "ssm_cfg"), RECURRENT),
    ("experts", ("n_routed_experts",), ("glm4_moe",)),
    ("experts", ("num_experts", "num_local_experts"), ("qwen3_moe",)),
)
"""What a config may have, the fields that tell it, and the served models that have it too."""


def nearest(config: Mapping[str, Any], known: Collection[str]) -> str:
    """One clause that names it."""
    text = config.get("text_config", config)
    fields = text if isinstance(text, Mapping) else config
    for trait, names, models in TRAITS:
        served = [model for model in models if model in known]
        if served and any(fields.get(name) is not None for name in names):
            return f"the nearest, with {trait} too, is {_alike(config, served) or served[0]}"
    if (found := _alike(config, known)) is not None:
        return f"the nearest by name is {found}"
    return "the nearest, if it is a plain decoder, is llama"


def _alike(config: Mapping[str, Any], known: Collection[str]) -> str | None:
    found = get_close_matches(str(config.get("model_type")), known, 1, LIKE)
    return found[0] if found else None
