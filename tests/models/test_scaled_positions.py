"""Every scaling of rotary frequencies in the families whose heads turn in part, against transformers: Qwen3.5 and
Qwen3-Next, beside DeltaNet layers, with drafts by the head."""

import pytest
import torch

from headlong import LLM, SamplingParams
from support import tiny
from support.steps import Driver, load
from support.tiny import random_tokens

ORIGINAL, LENGTH = 16, 41
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
ROPES = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": YARN | {"beta_fast": 4.0, "beta_slow": 0.5},
    "yarn, its own magnitude": YARN | {"attention_factor": 1.7},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 1.5, 2.5, 4.0],
        "original_max_position_embeddings": ORIGINAL,
    },
}
"""Of four frequencies: half of heads of sixteen turns. LongRoPE's long factors serve, as the context is longer."""
CASES = [
    pytest.param(family, rope, id=f"{family}: {name}")
    for family in ("dense", "moe", "next")
    for name, rope in ROPES.items()
    if family == "dense" or name in ("yarn", "longrope")
]


@pytest.mark.parametrize(("family", "rope"), CASES)
def test_logits_and_drafts(tmp_path, family, rope):
    rope = rope | {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    made = tiny.make(tmp_path / "made", family, seed=3, rope=rope, vocab_size=12)
    plain = tiny.make(tmp_path / "plain", family, seed=3, vocab_size=12)
    script = random_tokens(12, LENGTH + 1, seed=1)
    wanted = made.forward(script[:LENGTH])[1]
    if (
        rope["rope_type"] != "dynamic"
    ):  # whose frequencies are those of the model up to the length it was trained on
        assert not torch.allclose(wanted, plain.forward(script[:LENGTH])[1], atol=1e-2)
    driver = Driver(load(made.folder))
    driver.open("a", script)
    torch.testing.assert_close(driver.feed("a", [17, 24]).logits, wanted, atol=1e-4, rtol=0.0)
    llm = LLM(made.folder, device="cpu", mtp="on", cache_tokens=1024, max_context=128)
    runs = [
        llm.generate(
            script[:30], SamplingParams(max_tokens=12, ignore_eos=True, draft_tokens=drafts)
        ).token_ids
        for drafts in (0, 3)
    ]
    assert runs[0] == runs[1]
