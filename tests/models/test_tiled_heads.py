"""DeltaNet value heads stored tiled, as GGUF files have them: the model is the one with grouped heads."""

import pytest
import torch

from headlong.errors import ConfigError
from headlong.models import registry
from support import tiny
from support.steps import Driver, load
from support.tiny import random_tokens

HEADS = {"linear_num_key_heads": 3, "linear_num_value_heads": 6}
KEY_SIZE = 2 * 3 * tiny.SIZES["linear_key_head_dim"]
VALUE_DIM = tiny.SIZES["linear_value_head_dim"]


def tiled(name, weight):
    """One tensor with its value heads moved from h // 2 to h % 3."""
    kind = name.rpartition("linear_attn.")[2]

    def moved(rows, width):
        return rows.unflatten(0, (3, 2, width)).transpose(0, 1).flatten(0, 2)

    if kind in ("in_proj_qkv.weight", "conv1d.weight"):
        return torch.cat([weight[:KEY_SIZE], moved(weight[KEY_SIZE:], VALUE_DIM)])
    if kind == "in_proj_z.weight":
        return moved(weight, VALUE_DIM)
    if kind in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
        return moved(weight, 1)
    if kind == "out_proj.weight":
        return moved(weight.t(), VALUE_DIM).t().contiguous()
    return weight


@pytest.mark.parametrize("dtype", ["float32", "float64"], ids=["native", "reference"])
def test_tiled_heads_are_the_grouped_ones(tmp_path, dtype):
    made = tiny.make(tmp_path / "grouped", seed=5, **HEADS)
    weights = {name: tiled(name, weight) for name, weight in tiny.tensors(made).items()}
    config = tiny.read_config(made.folder) | {"linear_value_heads_tiled": True}
    tiny.write(tmp_path / "tiled", config, weights)
    script = random_tokens(made.vocab_size, 30, seed=1)
    found = []
    for folder in ("grouped", "tiled"):
        driver = Driver(load(tmp_path / folder, dtype))
        driver.open("a", script)
        first = driver.feed("a", [7, 13])
        drafted = driver.step(driver.draft("a", 4, 2, seed=1))["a"]
        found.append(torch.cat([first.logits, drafted.logits, driver.decode("a", 3).logits]))
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=0.0)
    expected = made.forward(script[:26])[1]
    torch.testing.assert_close(found[1].float(), expected, atol=1e-4, rtol=0.0)


def test_where_tiled_heads_cannot_be(tmp_path):
    config = tiny.read_config(tiny.make(tmp_path, "next").folder)
    for model_type, value in (("qwen3_next", True), ("qwen3_5_moe", "yes")):
        wrong = config | {"model_type": model_type, "linear_value_heads_tiled": value}
        with pytest.raises(ConfigError, match=r"config\.json.*linear_value_heads_tiled"):
            registry.read_config(wrong)
