"""Forward k drafts, commit j: from there on everything is as if only the j had ever been seen, bit for bit.

The truth is one row decoded alone, token by token, without drafts. The trial has several rows in the same
passes, prompts in chunks, random depths and random verdicts, over a state full of NaN.
"""

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support import tiny, tiny_v4
from support.steps import Chunk, Decode, Driver, kept, load, poison
from support.tiny import FULL, LINEAR, random_tokens

ROWS = ("a", "b", "c")
LENGTH = 64
MODELS = {
    "hybrid": ("dense", {}),
    "odd": (
        "dense",
        {
            "layer_types": [FULL, LINEAR],
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 20,
            "hidden_size": 36,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 10,
            "linear_value_head_dim": 6,
            "linear_conv_kernel_dim": 2,
        },
    ),
    "latent": ("deepseek_v3", {"num_hidden_layers": 2}),
    "compressed": (
        "deepseek_v4",
        {
            "compress_ratios": [4, 128, 0],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 7},
            "hc_sinkhorn_iters": 3,
        },
    ),
    "moe": ("moe", {"layer_types": [LINEAR, FULL], "num_hidden_layers": 2, "linear_conv_kernel_dim": 3}),
}


@dataclass
class Truth:
    """A row decoded alone: hidden states and logits of each position, and the state after each length."""

    script: list[int]
    hidden: torch.Tensor
    logits: torch.Tensor
    states: list[dict[str, torch.Tensor]]


def decode_alone(built, script) -> Truth:
    driver = Driver(built)
    driver.open("alone", script)
    results, states = [driver.feed("alone", [1])], [{}]
    states.append(kept(driver, "alone"))
    while driver.length("alone") < LENGTH:
        results.append(driver.decode("alone", 1))
        states.append(kept(driver, "alone"))
    hidden, logits = (torch.cat([getattr(r, name) for r in results]) for name in ("hidden", "logits"))
    return Truth(script, hidden, logits, states)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The checkpoint of each model, made once it is wanted."""

    @cache
    def make(name):
        family, changes = MODELS[name]
        folder = tmp_path_factory.mktemp("tiny")
        if family == "deepseek_v4":
            return tiny_v4.make(folder, seed=5, **changes)
        return tiny.make(folder, family, seed=5, **changes)

    return make


DTYPES = ("float32", "float64", "bfloat16")
SLOW = {("compressed", "float64"), ("compressed", "bfloat16")}
SERVED = [
    pytest.param((name, dtype), id=f"{dtype}-{name}", marks=[pytest.mark.slow] * ((name, dtype) in SLOW))
    for dtype in DTYPES
    for name in MODELS
]


@pytest.fixture(scope="module", params=SERVED)
def served(request, folders):
    name, dtype = request.param
    made = folders(name)
    built = load(made.folder, dtype)
    scripts = {row: random_tokens(made.vocab_size, LENGTH + 1, seed=i) for i, row in enumerate(ROWS)}
    return built, {row: decode_alone(built, script) for row, script in scripts.items()}


@st.composite
def turns(draw):
    """What one row does in one step, if it takes part: read up to `chunk` tokens of a prompt that is not read
    yet, or draft `depth` tokens of which `accept` are right."""
    depth = draw(st.integers(0, 8))
    return (
        draw(st.booleans()) or draw(st.booleans()),
        draw(st.integers(1, 9)),
        depth,
        draw(st.integers(0, depth)),
    )


@st.composite
def trials(draw):
    rows = draw(st.permutations(ROWS))[: draw(st.integers(1, 3))]
    prompts = {row: draw(st.integers(1, 18)) for row in rows}
    num_steps = draw(st.integers(1, 6))
    return prompts, [{row: draw(turns()) for row in rows} for _ in range(num_steps)]


def part_of(driver, row, prompt_len, turn, seed):
    _, chunk, depth, accept = turn
    length = driver.length(row)
    if length < prompt_len:
        count = min(chunk, prompt_len - length)
        return Chunk(row, count, samples=length + count == prompt_len)
    room = LENGTH - 2 - length
    return driver.draft(row, min(depth, room), min(accept, room), seed)


def assert_same(driver, row, truth, result):
    """The result of a row's last step and the state it left."""
    length = driver.length(row)
    span = slice(length - len(result.hidden), length)
    assert torch.equal(result.hidden, truth.hidden[span])
    assert torch.equal(result.logits, truth.logits[span])
    for name, tensor in kept(driver, row).items():
        if name != "last token":
            assert torch.equal(tensor, truth.states[length][name]), f"{name} after {length} tokens"


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(trial=trials())
def test_commit_leaves_what_was_accepted_and_nothing_else(served, trial):
    built, truths = served
    prompts, steps = trial
    driver = Driver(built)
    poison(driver)
    for row in prompts:
        driver.open(row, truths[row].script)
    for number, turns_of in enumerate(steps):
        parts = [
            part_of(driver, row, prompts[row], turn, seed=number) for row, turn in turns_of.items() if turn[0]
        ]
        for row, result in (driver.step(*parts) if parts else {}).items():
            assert_same(driver, row, truths[row], result)
    for _ in range(2):  # the first replays the last drafts, so that the second shows all that is left
        started = [row for row in prompts if driver.length(row) >= prompts[row]]
        for row, result in (driver.step(*map(Decode, started)) if started else {}).items():
            assert_same(driver, row, truths[row], result)
            held = driver.state.rows[row]
            assert driver.state.last_token_S[held.slot] == truths[row].script[held.length]
    driver.state.check_integrity()


@pytest.mark.parametrize("depth", range(9))
def test_every_depth_and_verdict(served, depth):
    """All j of one k in a row: each step starts from what the last one rolled back to."""
    built, truths = served
    driver = Driver(built)
    poison(driver)
    driver.open("a", truths["a"].script)
    driver.feed("a", [5])
    for accept in range(depth + 1):
        if driver.length("a") + depth + 2 < LENGTH:
            assert_same(
                driver, "a", truths["a"], driver.step(driver.draft("a", depth, accept, seed=accept))["a"]
            )
    assert_same(driver, "a", truths["a"], driver.step(Decode("a"))["a"])
    recurs = built.model.config.delta_net is not None
    assert any("memory" in name for name in kept(driver, "a")) == recurs


def test_commit_equals_forward_of_the_accepted_alone(served):
    """Rows that drafted k and kept j beside rows that drafted just those j: the same drafts come next."""
    built, truths = served
    more, fewer = Driver(built), Driver(built)
    for driver in (more, fewer):
        for row in ROWS:
            driver.open(row, truths[row].script)
        driver.step(*(Chunk(row, 4 + i) for i, row in enumerate(ROWS)))
    for depths in ({"a": (8, 3), "b": (2, 0), "c": (5, 5)}, {"a": (1, 0), "b": (7, 6), "c": (4, 1)}):
        results = [
            more.step(*(more.draft(row, k, j, seed=k) for row, (k, j) in depths.items())),
            fewer.step(*(fewer.draft(row, j, j, seed=0) for row, (_, j) in depths.items())),
        ]
        for row in ROWS:
            assert torch.equal(results[0][row].logits, results[1][row].logits)
        wanted = dict.fromkeys(ROWS, 4)
        assert more.propose_all(wanted) == fewer.propose_all(wanted)


def test_a_slot_used_again_starts_clean(served):
    built, truths = served
    driver = Driver(built, max_rows=1, context=64)
    driver.open("b", truths["b"].script)
    driver.feed("b", [20])
    driver.step(driver.draft("b", 8, 5, seed=0))
    slot = driver.state.rows["b"].slot
    driver.close("b")
    poison(driver)
    driver.open("a", truths["a"].script)
    assert driver.state.rows["a"].slot == slot
    assert_same(driver, "a", truths["a"], driver.feed("a", [11]))
    assert_same(driver, "a", truths["a"], driver.step(driver.draft("a", 8, 4, seed=1))["a"])
    assert_same(driver, "a", truths["a"], driver.decode("a", 1))
