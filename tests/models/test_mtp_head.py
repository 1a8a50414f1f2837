"""The MTP head against a slow one on transformers' modules, which reads every pair again for each draft."""

import pytest
import torch

from support import tiny
from support.steps import Chunk, Driver, load
from support.tiny import FULL, LINEAR, random_tokens

TOLERANCE = 1e-4
DEPTH = 4
CASES = {
    "dense": ("dense", {}),
    "dense, odd": (
        "dense",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 20,
            "rotary": 1.0,
            "hidden_size": 36,
            "tie_word_embeddings": True,
        },
    ),
    "dense, biased": ("dense", {"attention_bias": True, "layer_types": [FULL, FULL, LINEAR]}),
    "dense, no attention of its own": ("dense", {"layer_types": [LINEAR] * 3}),
    "wrapped": ("dense", {"wrapped": True}),
    "moe": ("moe", {"experts": "apart"}),
    "moe, one active": ("moe", {"num_experts": 5, "num_experts_per_tok": 1}),
    # The head's block is sparse whatever the target's layers are.
    "next": ("next", {"mlp_only_layers": [0, 1], "norm_topk_prob": False}),
    "two layers": ("dense", {"head": 2}),
    "three layers, moe": ("moe", {"head": 3}),
    "three layers, llama": ("llama", {"head": 3}),
}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def made(request, tmp_path_factory):
    family, changes = request.param
    return tiny.make(tmp_path_factory.mktemp("tiny"), family, seed=11, **changes)


def slow_drafts(made, tokens, hidden, depth):
    """`tokens` y[1..p], `hidden` h[0..p-1]; the carry, and the head run again on its own token and output: all pairs
    by the layer for that depth."""
    drafts, carry = [], None
    for number in range(depth):
        out = made.pairs(tokens, hidden, number % len(made.head.layers))[-1]
        carry = out if carry is None else carry
        drafts.append(int(made.model.lm_head(out).argmax()))
        tokens, hidden = [*tokens, drafts[-1]], torch.cat([hidden, out[None]])
    return carry, drafts


def carry_of(driver, row):
    return driver.state.carry_SD[driver.state.rows[row].slot]


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 38])
def test_hidden_states(made, length):
    """Every pair of a prompt, then every pair of plain decoding, in float32."""
    script = random_tokens(made.vocab_size, length + 4, seed=length)
    driver = Driver(load(made.folder))
    driver.open("a", script)
    driver.feed("a", [length])
    for settled in range(length, length + 3):
        expected = made.pairs(script[1 : settled + 1], made.forward(script[:settled])[0])[-1]
        torch.testing.assert_close(carry_of(driver, "a"), expected, atol=TOLERANCE, rtol=0.0)
        driver.decode("a", 1)


def test_drafts(made):
    """Greedy drafts in float64, where rounding cannot flip a near-tie; the prompt in several chunks."""
    exact, built = made.double(), load(made.folder, "float64")
    with torch.no_grad():
        for seed in range(6):
            length = 1 + seed * 7
            script = random_tokens(made.vocab_size, length + 1, seed=100 + seed)
            carry, expected = slow_drafts(exact, script[1:], exact.forward(script[:length])[0], DEPTH)
            driver = Driver(built)
            driver.open("a", script)
            cuts = [length] if length < 8 else [3, length - 7, 4]
            driver.feed("a", cuts)
            torch.testing.assert_close(carry_of(driver, "a"), carry, atol=TOLERANCE, rtol=0.0)
            assert driver.propose("a", DEPTH) == expected
            assert driver.propose("a", DEPTH) == expected, "drafting changes nothing"


def test_drafts_after_drafts(made):
    """What the head's own passes left in its cache is gone once the target has spoken."""
    exact, driver = made.double(), Driver(load(made.folder, "float64"))
    script = random_tokens(made.vocab_size, 40, seed=3)
    driver.open("a", script)
    driver.feed("a", [14])
    hidden = exact.forward(script)[0]
    with torch.no_grad():
        for depth, accept in ((4, 0), (4, 2), (3, 3), (1, 0), (8, 5)):
            length = driver.length("a")
            _, expected = slow_drafts(exact, script[1 : length + 1], hidden[:length], DEPTH)
            assert driver.propose("a", DEPTH) == expected
            driver.step(driver.draft("a", depth, accept, seed=length))
            assert driver.length("a") == length + 1 + accept


def test_drafts_of_several_rows(made):
    """Rows of different lengths and depths drafted at once get what each gets alone."""
    built = load(made.folder, "float64")
    lengths = {"a": 19, "b": 2, "c": 33}
    scripts = {row: random_tokens(made.vocab_size, n + 1, seed=n) for row, n in lengths.items()}
    together = Driver(built)
    for row, script in scripts.items():
        together.open(row, script)
    together.step(*(Chunk(row, n) for row, n in lengths.items()))
    depths = {"a": 4, "b": 1, "c": 3}
    drafts = together.propose_all(depths)
    for row, script in scripts.items():
        alone = Driver(built)
        alone.open(row, script)
        alone.feed(row, [lengths[row]])
        assert alone.propose(row, depths[row]) == drafts[row]
        assert torch.equal(carry_of(alone, row), carry_of(together, row))
