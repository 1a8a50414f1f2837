"""Tiny engines with any drafter, and the requests that every drafter must leave as they are."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

from engine.engine_cases import Trace, assert_same, drive, plain_alone, quiet, requests_of, with_depth
from headlong import LLM, SamplingParams
from headlong.engine.build import Built
from headlong.engine.runner import Runner
from headlong.speculate.draft_model import DraftModelProposer
from headlong.speculate.mtp import MtpProposer
from headlong.speculate.ngram import NgramProposer
from headlong.speculate.proposer import Proposer
from headlong.state.specs import Capacity
from headlong.state.state import State
from headlong.types import Request

VOCAB = 97
ROOMY = {"cache_tokens": 8192, "max_context": 512, "page_size": 16, "max_rows": 10}
CRAMPED = {"cache_tokens": 128, "max_context": None, "page_size": 16, "max_rows": 6, "chunk_tokens": 24}
Maker = Callable[[LLM], Proposer]


def load(folder: Path, make: Maker | None = None, **options) -> LLM:
    """In float64, where a difference is a fault and no rounding; drafting as `make` says. Requests draft as deep as
    they are told."""
    llm = LLM(folder, dtype="float64", progress=quiet, draft_tokens=3, **(ROOMY | options))
    if make is not None:
        use(llm, make(llm))
    return llm


def use(llm: LLM, proposer: Proposer) -> None:
    """Drafts with this one from now on."""
    llm.engine.steppers.host.proposer = proposer
    llm.engine.scheduler.flush_deferred = proposer.flush_deferred


def ngram(llm: LLM) -> NgramProposer:
    return NgramProposer(llm.engine.state, VOCAB)


def mtp(llm: LLM, built: Built) -> MtpProposer:
    assert built.head is not None
    return MtpProposer(llm.engine.model, built.head, llm.engine.state, llm.engine.sampler)


def draft(
    llm: LLM, drafter: Built, chunk_tokens: int = 64, num_pages: int | None = None
) -> DraftModelProposer:
    state = llm.engine.state
    capacity = Capacity(
        num_pages=num_pages or state.pages.size,
        page_size=state.page_size,
        num_slots=state.slots.size,
        max_drafts=state.max_drafts,
        kv_dtype=drafter.ops.dtype,
        dtype=drafter.ops.activation_dtype,
        device=drafter.ops.device,
    )
    own = State(drafter.model.state_specs, drafter.model.config.hidden_size, capacity)
    return DraftModelProposer(Runner(drafter.model, own), state, llm.engine.sampler, chunk_tokens)


def texts(rng: random.Random, count: int, max_len: int = 40) -> list[tuple[int, ...]]:
    """Prompts of one to `max_len` tokens; in every other one a phrase comes again and again."""
    made = []
    for number in range(count):
        length = min(max_len, rng.choice([1, 2, 5, 16, 17, 33, 40]))
        phrase = [rng.randrange(VOCAB) for _ in range(rng.randrange(3, 8))]
        text = phrase * length if number % 2 else [rng.randrange(VOCAB) for _ in range(length)]
        made.append(tuple(text[:length]))
    return made


def mixed(llm: LLM, seed: int, count: int = 8, max_tokens: int = 16, max_len: int = 40) -> list[Request]:
    """Greedy and seeded, with penalties, biases, bans, minimum lengths and log-probabilities."""
    shared = {"max_tokens": max_tokens, "ignore_eos": True}
    asked = [
        {},
        {"temperature": 0.8, "logprobs": 1},
        {"repetition_penalty": 1.3},
        {"temperature": 0.7, "presence_penalty": 0.6, "frequency_penalty": 0.3, "top_k": 20},
        {"logit_bias": {3: 2.0, 5: -2.0}, "bad_token_ids": (7,), "logprobs": 2},
        {"temperature": 1.2, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.3, "min_tokens": 6, "stop_token_ids": tuple(range(20))},
        {"temperature": 0.5, "n": 2},
    ]
    rng = random.Random(seed)
    cases = [
        (prompt, SamplingParams(**(shared | asked[n % len(asked)] | {"seed": 100 * seed + n})))
        for n, prompt in enumerate(texts(rng, count, max_len))
    ]
    return requests_of(llm, cases)


def assert_exact(llm: LLM, truth: dict, requests: list[Request], depths: list[int], **driven) -> Trace:
    """Drives the requests at these depths; their tokens, texts and log-probabilities are those of plain decoding,
    and no statistic counts a draft that was not made."""
    trace = drive(llm, with_depth(requests, depths), **driven)
    leaving = driven.get("cancel") or {}
    assert_same(trace.results, truth, [request for request in requests if request.id not in leaving])
    for row_id in leaving:
        found = trace.results[row_id].token_ids
        assert found == truth[row_id].token_ids[: len(found)]
    for output in trace.outputs:
        assert output.num_drafted == output.num_accepted + len(output.rejected) <= output.request.draft_tokens
    return trace


def acceptance(trace: Trace) -> tuple[int, int]:
    """Drafts made and drafts accepted."""
    outputs = list(trace.outputs)
    return sum(output.num_drafted for output in outputs), sum(output.num_accepted for output in outputs)


@cache
def told(folder: Path, seed: int) -> tuple[list[Request], dict]:
    """Requests, and what they are alone and without drafts."""
    roomy = load(folder, prefix_cache=False)
    requests = mixed(roomy, seed, count=8, max_tokens=24, max_len=24)
    return requests, plain_alone(roomy, requests)


def coming_and_going(make: Maker, folder: Path, seed: int) -> Trace:
    """Rows join and leave one by one, prompts are read in pieces, and rows are put back for want of pages."""
    requests, truth = told(folder, seed)
    rng = random.Random(seed)
    arrivals = [rng.randrange(8) for _ in requests]
    leaving = {request.id: rng.randrange(4, 20) for request in rng.sample(requests, 2)}
    depths = [rng.randrange(7) for _ in requests]
    llm = load(folder, make, **CRAMPED)
    trace = assert_exact(llm, truth, requests, depths, arrivals=arrivals, cancel=leaving)
    assert trace.preempted
    return trace


def drive_in_company(llm: LLM, **sampling) -> Trace:
    """Rows whose verification depends on drafts have the same tokens alone and among others; how they went among
    others."""
    cases = [
        ((n, n + 1, 30, n, n + 1), SamplingParams(seed=n, ignore_eos=True, **sampling)) for n in range(3)
    ]
    requests = with_depth(requests_of(llm, cases), [1, 3, 5])
    alone = {}
    for request in requests:
        alone |= drive(llm, [request]).results
    others = [replace(r, id=f"other{r.id}") for r in with_depth(mixed(llm, 5, count=4), [4, 0])]
    trace = drive(llm, [*requests, *others], arrivals=[0, 2, 4, *([1] * len(others))])
    assert_same(trace.results, alone, requests)
    return trace
