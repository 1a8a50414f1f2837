"""DeepSeek-V4 against transformers, in float32; its head against a slow one from the published definition; and that
nobody who drafts, shares, is put back or obeys a grammar changes a token."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from engine.engine_cases import drive
from headlong import LLM, SamplingParams
from headlong.errors import ConfigError
from headlong.models import registry
from headlong.types import Request
from support import tiny, tiny_v4
from support.ruled import Ruled
from support.steps import Chunk, Decode, Driver, load
from support.tiny import random_tokens

HEAVY = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}
CASES = {
    "as released": {"compress_ratios": [0, 4, 128, 4], "num_hash_layers": 3},
    "called anew": {
        "anew": True,
        "compress_ratios": [4, 128, 0],
        "compress_rates": HEAVY,
        "hidden_size": 36,
        "num_attention_heads": 6,
        "head_dim": 20,
        "qk_rope_head_dim": 10,
        "o_groups": 3,
        "o_lora_rank": 7,
        "sliding_window": 7,
        "hc_mult": 3,
        "index_topk": 9,
    },
    "two streams": {
        "compress_ratios": [128, 4],
        "compress_rates": HEAVY | {"compressed_sparse_attention": 3},
        "num_hash_layers": 0,
        "o_groups": 1,
        "sliding_window": 33,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 1,
        "swiglu_limit": 10.0,
        "index_topk": 1,
        "n_shared_experts": 1,
        "num_experts_per_tok": 5,
    },
}
LENGTHS = {"as released": 270, "called anew": 75, "two streams": 75}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """A checkpoint, our model of it, a script, and what transformers makes of it."""
    made = tiny_v4.make(tmp_path_factory.mktemp("v4"), seed=7, **CASES[request.param])
    script = random_tokens(made.vocab_size, LENGTHS[request.param] + 1, seed=1)
    return made, load(made.folder, mtp="on"), script, made.forward(script[:-1])


def assert_close(result, expected, first=0):
    hidden, logits = (tensor[first : first + len(result.hidden)] for tensor in expected)
    torch.testing.assert_close(result.hidden, hidden, atol=1e-4, rtol=0.0)
    torch.testing.assert_close(result.logits, logits, atol=1e-4, rtol=0.0)


def test_whole_and_in_chunks(case):
    """Windows of entries cross the chunks' borders; the second way ends token by token."""
    _, built, script, expected = case
    length, whole, pieces = len(script) - 1, Driver(built), Driver(built)
    whole.open("a", script)
    together = whole.feed("a", [length])
    assert_close(together, expected)
    pieces.open("a", script)
    rng, cuts = random.Random(3), []
    while sum(cuts) < length - 20:
        cuts.append(rng.randint(1, min(41, length - 12 - sum(cuts))))
    found = [pieces.feed("a", cuts), pieces.decode("a", length - sum(cuts))]
    for name in ("hidden", "logits"):
        assert torch.equal(torch.cat([getattr(part, name) for part in found]), getattr(together, name))


def test_token_by_token(case):
    """Shorter than a window at first."""
    _, built, script, expected = case
    driver = Driver(built)
    driver.open("a", script)
    assert_close(driver.feed("a", [1]), expected)
    assert_close(driver.decode("a", 24), expected, first=1)


def test_several_rows(case):
    """Rows of different lengths in the same passes: chunks beside decoding rows that draft."""
    made, built, script, expected = case
    driver = Driver(built)
    others = {row: random_tokens(made.vocab_size, n + 1, seed=n) for row, n in (("b", 8), ("c", 23))}
    for row, tokens in ({"a": script} | others).items():
        driver.open(row, tokens)
    steps = [
        driver.step(Chunk("a", 17), Chunk("b", 3), Chunk("c", 15)),
        driver.step(Chunk("a", 33), driver.draft("b", 3, 1, seed=1), Decode("c")),
        driver.step(Chunk("a", 25), Decode("b"), driver.draft("c", 4, 4, seed=2)),
    ]
    want = {"a": expected} | {row: made.forward(tokens[:-1]) for row, tokens in others.items()}
    for row, whole in want.items():
        at = 0
        for results in steps:
            assert_close(results[row], whole, at)
            at += len(results[row].hidden)


def slow_drafts(made, tokens, streams, depth):
    """The head over all pairs again for every draft, each draft's pair made of the token and the head's own streams."""
    drafts, carry = [], None
    for number in range(depth):
        layer = number % len(made.heads)
        out = made.pairs(tokens, streams, layer)[-1]
        carry = out if carry is None else carry
        drafts.append(made.draft(out, layer))
        tokens, streams = [*tokens, drafts[-1]], torch.cat([streams, out[None]])
    return carry, drafts


@pytest.mark.parametrize("heads", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_head_is_a_slow_one(heads, tmp_path):
    """Carries and drafts in float64, where rounding decides no near-tie; before, in and after its window."""
    made = tiny_v4.make(tmp_path, seed=11, head=heads, compress_ratios=[0, 4]).double()
    driver, script = (
        Driver(load(made.folder, "float64", mtp="on")),
        random_tokens(made.vocab_size, 50, seed=3),
    )
    streams = made.streams(script)
    driver.open("a", script)
    driver.feed("a", [2, 5])
    for depth, accept in ((4, 0), (4, 2), (3, 3), (1, 0), (8, 5), (2, 2)):
        length = driver.length("a")
        carry, expected = slow_drafts(made, script[1 : length + 1], streams[:length], 4)
        found = driver.state.carry_SD[driver.state.rows["a"].slot]
        torch.testing.assert_close(found, carry, atol=1e-4, rtol=0.0)
        assert driver.propose("a", 4) == expected
        driver.step(driver.draft("a", depth, accept, seed=length))


CRAMPED: dict[str, Any] = {"page_size": 16, "chunk_tokens": 24, "cache_tokens": 112, "max_context": 96}


class Served(NamedTuple):
    folder: Path
    llm: LLM


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """An engine with few tokens, so that what was said is said again, and pages for little more than one row."""
    sizes = {"compress_ratios": [0, 4, 128], "compress_rates": HEAVY, "hc_sinkhorn_iters": 2}
    folder = tiny_v4.make(tmp_path_factory.mktemp("v4"), seed=8, vocab_size=6, **sizes).folder
    return Served(folder, LLM(folder, device="cpu", mtp="on", **CRAMPED))


def asked(drafts, *, rule=None, max_tokens=24):
    """Greedy and sampled by turns; some prompts begin alike."""
    prompts = [[*random_tokens(6, 20, seed=0), *random_tokens(6, 1 + 9 * n, seed=n)] for n in range(4)]
    constraint = None if rule is None else lambda: Ruled(rule, 6)
    return [
        Request(
            f"row{n}",
            tuple(prompt),
            SamplingParams(max_tokens=max_tokens, temperature=0.9 * (n % 2), seed=n, logprobs=1),
            n,
            draft_tokens=drafts,
            constraint=constraint,
        )
        for n, prompt in enumerate(prompts)
    ]


def alone(llm, requests):
    """Each by itself, without drafts or anything kept of others."""
    found = {}
    for request in requests:
        llm.engine.state.drop_cache()
        found |= drive(llm, [replace(request, draft_tokens=0)]).results
    llm.engine.state.drop_cache()
    return found


@pytest.mark.parametrize("drafts", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_who_drafts_shares_or_is_put_back_changes_no_token(served, drafts):
    wanted = alone(served.llm, asked(0))
    trace = drive(served.llm, asked(drafts), arrivals=[0, 0, 2, 9])
    assert trace.results == wanted
    assert trace.preempted, "there were pages for all"
    assert any(output.num_accepted for output in trace.outputs)
    again = drive(served.llm, asked(drafts)[:2])
    assert again.results == {name: wanted[name] for name in again.results}
    assert any(output.num_cached for output in again.outputs), "nothing was kept"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"draft_device": "cpu"},
        {"proposer": "ngram"},
        {"draft_vocab": 4},
        {"dtype": "bfloat16"},
        {"dtype": "float64"},
        {"proposer": "draft"},
    ],
    ids=str,
)
def test_every_way_to_draft(served, options):
    """The last one is the model itself, all of whose drafts stand: it takes back what it fed one after the other."""
    sizes: dict[str, Any] = {**CRAMPED, "cache_tokens": 1024}
    folder = served.folder
    own = {"drafter": str(folder)} if options.get("proposer") == "draft" else {}
    dtype = options.get("dtype", "float32")
    prompts = [random_tokens(6, 9 + 7 * n, seed=n) for n in range(4)]
    params = [SamplingParams(max_tokens=30, temperature=0.9 * (n % 2), seed=n) for n in range(4)]
    plain = LLM(folder, device="cpu", mtp="off", dtype=dtype, **sizes).generate(prompts, params)
    found = LLM(folder, device="cpu", **sizes, **own, **options).generate(prompts, params)
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    drafted = sum(one.stats.drafted for one in found)
    accepted = sum(one.stats.accepted for one in found)
    assert drafted and (not own or accepted == drafted)


def test_a_grammar_holds_and_drafts_change_nothing(served):
    """No token stands twice in a row."""

    def rule(output):
        return set(range(6)) - set(output[-1:])

    wanted = alone(served.llm, asked(0, rule=rule, max_tokens=14))
    for result in wanted.values():
        assert all(a != b for a, b in zip(result.token_ids, result.token_ids[1:], strict=False))
    trace = drive(served.llm, asked(3, rule=rule, max_tokens=14))
    assert trace.results == wanted and any(output.num_accepted for output in trace.outputs)


FLASH = {
    "compress_ratios": [0, 4, 128, 0],
    "num_hidden_layers": 3,
    "model_type": "deepseek_v4",
}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"compress_ratios": [0, 8, 128]}, "compress_ratios must list 3 entries out of 0, 4, 128"),
        ({"compress_ratios": [0, 4]}, "compress_ratios must list 3 entries"),
        ({"compress_ratios": [0, 4, 128, 4]}, "the head's layers attend to a window alone"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types must list 3 entries out of sliding_attention"),
        ({"num_key_value_heads": 2, "num_attention_heads": 4}, "num_key_value_heads must be 1"),
        ({"o_groups": 3}, r"o_groups \(3\) must divide num_attention_heads"),
        ({"scoring_func": "relu"}, "scoring_func 'relu' is not supported"),
        ({"attention_bias": True}, "attention_bias must be false"),
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok \(9\) is above n_routed_experts"),
        ({"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types must list 3 times 'hash_moe' or 'moe'"),
        ({"qk_rope_head_dim": 40}, "qk_rope_head_dim .40. must be an even number up to head_dim"),
        ({"index_head_dim": 4}, "index_head_dim .4. must be at least the 8 rotary dimensions"),
        ({"compress_rates": 3}, "compress_rates must be an object"),
        ({"rope_scaling": {"type": "spiral"}}, "rope_type 'spiral' is not supported"),
        ({"hc_mult": 0}, "hc_mult must be a whole number from 1"),
        ({"sliding_window": "wide"}, "sliding_window must be a whole number"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(changes, named):
    with pytest.raises(ConfigError, match=named):
        registry.read_config(tiny_v4.SIZES | FLASH | changes)


def test_both_spellings_of_a_config_say_the_same(tmp_path):
    one, other = (
        tiny.read_config(tiny_v4.make(tmp_path / str(anew), head=False, anew=anew).folder)
        for anew in (False, True)
    )
    assert registry.read_config(one) == registry.read_config(other)
