"""Files that we convert, read by llama.cpp: the greedy tokens of transformers, and drafts by the MTP head."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.source import EMBEDDED
from headlong.convert.to_gguf import to_gguf
from support import packed_gpt_oss, tiny, tiny_llama
from support.llama_cpp import generate

pytest.importorskip("xllamacpp", reason="xllamacpp (llama.cpp) is not installed")

PROMPTS = (
    "Write a short story about a shy dragon who learns to share.",
    "Explain rain to a child.",
    "Give me three tips for sleeping better.",
)
LENGTH = 48


@pytest.fixture(scope="module")
def expected() -> list[tuple[list[int], list[int]]]:
    """Each prompt's ids and what transformers makes of them in float32."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    found = []
    for prompt in PROMPTS:
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        reply = model.generate(
            torch.tensor([ids]), max_new_tokens=LENGTH, do_sample=False, repetition_penalty=1.0
        )
        found.append((ids, reply[0, len(ids) :].tolist()))
    return found


@pytest.mark.parametrize("type", ["q8_0", "f16"])
def test_embedded_model(expected: list[tuple[list[int], list[int]]], tmp_path: Path, type: str) -> None:
    path = tmp_path / "tale.gguf"
    to_gguf(Checkpoint.open(EMBEDDED), path, type=type)
    replies = generate(path, [ids for ids, _ in expected], LENGTH, draft_tokens=3)
    assert [reply.tokens for reply in replies] == [tokens for _, tokens in expected]
    # The head is worth having there too: at random one draft in 8192 would be right.
    assert sum(reply.accepted for reply in replies) > 0.5 * sum(reply.drafted for reply in replies) > 0


def greedy(made: tiny.Tiny, prompt: list[int], length: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(int(made.forward(tokens)[1][-1].argmax()))
    return tokens[len(prompt) :]


def with_tokenizer(made: tiny.Tiny) -> tiny.Tiny:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, made.folder)
    return made


@pytest.mark.parametrize("family", ["dense", "moe"])
def test_tiny_models_with_more_value_heads_than_key_heads(tmp_path: Path, family: str) -> None:
    """Random weights, where a swapped head, expert or half would change every token."""
    sizes = {"vocab_size": 8192, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    made = with_tokenizer(tiny.make(tmp_path / "tiny", family, seed=3, linear_num_value_heads=6, **sizes))
    to_gguf(Checkpoint.open(made.folder), tmp_path / "out.gguf", type="f32")
    prompt = tiny.random_tokens(8192, 9, seed=1)
    (reply,) = generate(tmp_path / "out.gguf", [prompt], 24, draft_tokens=3)
    assert reply.tokens == greedy(made, prompt, 24)
    assert reply.drafted > 0


@pytest.mark.parametrize("rope_type", ["default", "llama3"])
def test_tiny_llama(tmp_path: Path, rope_type: str) -> None:
    rope = {
        "rope_type": rope_type,
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    sizes = {"vocab_size": 8192, "head_dim": 16, "attention_bias": True}
    made = with_tokenizer(tiny_llama.make(tmp_path / "tiny", seed=4, head=False, rope=rope, **sizes))
    to_gguf(Checkpoint.open(made.folder), tmp_path / "out.gguf", type="f32")
    prompt = tiny.random_tokens(8192, 40, seed=2)
    (reply,) = generate(tmp_path / "out.gguf", [prompt], 24)
    assert reply.tokens == greedy(made, prompt, 24)


@pytest.mark.parametrize("packed", [True, False])
def test_tiny_gpt_oss(tmp_path: Path, packed: bool) -> None:
    """A prompt longer than the window. Experts in MXFP4, which llama.cpp multiplies by rounded activations; or in
    float32, past the length that YaRN stretches: there llama.cpp widens the range of frequencies to whole numbers,
    which gpt-oss does not, so it ends a little before the sixth."""
    length, sizes = 48, {"vocab_size": 8192, "head_dim": 64, "head": False}
    if packed:
        made = packed_gpt_oss.make(tmp_path, seed=4, **sizes)
    else:
        theta = (length / (2.0 * math.pi)) ** (32 / 5.9999)
        rope = packed_gpt_oss.real_config()["rope_scaling"] | {"rope_theta": theta}
        rope |= {"original_max_position_embeddings": length}
        made = tiny.make(tmp_path / "tiny", "gpt_oss", seed=4, rope=rope, **sizes)
    to_gguf(Checkpoint.open(with_tokenizer(made).folder), tmp_path / "out.gguf", type="f32")
    prompt = tiny.random_tokens(8192, 40, seed=2)
    (reply,) = generate(tmp_path / "out.gguf", [prompt], 24)
    assert reply.tokens == greedy(made, prompt, 24)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe", "mistral", "glm4_moe"])
def test_tiny_families(tmp_path: Path, family: str) -> None:
    """Of random weights; the head of GLM is in the file too."""
    sizes = {"vocab_size": 8192, "head": family == "glm4_moe"}
    made = with_tokenizer(tiny.make(tmp_path / "tiny", family, seed=4, **sizes))
    to_gguf(Checkpoint.open(made.folder), tmp_path / "out.gguf", type="f32")
    prompt = tiny.random_tokens(8192, 40, seed=2)
    (reply,) = generate(tmp_path / "out.gguf", [prompt], 24)
    assert reply.tokens == greedy(made, prompt, 24)


DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("deepseek_v3", {"rope": DEEPSEEK_YARN, "head": True}),
        ("deepseek_v3", {"rope": DEEPSEEK_YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}}),
        ("deepseek_v3", {"rope_interleave": False, "first_k_dense_replace": 2}),
        ("deepseek_v3", {"q_lora_rank": None}),
        ("kimi_k2", {"rope": DEEPSEEK_YARN | {"factor": 16.0}}),
        ("glm4_moe_lite", {"head": True}),
    ],
    ids=["yarn, head", "another magnitude", "halves", "queries at once", "kimi", "glm flash, head"],
)
def test_tiny_models_with_latents(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    """Of random weights; the head drafts there too. Of a seed at which no two experts are nearly as good."""
    made = with_tokenizer(
        tiny.make(
            tmp_path / "tiny",
            family,
            seed=5,
            **{"vocab_size": 8192, "qk_rope_head_dim": 32, "head": False} | changes,
        )
    )
    done = to_gguf(Checkpoint.open(made.folder), tmp_path / "out.gguf", type="f32")
    assert not done.notes
    prompt = tiny.random_tokens(8192, 100, seed=2)
    drafts = 3 if changes.get("head") else 0
    (reply,) = generate(tmp_path / "out.gguf", [prompt], 24, draft_tokens=drafts)
    assert reply.tokens == greedy(made, prompt, 24)
    assert bool(reply.drafted) == bool(drafts)
