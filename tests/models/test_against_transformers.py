"""The target against transformers' models, in float32: hidden states and logits, however tokens come."""

import random

import pytest
import torch

from support import tiny
from support.steps import Chunk, Decode, Driver, load
from support.tiny import FULL, LINEAR, random_tokens

TOLERANCE = 1e-4
LENGTH = 41

DENSE = {
    "plain": {},
    "tied": {"tie_word_embeddings": True, "vocab_size": 64},
    "three heads": {
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "rotary": 0.25,
        "hidden_size": 36,
    },
    "five heads": {
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "head_dim": 12,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 5,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 10,
        "linear_conv_kernel_dim": 3,
        "hidden_size": 50,
        "intermediate_size": 70,
        "vocab_size": 131,
    },
    "only linear": {
        "layer_types": [LINEAR] * 4,
        "num_hidden_layers": 4,
        "linear_conv_kernel_dim": 2,
        "linear_num_value_heads": 6,
    },
    "only attention": {
        "layer_types": [FULL] * 3,
        "rotary": 1.0,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 10,
    },
    "biased attention": {"attention_bias": True, "layer_types": [FULL, LINEAR, FULL], "rotary": 1.0},
    "six layers": {
        "num_hidden_layers": 6,
        "layer_types": None,
        "hidden_size": 96,
        "head_dim": 24,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "vocab_size": 300,
        "rms_norm_eps": 1e-5,
    },
    "attention first": {
        "num_hidden_layers": 2,
        "layer_types": [FULL, LINEAR],
        "head_dim": 32,
        "rotary": 0.25,
        "linear_key_head_dim": 24,
        "linear_value_head_dim": 4,
    },
    "wrapped": {"wrapped": True},
    "wrapped and tied": {"wrapped": True, "tie_word_embeddings": True, "head_dim": 18, "rotary": 1.0},
}
MOE = {
    "fused": {},
    "apart": {"experts": "apart", "num_experts": 5, "num_experts_per_tok": 3, "tie_word_embeddings": True},
    "one expert of many": {"num_experts": 11, "num_experts_per_tok": 1, "moe_intermediate_size": 18},
    "every expert": {"num_experts": 3, "num_experts_per_tok": 3, "attention_bias": True},
}
NEXT = {
    "all sparse": {"experts": "apart"},
    "some dense": {"mlp_only_layers": [0], "layer_types": [LINEAR, LINEAR, FULL]},
    "every other": {"decoder_sparse_step": 2, "num_hidden_layers": 4, "layer_types": None},
    "weights not normalised": {
        "norm_topk_prob": False,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 6,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 20,
        "rotary": 1.0,
    },
}
CASES = [
    pytest.param((family, changes), id=f"{family}: {name}")
    for family, cases in (("dense", DENSE), ("moe", MOE), ("next", NEXT))
    for name, changes in cases.items()
]


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """A checkpoint, our model of it, and what transformers makes of a prompt."""
    family, changes = request.param

    made = tiny.make(tmp_path_factory.mktemp("tiny"), family, seed=7, **changes)
    script = random_tokens(made.vocab_size, LENGTH + 1, seed=1)
    return made, load(made.folder), script, made.forward(script[:LENGTH])


def assert_close(result, expected, first=0):
    hidden, logits = (tensor[first : first + len(result.hidden)] for tensor in expected)
    torch.testing.assert_close(result.hidden, hidden, atol=TOLERANCE, rtol=0.0)
    torch.testing.assert_close(result.logits, logits, atol=TOLERANCE, rtol=0.0)


def random_cuts(total, rng):
    cuts = []
    while total:
        cuts.append(rng.randint(1, min(total, 13)))
        total -= cuts[-1]
    return cuts


def test_whole_prompt(case):
    _, built, script, expected = case
    driver = Driver(built)
    driver.open("a", script)
    assert_close(driver.feed("a", [LENGTH]), expected)


def test_chunked_prompt(case):
    _, built, script, expected = case
    for seed in range(2):
        driver = Driver(built)
        driver.open("a", script)
        assert_close(driver.feed("a", random_cuts(LENGTH, random.Random(seed))), expected)


def test_token_by_token(case):
    _, built, script, expected = case
    driver = Driver(built)
    driver.open("a", script)
    assert_close(driver.feed("a", [3]), expected)
    assert_close(driver.decode("a", LENGTH - 3), expected, first=3)


def test_several_rows(case):
    """Rows of different lengths in the same passes: chunks beside decoding rows."""
    made, built, script, expected = case
    driver = Driver(built)
    others = {
        row: random_tokens(made.vocab_size, length + 1, seed=length) for row, length in (("b", 5), ("c", 23))
    }
    driver.open("a", script)
    for row, tokens in others.items():
        driver.open(row, tokens)
    first = driver.step(Chunk("a", 17), Chunk("b", 3), Chunk("c", 20))
    second = driver.step(Chunk("a", 19), Decode("b"), Decode("c"))
    third = driver.step(Chunk("a", 5), Decode("b"), Chunk("c", 2))
    want = {"a": expected} | {row: made.forward(tokens[:-1]) for row, tokens in others.items()}
    for row, whole in want.items():
        at = 0
        for results in (first, second, third):
            assert_close(results[row], whole, at)
            at += len(results[row].hidden)
        assert at == len(whole[0])
