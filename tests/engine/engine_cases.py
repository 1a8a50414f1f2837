"""Requests of every kind, and a driver that steps an engine while rows come and go."""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from headlong import LLM, SamplingParams, TokenLogprobs
from headlong.types import Plan, Request, RowOutput, StepOutput

STORY = (
    "Once upon a time there was a little fox who lived at the edge of a big forest. Every morning she ran to "
    "the river and looked at the water. One day she saw a red boat with a small bear in it. The bear was sad, "
    "because he had lost his hat in the wind. The fox said, I can help you find it. They walked and walked "
    "until the sun went down. At last they saw something blue on top of a tall tree. The bear clapped his paws "
    "and the fox began to climb. When she came back with the hat, they were both very happy and went home."
)
OPENINGS = (
    "Once upon a time",
    "Tim and Mia went to the park.",
    "The dog ran",
    "One day, a girl named Lily found a shiny",
    "There was a big",
    "Mom said, ",
    "Ben had a toy car. He",
)


@dataclass(frozen=True)
class Result:
    """Everything a user can see of a finished row, but for how long it took."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: tuple[TokenLogprobs, ...]


@dataclass
class Trace:
    """What a drive gave: results by request id, and every step and plan on the way."""

    results: dict[str, Result] = field(default_factory=dict)
    steps: list[StepOutput] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(result.token_ids) for result in self.results.values())

    @property
    def preempted(self) -> list[str]:
        return [row for step in self.steps for row in step.preempted]

    @property
    def outputs(self) -> Iterable[RowOutput]:
        return (output for step in self.steps for output in step.rows)


def quiet(_label: str, _done: int, _total: int) -> None:
    pass


def load(dtype: str, **options) -> LLM:
    return LLM(dtype=dtype, progress=quiet, **({"cache_tokens": 16384, "max_context": 1024} | options))


def drive(
    llm: LLM,
    requests: list[Request],
    arrivals: list[int] | None = None,
    cancel: Mapping[str, int] | None = None,
) -> Trace:
    """Adds request i before step `arrivals[i]`, cancels `cancel[id]` before that step, runs to the end."""
    engine = llm.engine
    assert not engine.has_work
    cancel = cancel or {}
    waiting = sorted(zip(arrivals or [0] * len(requests), range(len(requests)), strict=True))
    trace, gathered = Trace(), {request.id: [] for request in requests}
    plan, scheduler = engine.scheduler.plan, engine.scheduler

    def spy() -> Plan:
        trace.plans.append(plan())
        return trace.plans[-1]

    scheduler.plan = spy  # type: ignore[method-assign]
    try:
        number = 0
        while waiting or engine.has_work:
            while waiting and waiting[0][0] <= number:
                engine.add(requests[waiting.pop(0)[1]])
            for row_id in [row_id for row_id, at in cancel.items() if at == number]:
                engine.cancel(row_id)
            step = engine.step()
            engine.check_integrity()
            trace.steps.append(step)
            for output in step.rows:
                gathered[output.request.id].append(output)
            number += 1
    finally:
        del scheduler.plan
    assert_all_free(llm)
    trace.results = {row_id: _joined(outputs) for row_id, outputs in gathered.items()}
    return trace


def assert_all_free(llm: LLM) -> None:
    engine, state = llm.engine, llm.engine.state
    assert not engine.has_work
    engine.check_integrity()
    assert state.pages.num_free == state.pages.size
    assert state.slots.num_free == state.slots.size
    assert all(request is None for request in engine.sampler.table.requests)


def _joined(outputs: list[RowOutput]) -> Result:
    last = outputs[-1] if outputs else None
    return Result(
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        text="".join(output.text for output in outputs),
        finish_reason=last.finish_reason if last else None,
        stop_reason=last.stop_reason if last else None,
        logprobs=tuple(entry for output in outputs for entry in output.logprobs),
    )


def requests_of(llm: LLM, cases: list[tuple[tuple[int, ...], SamplingParams]]) -> list[Request]:
    """All choices of all cases; the ids are the same in every run."""
    return [
        request
        for number, (prompt, params) in enumerate(cases)
        for request in llm.service.requests(prompt, params, f"case{number}")
    ]


def with_depth(requests: list[Request], depths: list[int]) -> list[Request]:
    """The same requests, request i drafting `depths[i % len(depths)]` tokens a step."""
    return [replace(r, draft_tokens=depths[i % len(depths)], adaptive=False) for i, r in enumerate(requests)]


def plain_alone(llm: LLM, requests: list[Request]) -> dict[str, Result]:
    """The truth: each request by itself, without drafts and with nothing in the prefix cache, before or after."""
    results: dict[str, Result] = {}
    for request in with_depth(requests, [0]):
        llm.engine.state.drop_cache()
        results |= drive(llm, [request]).results
    llm.engine.state.drop_cache()
    return results


def assert_same(found: dict[str, Result], truth: dict[str, Result], requests: list[Request]) -> None:
    for request in requests:
        got, wanted = found[request.id], truth[request.id]
        assert got.token_ids == wanted.token_ids, (request.id, request.params, request.draft_tokens)
        assert got == wanted, (request.id, request.params, request.draft_tokens)


def prompts(llm: LLM, rng: random.Random, count: int) -> list[tuple[int, ...]]:
    """Openings and slices of a story, from 1 to about 90 tokens."""
    story = llm.service.text.encode(STORY)
    made = [tuple(llm.service.text.encode(opening)) for opening in OPENINGS]
    while len(made) < count:
        start = rng.randrange(len(story) - 90)
        made.append(tuple(story[start : start + rng.choice([1, 2, 4, 9, 17, 33, 64, 65, 90])]))
    rng.shuffle(made)
    return made[:count]


def mixed_params(llm: LLM, max_tokens: int, seed: int) -> list[SamplingParams]:
    """Sixteen ways to ask: every field of SamplingParams is used by one of them at least."""
    eos = min(llm.service.eos_ids)
    the, dot, she = (llm.service.text.encode(text)[0] for text in (" the", ".", " she"))
    shared = {"max_tokens": max_tokens, "ignore_eos": True}
    everything = {
        "temperature": 0.9,
        "top_k": 60,
        "top_p": 0.97,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
        "logit_bias": {the: -1.0, dot: 0.5},
        "bad_token_ids": (she,),
        "stop": ("END", "zzz"),
        "min_tokens": 4,
        "logprobs": 3,
        "ignore_eos": False,
    }
    asked = [
        {},
        {"temperature": 0.8, "logprobs": 2},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.1, "top_p": 0.8, "logprobs": 0},
        {"temperature": 1.0, "min_p": 0.1},
        {"repetition_penalty": 1.3, "logprobs": 1},
        {"temperature": 0.9, "presence_penalty": 0.6, "frequency_penalty": 0.4},
        {"logit_bias": {the: 4.0, dot: -3.0}, "logprobs": 5},
        {"temperature": 0.7, "bad_token_ids": (the, dot)},
        {"temperature": 1.0, "min_tokens": 12, "logit_bias": {eos: 30.0}, "ignore_eos": False},
        {"temperature": 0.6, "stop": (". ", ' "', "and"), "min_tokens": 5},
        {"stop_token_ids": (dot, the), "min_tokens": 3, "logprobs": 8},
        {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "n": 2},
        {"temperature": 1.0, "ignore_eos": False},
        {"logprobs": 20, "ignore_eos": False},
        everything,
    ]
    return [
        SamplingParams(**(shared | own | {"seed": seed * 100 + number})) for number, own in enumerate(asked)
    ]


def mixed_cases(llm: LLM, seed: int, max_tokens: int) -> list[Request]:
    """17 requests: sixteen prompts of different lengths, one of them continued twice."""
    rng = random.Random(seed)
    params = mixed_params(llm, max_tokens, seed)
    return requests_of(llm, list(zip(prompts(llm, rng, len(params)), params, strict=True)))
