"""Models of a shape with random weights: packed as the shape's config says, and what a step reads of them counted."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from headlong.layers.mlp import MoeMlp
from random_weights import Packing, RandomWeights, random_model
from step_floor import context_bytes

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 64, "hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "qk_rope_head_dim": 8,
    "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 32, "n_routed_experts": 9, "moe_intermediate_size": 64,
    "index_head_dim": 16, "index_n_heads": 4, "index_topk": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("shape") / "small.json"
    shape = json.loads((BENCHMARKS / "shapes" / "deepseek-v4-flash.json").read_text())
    path.write_text(json.dumps(shape | SMALL))
    return random_model(path, torch.float32, CPU, layers=4)


def test_experts_are_looked_up_in_a_table_of_different_ones(made):
    mlp = made.built.model.layers[0].mlp
    assert isinstance(mlp, MoeMlp) and mlp.table_VA is not None
    assert mlp.table_VA.shape == (64, 6) and bool((mlp.table_VA < 9).all())
    assert all(len(set(row)) == 6 for row in mlp.table_VA.tolist())


def test_experts_of_one_token_are_counted_as_they_are_stored():
    weights = RandomWeights(torch.bfloat16, CPU, Packing("fp8", "mxfp4"), num_active=6)
    assert len(weights.experts("layers.3.mlp.experts.gate_up_proj", 9, 128, 128)) == 9
    assert weights.nbytes == 6 * 128 * 128 * 17 // 32
    counted = {
        "layers.3.self_attn.q_a_proj.weight": 1,
        "layers.3.self_attn.compressor.kv_proj.weight": 2,
        "layers.3.mlp.gate.weight": 2,
        "mtp.layers.0.self_attn.q_a_proj.weight": 2,
        "embed_tokens.weight": 0,
    }
    for name, each in counted.items():
        before = weights.nbytes
        weights.matrix(name, 128, 128)
        assert weights.nbytes - before == each * 128 * 128, name


def test_what_is_read_of_a_context(made):
    """Windows in float32; of ratio 4 the chosen entries and all of the indexer's, of ratio 128 all."""
    windows, entries = 4 * 128 * 32 * 4, (16 * 32 + 256 * 16 + 8 * 32) * 4
    assert context_bytes(made.built, 1024) == windows + entries
