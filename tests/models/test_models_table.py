"""docs/models.md is what the registry says, every model in it is tested, and what is not served is told the nearest."""

from pathlib import Path

import pytest
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

from headlong.cli import models_table
from headlong.errors import CheckpointError, ConfigError
from headlong.models import registry
from support.tiny import FAMILIES


def test_the_page_is_current():
    written = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    assert written == models_table.page(), "run python -m headlong.cli.models_table"


def test_every_model_has_a_row_and_an_oracle():
    tested = {family.model_type or family.config.model_type for family in FAMILIES.values()}
    tested |= {DeepseekV4Config.model_type, "deepseek_ref"}  # support.tiny_v4, support.deepseek_v4_files
    for kind, family in registry.FAMILIES.items():
        assert family.releases and f"| `{kind}` |" in models_table.page()
        assert kind in tested or f"{kind}_text" in tested


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "qwen3_6"}, "qwen3_5"),
        ({"model_type": "glm5_moe"}, "glm4_moe"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "qwen3_moe"),
        ({"model_type": "hy_v3", "n_routed_experts": 8}, "glm4_moe"),
        ({"model_type": "qwen3_5_moe_vl", "text_config": {"linear_num_value_heads": 4}}, "qwen3_5_moe"),
        ({"model_type": "nemotron_h", "mamba_num_heads": 8}, "qwen3_next"),
        ({"model_type": "wrapped", "text_config": {"num_experts": 4}}, "qwen3_moe"),
        ({"model_type": "longcat_flash", "kv_lora_rank": 512}, "deepseek_v3"),
        ({"model_type": "phi"}, "llama"),
        ({"model_type": 7, "text_config": 5}, "llama"),
    ],
)
def test_a_refusal_names_the_nearest(config, named):
    with pytest.raises(
        ConfigError, match=rf"is not supported; Headlong serves .*; the nearest.* is {named}$"
    ):
        registry.find(config)


def test_so_does_that_of_a_gguf_file():
    with pytest.raises(CheckpointError, match=r"Headlong reads .*; the nearest by name is qwen3moe$"):
        registry.find_gguf({"general.architecture": "qwen2moe"})
