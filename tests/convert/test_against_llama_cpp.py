"""Headlong and llama.cpp on the same GGUF file: the same greedy tokens, and drafts that are worth the same."""

import shutil

import pytest

from headlong import LLM, SamplingParams
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.source import EMBEDDED
from headlong.convert.to_gguf import to_gguf
from support import tiny
from support.gguf_models import repacked
from support.llama_cpp import Reply, generate

pytest.importorskip("xllamacpp", reason="xllamacpp (llama.cpp) is not installed")

PROMPTS = (
    "Write a short story about a lighthouse keeper and a lost whale.",
    "Write a short story about two friends who build a kite.",
    "Explain how bees make honey to a child.",
    "Explain gravity to a child.",
    "Give me three tips for growing tomatoes.",
    "Write a short poem about the first snow.",
    "Write a letter to a teacher to say thank you.",
    "Write a dialogue between the sun and the moon.",
)
LENGTH, DRAFTS = 120, 3
NEAR_TIE = 0.05
"""Of log-probabilities: llama.cpp rounds activations to eight bits, which decides such ties either way."""


@pytest.mark.parametrize("type", ["q8_0", "f16"])
def test_tokens_and_acceptance(tmp_path, type):
    path = tmp_path / "tale.gguf"
    to_gguf(Checkpoint.open(EMBEDDED), path, type=type)
    llm = LLM(path, device="cpu")
    prompts = [llm.service.text.encode_chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    params = SamplingParams(max_tokens=LENGTH, draft_tokens=DRAFTS, logprobs=2)
    ours = llm.generate([list(prompt) for prompt in prompts], params)
    theirs = generate(path, [list(prompt) for prompt in prompts], LENGTH, DRAFTS, ignore_eos=False)
    # Texts that part at a near-tie are other texts from there on, with an acceptance of their own.
    equal = [pair for pair in zip(ours, theirs, strict=True) if _agree(*pair)]
    assert len(equal) >= len(PROMPTS) // 2, "near-ties alone cannot part most of the texts"
    mine = sum(c.stats.accepted for c, _ in equal) / sum(c.stats.drafted for c, _ in equal)
    other = sum(r.accepted for _, r in equal) / sum(r.drafted for _, r in equal)
    print(f"{type}: {len(equal)} of {len(PROMPTS)} texts equal; accepted {mine:.3f}, llama.cpp {other:.3f}")
    assert abs(mine - other) < 0.02


SIZES = {
    # Rows of 256, what K-quants need.
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "q_lora_rank": 256,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "vocab_size": 8192,
}


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0"])
def test_packed_latents(tmp_path, kind):
    """Files of random codes, from the gguf package's writer: the token after each prompt. llama.cpp rounds activations
    to eight bits, which may choose another expert and so another token, for a few of them."""
    made = tiny.make(tmp_path / "made", "deepseek_v3", seed=5, **SIZES)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, made.folder)
    to_gguf(Checkpoint.open(made.folder), tmp_path / "floats.gguf", type="f32")
    repacked(tmp_path / "floats.gguf", tmp_path / "packed.gguf", kind)
    llm = LLM(tmp_path / "packed.gguf", device="cpu", cache_tokens=2048, max_context=128)
    prompts = [tiny.random_tokens(8192, 24, seed=seed) for seed in range(12)]
    ours = llm.generate([list(prompt) for prompt in prompts], SamplingParams(max_tokens=1))
    theirs = generate(tmp_path / "packed.gguf", prompts, 1)
    equal = [tuple(c.token_ids) == tuple(r.tokens) for c, r in zip(ours, theirs, strict=True)]
    assert sum(equal) >= 10, equal


def _agree(mine, other: Reply) -> bool:
    """True if all tokens are the same; false if they part at a near-tie; any other difference is an error."""
    for place, (token, wanted) in enumerate(zip(mine.token_ids, other.tokens, strict=False)):
        if token != wanted:
            (_, best), (_, second) = mine.logprobs[place].top[:2]
            assert best - second < NEAR_TIE, f"token {place}: {token} against llama.cpp's {wanted}"
            return False
    assert abs(len(mine.token_ids) - len(other.tokens)) <= 1, (
        "one of the two counts the token that ends the text"
    )
    return True
