"""Prompt = decode on a GPU, bit for bit: a token's hidden state and logits are the same whether it was read in a
prompt, in any chunks, or decoded; in models whose weights are large enough for the kernels of many tokens."""

import pytest
import torch

from headlong.checkpoint.checkpoint import Checkpoint
from headlong.config import EngineConfig
from headlong.engine.build import build, survey
from headlong.ops.linear import prompt_gemm
from headlong.ops.moe import prompt_experts
from support import tiny
from support.steps import Driver
from support.tiny import FULL, LINEAR, random_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES = {
    "vocab_size": 500,
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_hidden_layers": 2,
    "layer_types": [LINEAR, FULL],
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 2048,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}
READ, DECODED = 1180, 60
CUTS = [[READ], [700, 480], [64] * 18 + [28], [1, 512, 600, 67]]


@pytest.mark.parametrize("family", ["dense", "moe"])
def test_a_token_read_in_a_prompt_has_the_bits_of_a_decoded_one(family, tmp_path, monkeypatch):
    tiny.make(tmp_path, family, seed=3, **SIZES, **(EXPERTS if family == "moe" else {}))
    config = EngineConfig(dtype="bfloat16", device="cuda")
    built = build(survey(Checkpoint.open(tmp_path), config), device=torch.device("cuda"))
    served = {"sums": 0, "experts": 0}

    def counted(name, honest):
        def call(*args):
            served[name] += 1
            return honest(*args)

        return call

    monkeypatch.setattr(prompt_gemm, "sums", counted("sums", prompt_gemm.sums))
    monkeypatch.setattr(prompt_experts, "multiply", counted("experts", prompt_experts.multiply))
    driver = Driver(built, max_rows=2, context=READ + 256)
    script = random_tokens(500, READ + 1, seed=1)

    def told(cuts, decoded=0):
        driver.open("row", script)
        parts = [driver.feed("row", cuts)]
        if decoded:
            parts.append(driver.decode("row", decoded))
        driver.close("row")
        return [torch.cat([getattr(part, name) for part in parts]) for name in ("hidden", "logits")]

    expected = told([56] * ((READ - DECODED) // 56), DECODED)
    assert not any(served.values()) and len(expected[0]) == READ
    for cuts in CUTS:
        found = told(cuts)
        for a, b in zip(found, expected, strict=True):
            assert torch.isfinite(a).all() and torch.equal(a, b), cuts
    if torch.cuda.get_device_capability() == (9, 0):
        assert served["sums"] and (family == "dense" or served["experts"])
