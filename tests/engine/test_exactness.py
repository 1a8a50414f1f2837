"""The promise: the same tokens, text, finish reasons and log-probabilities whatever is drafted, at any depth, in
any company, however the prompt was cut and however often a row was put back."""

import random
from dataclasses import replace

import pytest
from engine_cases import (
    STORY,
    assert_all_free,
    assert_same,
    drive,
    load,
    mixed_cases,
    plain_alone,
    prompts,
    requests_of,
    with_depth,
)

from headlong import SamplingParams

DEPTHS = tuple(range(9))
TRUTHS: dict[tuple, dict] = {}


def truth_of(llm, requests, *key):
    """The plain results, computed once for each engine and set of requests."""
    key = (id(llm), *key)
    if key not in TRUTHS:
        TRUTHS[key] = plain_alone(llm, requests)
    return TRUTHS[key]


def arrivals_of(rng: random.Random, count: int) -> list[int]:
    """Some at once, the others one by one."""
    return [0 if rng.random() < 0.5 else rng.randrange(1, 12) for _ in range(count)]


def rotated(requests, turn: int):
    """A different depth for each request, and for each request another in every turn."""
    return with_depth(requests, [(place * 5 + turn) % len(DEPTHS) for place in range(len(requests))])


def test_alone_at_every_depth(llm_of_dtype):
    cases = [
        (llm_of_dtype.service.text.encode("Once upon a time"), SamplingParams(max_tokens=24, logprobs=2)),
        (
            llm_of_dtype.service.text.encode(STORY)[:50],
            SamplingParams(max_tokens=24, temperature=0.8, seed=4, ignore_eos=True, repetition_penalty=1.1),
        ),
    ]
    requests = requests_of(llm_of_dtype, cases)
    truth = plain_alone(llm_of_dtype, requests)
    for request in requests:
        steps = []
        for depth in DEPTHS:
            trace = drive(llm_of_dtype, [replace(request, draft_tokens=depth, adaptive=False)])
            assert_same(trace.results, truth, [request])
            steps.append(len(trace.steps))
        assert steps[0] == len(truth[request.id].token_ids) and min(steps) < steps[0] / 1.5


@pytest.mark.parametrize("turn", [0, 4])
def test_sixteen_rows_of_every_kind(llm_of_dtype, turn):
    requests = mixed_cases(llm_of_dtype, seed=1, max_tokens=24)
    truth = truth_of(llm_of_dtype, requests, "mixed")
    trace = drive(llm_of_dtype, rotated(requests, turn), arrivals_of(random.Random(turn), len(requests)))
    assert_same(trace.results, truth, requests)
    assert trace.num_tokens > 250
    assert max(step.num_rows for step in trace.steps) >= 8
    assert {result.finish_reason for result in truth.values()} == {"stop", "length"}
    assert {type(result.stop_reason) for result in truth.values()} == {type(None), int, str}


@pytest.mark.slow
def test_twenty_thousand_tokens(llms):
    """Only tokens compared with the truth are counted, not those of the truth."""
    compared = 0
    for dtype, seeds in (("bfloat16", (2, 3, 4)), ("float32", (5, 6)), ("float64", (7,))):
        llm = llms.setdefault(dtype, load(dtype, max_rows=16, max_draft_tokens=8))
        for seed in seeds:
            requests = mixed_cases(llm, seed, max_tokens=64)
            truth = plain_alone(llm, requests)
            for turn in DEPTHS[: 5 + seed % 2]:
                rng = random.Random(100 * seed + turn)
                trace = drive(llm, rotated(requests, turn), arrivals_of(rng, len(requests)))
                assert_same(trace.results, truth, requests)
                compared += trace.num_tokens
    print(f"{compared} tokens compared")
    assert compared > 20_000


def small_requests(llm, count: int, max_tokens: int = 20, seed: int = 9, max_prompt: int = 90):
    """Greedy and sampled by turns, penalised now and then, all with log-probabilities."""
    rng = random.Random(seed)
    cases = [
        (
            prompt[:max_prompt],
            SamplingParams(
                max_tokens=max_tokens,
                temperature=0.8 * (number % 2),
                seed=number,
                repetition_penalty=1.2 if number % 3 == 0 else 1.0,
                logprobs=number % 3,
                ignore_eos=True,
            ),
        )
        for number, prompt in enumerate(prompts(llm, rng, count))
    ]
    return requests_of(llm, cases)


@pytest.mark.parametrize(("chunk_tokens", "depth"), [(1, 3), (4, 3), (7, 6), (9, 8), (64, 2)])
def test_prompts_read_in_pieces(llm, chunk_tokens, depth):
    """Pieces of depth + 1 tokens have the shape of a verification and must not be taken for one."""
    requests = sorted(small_requests(llm, 6, max_tokens=14), key=lambda request: len(request.prompt))
    truth = truth_of(llm, requests, "pieces")
    pieces = load("auto", chunk_tokens=chunk_tokens, max_rows=4)
    trace = drive(pieces, with_depth(requests, [depth]), arrivals=[0, 0, 3, 4, 5, 6])
    assert_same(trace.results, truth, requests)
    if chunk_tokens == depth + 1:
        assert any(
            {row.query_len for row in plan.drafting} & {r.query_len for r in plan.rows if r.known_tokens}
            for plan in trace.plans
        )


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_a_prompt_as_long_as_a_verification_beside_one(llm_of_dtype, depth):
    story = llm_of_dtype.service.text.encode(STORY)
    cases = [
        (story[:20], SamplingParams(max_tokens=depth + 14, ignore_eos=True)),
        (story[30 : 31 + depth], SamplingParams(max_tokens=6, temperature=0.7, seed=1, ignore_eos=True)),
    ]
    requests = requests_of(llm_of_dtype, cases)
    truth = plain_alone(llm_of_dtype, requests)
    trace = drive(llm_of_dtype, with_depth(requests, [depth]), arrivals=[0, 2])
    assert_same(trace.results, truth, requests)
    assert any(
        sorted((row.query_len, bool(row.known_tokens)) for row in plan.rows)
        == [(depth + 1, False), (depth + 1, True)]
        for plan in trace.plans
    )


SMALL_PAGES = {"page_size": 16, "max_context": None}
"""Attention sums page by page, so bits are compared between engines of one page size."""


def test_rows_put_back_for_want_of_pages(dtype):
    """Six rows begin in a page each and grow to two or three; there are seven."""
    roomy = load(dtype, **SMALL_PAGES)
    requests = small_requests(roomy, 6, max_tokens=24, max_prompt=12)
    truth = plain_alone(roomy, requests)
    cramped = load(dtype, **SMALL_PAGES, cache_tokens=112, max_rows=6)
    trace = drive(cramped, with_depth(requests, [3, 8, 0]))
    assert trace.preempted
    assert_same(trace.results, truth, requests)


def test_few_slots(llm):
    requests = small_requests(llm, 9, max_tokens=12)
    truth = truth_of(llm, requests, "slots")
    narrow = load("auto", max_rows=2)
    trace = drive(narrow, with_depth(requests, [3, 1, 5]))
    assert_same(trace.results, truth, requests)
    assert max(step.num_rows for step in trace.steps) == 2
    assert max(step.num_waiting for step in trace.steps) == 7


@pytest.fixture(scope="module")
def small_pages():
    return load("auto", **SMALL_PAGES)


@pytest.mark.parametrize("seed", range(3))
def test_cancelled_rows_leave_nothing_behind(small_pages, seed):
    """`drive` checks after every step, and that all is free at the end."""
    rng = random.Random(seed)
    requests = small_requests(small_pages, 10, max_tokens=20)
    truth = truth_of(small_pages, requests, "cancelled")
    leaving = {request.id: rng.randrange(0, 9) for request in rng.sample(requests, 5)}
    cramped = load("auto", **SMALL_PAGES, cache_tokens=400, max_rows=5, chunk_tokens=32)
    trace = drive(cramped, with_depth(requests, [3, 8, 0, 1]), arrivals_of(rng, 10), leaving)
    staying = [request for request in requests if request.id not in leaving]
    assert_same(trace.results, truth, staying)
    for row_id in leaving:
        got = trace.results[row_id].token_ids
        assert got == truth[row_id].token_ids[: len(got)]


def test_cancelling_twice_or_the_unknown_is_no_error(llm):
    request = small_requests(llm, 1)[0]
    llm.engine.add(request)
    llm.engine.step()
    assert llm.engine.cancel(request.id).rows[0].finish_reason == "cancelled"
    assert not llm.engine.cancel(request.id).rows and not llm.engine.cancel("nobody").rows
    assert_all_free(llm)


def test_an_end_inside_an_accepted_run(llm_of_dtype):
    """What was accepted after the end is cut off, in every way a row can end."""
    llm, depth = llm_of_dtype, 8
    free = SamplingParams(max_tokens=64, ignore_eos=True)
    prompt = llm.service.text.encode("Once upon a time")
    request = requests_of(llm, [(prompt, free)])[0]
    trace = drive(llm, with_depth([request], [depth]))
    produced, ends = [], {}
    for output in trace.outputs:
        for place, token in enumerate(output.token_ids):
            text = llm.service.text.tokenizer.decode([token])
            inside = place < output.num_accepted and len(produced) > 8
            if inside and token not in produced:
                ends.setdefault("token", replace(free, stop_token_ids=(token,)))
                if text.strip() and text not in llm.service.text.tokenizer.decode(produced):
                    ends.setdefault("string", replace(free, stop=(text,)))
                    ends.setdefault("length", replace(free, max_tokens=len(produced) + 1))
            produced.append(token)
    assert ends.keys() == {"token", "string", "length"}
    neighbour = (llm.service.text.encode(STORY)[:33], SamplingParams(max_tokens=40, temperature=0.9, seed=5))
    requests = requests_of(llm, [neighbour, *((prompt, params) for params in ends.values())])
    truth = plain_alone(llm, requests)
    trace = drive(llm, with_depth(requests, [depth]))
    assert_same(trace.results, truth, requests)
    cut = [o for o in trace.outputs if o.finish_reason == "stop" and len(o.token_ids) < o.num_accepted + 1]
    assert len(cut) == 2, "a stop token and a stop string inside what was accepted"
    assert any(o.finish_reason == "length" and len(o.token_ids) > 1 for o in trace.outputs)


def test_the_end_of_sequence_inside_an_accepted_run(llm_of_dtype):
    """The end is likely from the eleventh token on and certain not to come before: drafts run past it."""
    llm = llm_of_dtype
    ends = dict.fromkeys(llm.service.eos_ids, 30.0)
    cases = [
        (prompt, SamplingParams(max_tokens=30, temperature=t, seed=1, min_tokens=10, logit_bias=ends))
        for prompt, t in zip(prompts(llm, random.Random(3), 3), (0.0, 0.5, 1.0), strict=True)
    ]
    requests = requests_of(llm, cases)
    trace = drive(llm, with_depth(requests, [8, 5, 3]))
    assert_same(trace.results, plain_alone(llm, requests), requests)
    assert {len(result.token_ids) for result in trace.results.values()} == {11}
    cut = [o for o in trace.outputs if o.finish_reason == "stop" and len(o.token_ids) < o.num_accepted + 1]
    assert cut


@pytest.mark.parametrize("verify", ["ratio", "block"])
def test_other_rules_do_not_depend_on_company(llm, verify):
    """Not the plain tokens, but the same ones for a seed and a depth, alone or among others."""
    rng = random.Random(5)
    cases = [
        (prompt, SamplingParams(max_tokens=16, temperature=0.9, top_k=30, seed=n, verify=verify, logprobs=1))
        for n, prompt in enumerate(prompts(llm, rng, 5))
    ]
    requests = with_depth(requests_of(llm, cases), [1, 3, 5])
    alone = {}
    for request in requests:
        alone |= drive(llm, [request]).results
    others = with_depth(small_requests(llm, 5, seed=77), [2, 0, 4])
    others = [replace(request, id=f"other{number}") for number, request in enumerate(others)]
    trace = drive(llm, [*requests, *others], arrivals_of(rng, 10))
    assert_same(trace.results, alone, requests)
    greedy = [
        (prompt, SamplingParams(max_tokens=12, verify=verify, ignore_eos=True)) for prompt, _ in cases[:2]
    ]
    requests = requests_of(llm, greedy)
    assert_same(drive(llm, with_depth(requests, [4])).results, plain_alone(llm, requests), requests)
