"""Steps that raise and rows whose logits are no numbers: who ends, who goes on, and that nothing leaks or is lost."""

import itertools
import random
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from engine_cases import assert_all_free, assert_same, drive, plain_alone, quiet, requests_of, with_depth

from headlong import LLM, HeadlongError, SamplingParams
from headlong.engine.faults import CALM_STEPS, MAX_IN_A_ROW, MIN_CHUNK, NO_NUMBERS
from headlong.engine.row import FAULT
from headlong.state.delta_net import DeltaNetState
from headlong.state.paged_kv import PagedKv
from headlong.types import Plan, Request
from support import tiny
from support.injection import STAGES, Injector, Strike

VOCAB = 97


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("models") / "dense").folder


def load(folder, **options) -> LLM:
    own = {"dtype": "float64", "max_rows": 4, "max_context": 160, "page_size": 16, "cache_tokens": 1024}
    return LLM(folder, progress=quiet, **(own | options))


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return load(folder)


@pytest.fixture(scope="module")
def requests(llm) -> list[Request]:
    """Six rows for four places: greedy, sampled, penalised, filtered; each with log-probabilities."""
    rng = random.Random(3)
    kinds = ({}, {"temperature": 0.9}, {"repetition_penalty": 1.3, "temperature": 0.7}, {"min_tokens": 5})
    cases = [
        (
            tuple(rng.randrange(VOCAB) for _ in range(rng.choice([1, 5, 20, 40]))),
            SamplingParams(max_tokens=12, seed=n, logprobs=1, **kinds[n % len(kinds)]),
        )
        for n in range(6)
    ]
    return with_depth(requests_of(llm, cases), [3, 0, 2])


@pytest.fixture(scope="module")
def truth(folder, requests):
    return plain_alone(load(folder, prefix_cache=False), requests)


@contextmanager
def injecting(llm: LLM, strike: Strike | None = None):
    injector = Injector(llm.engine) if strike is None else Injector(llm.engine, strike)
    try:
        yield injector
    finally:
        injector.remove()


def broken_kernel() -> Exception:
    return RuntimeError("the kernel broke\nand here is a long story")


def strike(
    stage: str,
    when: Callable[[Injector], bool],
    late: bool = False,
    error: Callable[[], Exception] = broken_kernel,
) -> Strike:
    """Raises in one stage of those steps that `when` names."""

    def struck(at: str, is_late: bool, injector: Injector) -> Exception | None:
        return error() if (at, is_late) == (stage, late) and when(injector) else None

    return struck


def has(row_id: str) -> Callable[[Injector], bool]:
    return lambda injector: row_id in ids(injector.plan)


def ids(plan: Plan) -> set[str]:
    return {row.request.id for row in plan.rows}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_raises_changes_no_tokens(llm, requests, truth, stage, late):
    """At every point of the step, before and after its work: now and then, and twice running."""
    calls = itertools.count(1)
    llm.engine.state.drop_cache()
    with injecting(llm, strike(stage, lambda _: next(calls) in (1, 4, 8, 9), late)) as injector:
        trace = drive(llm, requests, arrivals=[0, 0, 0, 1, 3, 8])
    assert injector.raised > 0
    assert_same(trace.results, truth, requests)
    assert llm.engine.failure is None and llm.engine.scheduler.only is None


@pytest.mark.parametrize("stage", ["propose", "forward", "verify", "finish"])
@pytest.mark.parametrize("culprit", [0, 1, 4])
def test_the_row_at_fault_ends_and_no_other(llm, requests, truth, stage, culprit):
    bad = requests[culprit].id
    with injecting(llm, strike(stage, has(bad))) as injector:
        trace = drive(llm, requests)
    others = [request for request in requests if request.id != bad]
    assert_same(trace.results, truth, others)
    ended = trace.results[bad]
    assert ended.finish_reason == "error" and ended.token_ids == ()
    assert ended.stop_reason == f"{FAULT}: RuntimeError: the kernel broke"
    assert injector.raised <= 5, "a row is tried a bounded number of times"


def test_a_row_that_fails_in_the_middle_keeps_what_it_had(llm, requests, truth):
    bad = requests[0].id

    def when(injector: Injector) -> bool:
        return any(row.request.id == bad and row.num_generated >= 5 for row in injector.plan.rows)

    with injecting(llm, strike("forward", when)):
        trace = drive(llm, requests)
    assert_same(trace.results, truth, requests[1:])
    found = trace.results[bad].token_ids
    assert trace.results[bad].finish_reason == "error"
    assert len(found) >= 5 and found == truth[bad].token_ids[: len(found)]


def test_a_row_whose_drafts_fail_goes_on_without(llm, requests, truth):
    bad = requests[0].id

    def when(injector: Injector) -> bool:
        return any(row.request.id == bad and row.num_drafts for row in injector.plan.rows)

    with injecting(llm, strike("propose", when)) as injector:
        trace = drive(llm, requests)
    assert injector.raised >= 3
    assert_same(trace.results, truth, requests)


def test_an_admission_that_fails_ends_its_row(llm, requests, truth):
    def broken():
        raise ValueError("no such grammar")

    bad = replace(requests[1], constraint=broken)
    trace = drive(llm, [requests[0], bad, *requests[2:]])
    assert_same(trace.results, truth, [requests[0], *requests[2:]])
    assert trace.results[bad.id].stop_reason == f"{FAULT}: ValueError: no such grammar"


def test_text_that_cannot_be_told_ends_its_row_alone(llm, requests, truth):
    for request in requests:
        llm.engine.add(request)
    bad = llm.engine.scheduler.find(requests[2].id)
    assert bad is not None

    def broken(*_args, **_options):
        raise UnicodeError("not a text")

    bad._stream.push = broken  # type: ignore[method-assign]
    found: dict[str, list[int]] = {request.id: [] for request in requests}
    before = llm.engine.faults.count
    while llm.engine.has_work:
        for output in llm.engine.step().rows:
            found[output.request.id].extend(output.token_ids)
            if output.request.id == bad.id:
                assert output.finish_reason == "error" and "not a text" in str(output.stop_reason)
    assert llm.engine.faults.count == before, "the others were not put back for it"
    for request in requests:
        assert tuple(found[request.id]) == (() if request.id == bad.id else truth[request.id].token_ids)
    assert_all_free(llm)


def test_what_was_handed_out_before_a_fault_is_not_lost(monkeypatch, llm, requests, truth):
    """Counting for penalties comes after rows took their tokens."""
    real, calls = llm.engine.sampler.table.count, []

    def broken(*args):
        calls.append(args)
        if len(calls) in (1, 4):
            raise RuntimeError("no counts")
        real(*args)

    monkeypatch.setattr(llm.engine.sampler.table, "count", broken)
    trace = drive(llm, requests)
    assert len(calls) > 4
    assert_same(trace.results, truth, requests)


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, MemoryError])
def test_short_of_memory_less_is_tried_at_once(folder, truth, requests, kind):
    llm = load(folder, chunk_tokens=64)

    def when(injector: Injector) -> bool:
        return injector.plan.num_tokens > 24 or len(injector.plan.rows) > 2

    with injecting(llm, strike("forward", when, error=lambda: kind("out of memory"))) as injector:
        trace = drive(llm, requests)
    assert injector.raised > 2
    assert_same(trace.results, truth, requests)
    assert MIN_CHUNK <= llm.engine.scheduler.chunk_tokens < 64
    drive(llm, requests_of(llm, [((1, 2), SamplingParams(max_tokens=2 * CALM_STEPS + 2, draft_tokens=0))]))
    assert llm.engine.scheduler.chunk_tokens == 64, "after a while all of it is tried again"


def test_a_row_that_is_too_large_for_the_memory(llm, requests, truth):
    bad = max(requests, key=lambda request: len(request.prompt))

    def short() -> Exception:
        return RuntimeError("[enforce fail at alloc_cpu.cpp] can't allocate memory: you tried ...")

    with injecting(llm, strike("forward", has(bad.id), error=short)):
        trace = drive(llm, requests)
    assert_same(trace.results, truth, [request for request in requests if request is not bad])
    assert trace.results[bad.id].stop_reason == f"{FAULT}: it needs more memory than there is"
    llm.engine.restart()


class Poison:
    """Writes `value` into the logits of a row, in those of its sampling steps that `when` names by number."""

    def __init__(self, row: str, when: Callable[[int], bool], value: float = torch.nan) -> None:
        self.row, self.when, self.value = row, when, value
        self.hits = 0

    def __call__(self, plan: Plan) -> dict[str, float]:
        hit = any(row.request.id == self.row and row.samples for row in plan.rows)
        self.hits += hit
        return {self.row: self.value} if hit and self.when(self.hits) else {}


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("poisoned", range(4))
def test_a_poisoned_row_ends_and_no_other(llm, requests, truth, poisoned, value):
    bad = requests[poisoned].id
    with injecting(llm) as injector:
        injector.poison = poison = Poison(bad, lambda _: True, value)
        trace = drive(llm, requests)
    assert poison.hits == 2, "it was read afresh once"
    assert_same(trace.results, truth, [request for request in requests if request.id != bad])
    assert trace.results[bad].finish_reason == "error"
    assert str(trace.results[bad].stop_reason).startswith(f"{FAULT}: {NO_NUMBERS}")
    assert trace.preempted.count(bad) == 1 and set(trace.preempted) == {bad}, "nobody else was put back"


@pytest.mark.parametrize("poisoned", range(4))
def test_a_row_that_was_poisoned_once_goes_on(llm, requests, truth, poisoned):
    bad = requests[poisoned].id
    with injecting(llm) as injector:
        injector.poison = Poison(bad, lambda hit: hit == 3)
        trace = drive(llm, requests)
    assert_same(trace.results, truth, requests)
    assert set(trace.preempted) == {bad}


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
        {"logit_bias": {5: 3.0}, "bad_token_ids": (7,), "min_tokens": 8},
        {"temperature": 1.0, "verify": "ratio"},
        {"temperature": 1.0, "verify": "block"},
    ],
    ids=str,
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_poison_is_seen_through_all_processing(llm, params, value):
    own = SamplingParams(max_tokens=9, seed=1, draft_tokens=3, logprobs=2, **params)
    requests = requests_of(llm, [((1, 2, 3), own)])
    with injecting(llm) as injector:
        injector.poison = Poison(requests[0].id, lambda hit: hit > 2, value)
        (result,) = drive(llm, requests).results.values()
    assert result.finish_reason == "error" and NO_NUMBERS in str(result.stop_reason)


def test_poison_behind_a_refused_draft_harms_nobody(monkeypatch, llm, requests, truth):
    """What follows a draft that does not stand never happened, whatever it was."""
    real_propose, real_forward, plans = llm.engine.proposer.propose, llm.engine.runner.forward, []

    def propose(plan: Plan):
        draft = real_propose(plan)
        plans.append(plan.fitted(draft))
        if draft is not None:
            tokens = [[*truth[row.request.id].token_ids, 0] for row in plan.rows]
            for number, row in enumerate(plan.rows):
                draft.tokens_RK[number] = (tokens[number][row.num_generated] + 1) % VOCAB
        return draft

    def forward(*args):
        hidden, logits = real_forward(*args)
        for first, row in zip(plans[-1].first_logits, plans[-1].rows, strict=True):
            logits[first + 1 : first + row.num_logits] = torch.nan
        return hidden, logits

    monkeypatch.setattr(llm.engine.proposer, "propose", propose)
    monkeypatch.setattr(llm.engine.runner, "forward", forward)
    trace = drive(llm, requests)
    assert_same(trace.results, truth, requests)
    assert sum(output.num_drafted for output in trace.outputs) > 20 and not trace.preempted


@pytest.mark.parametrize("kind", [PagedKv, DeltaNetState])
def test_a_row_whose_state_was_damaged_is_read_afresh(llm, requests, truth, kind):
    """Real poison, as a broken kernel would leave it: in one row's pages or slot."""
    engine, found = llm.engine, {request.id: [] for request in requests}
    for request in requests:
        engine.add(request)
    for number in range(1000):
        if not engine.has_work:
            break
        if number == 4:
            held = engine.state.rows[engine.scheduler.running[0].id]
            for layer in engine.state.layers.values():
                if isinstance(layer, kind) and isinstance(layer, PagedKv):
                    layer.values[held.pages[0], :, 0] = torch.nan
                elif isinstance(layer, kind) and isinstance(layer, DeltaNetState):
                    layer.delta.committed_SHDE[held.slot] = torch.nan
        for output in engine.step().rows:
            found[output.request.id].extend(output.token_ids)
        engine.check_integrity()
    for request in requests:
        assert tuple(found[request.id]) == truth[request.id].token_ids
    assert_all_free(llm)


def test_what_the_cache_kept_of_a_poisoned_row_is_forgotten(llm, requests, truth):
    """A damaged page in the cache would poison every prompt that begins so."""
    request = max(requests, key=lambda one: len(one.prompt))
    state = llm.engine.state
    drive(llm, [request])
    for layer in state.layers.values():
        if isinstance(layer, PagedKv):
            layer.values.fill_(torch.nan)
    found = []
    llm.engine.add(request)
    while llm.engine.has_work:
        step = llm.engine.step()
        assert not any(output.finish_reason == "error" for output in step.rows)
        found.extend(token for output in step.rows for token in output.token_ids)
    assert tuple(found) == truth[request.id].token_ids


def test_an_engine_that_can_do_nothing_says_so(folder, requests, truth):
    llm = load(folder)
    with injecting(llm, strike("forward", lambda _: True)) as injector:
        trace = drive(llm, requests)
    assert injector.raised == MAX_IN_A_ROW + 1, "the last was the engine's own question"
    assert {result.finish_reason for result in trace.results.values()} == {"error"}
    assert llm.engine.failure is not None and "RuntimeError: the kernel broke" in llm.engine.failure
    assert "\n" not in llm.engine.failure
    with pytest.raises(HeadlongError, match="gave up after 8 faults in a row"):
        llm.generate([1, 2, 3])
    llm.engine.restart()
    assert_same(drive(llm, requests).results, truth, requests)


def test_a_model_whose_numbers_are_gone_says_so(monkeypatch, folder, requests):
    llm = load(folder)
    real = llm.engine.model.logits
    monkeypatch.setattr(llm.engine.model, "logits", lambda hidden: real(hidden) * torch.nan)
    many = [replace(request, id=f"{request.id}-{turn}") for turn in range(4) for request in requests]
    trace = drive(llm, many)
    assert {result.finish_reason for result in trace.results.values()} == {"error"}
    assert llm.engine.failure is not None and NO_NUMBERS in llm.engine.failure


def test_bad_requests_do_not_bring_the_engine_down(folder, requests, truth):
    llm = load(folder)
    cases = [((9, number), SamplingParams(max_tokens=4)) for number in range(12)]
    bad = [replace(request, id=f"bad-{request.id}") for request in requests_of(llm, cases)]

    def when(injector: Injector) -> bool:
        return any(row_id.startswith("bad") for row_id in ids(injector.plan))

    with injecting(llm, strike("forward", when)) as injector:
        trace = drive(llm, [*bad, *requests])
    assert injector.raised > MAX_IN_A_ROW and llm.engine.failure is None
    assert {trace.results[request.id].finish_reason for request in bad} == {"error"}
    assert_same(trace.results, truth, requests)


def test_rows_leave_while_a_fault_is_narrowed_down(llm, requests, truth):
    bad = requests[1].id
    with injecting(llm, strike("forward", has(bad))):
        trace = drive(llm, requests, cancel={requests[0].id: 3, bad: 4, requests[3].id: 5})
    for request in requests:
        found = trace.results[request.id].token_ids
        assert found == truth[request.id].token_ids[: len(found)]
        if request.id in (requests[2].id, requests[4].id, requests[5].id):
            assert trace.results[request.id] == truth[request.id]
    assert llm.engine.scheduler.only is None or not llm.engine.has_work
    assert_same(drive(llm, requests[2:]).results, truth, requests[2:])


def test_a_row_that_cannot_be_kept_leaves_all_the_same(llm, requests, truth):
    """A cancelled row offers what it had to others, which may fail too."""
    bad = requests[1].id

    with injecting(llm) as injector:

        def cancelled(stage: str, late: bool, injector: Injector) -> Exception | None:
            return MemoryError() if (stage, late, injector.steps) == ("release", False, 4) else None

        injector.strike = cancelled
        trace = drive(llm, requests, cancel={bad: 4})
    assert injector.raised == 1
    assert_same(trace.results, truth, [request for request in requests if request.id != bad])


def test_the_books_are_checked_every_step_on_demand(folder):
    llm = load(folder, check_every_step=True)
    llm.engine.add(requests_of(llm, [((1, 2, 3), SamplingParams(max_tokens=5))])[0])
    llm.engine.step()
    row = next(iter(llm.engine.state.rows.values()))
    row.pages.append(row.pages[0])
    with pytest.raises(AssertionError):
        llm.engine.step()
