"""Where faults meet the queues, the cache and the caller: nobody is lost on the way, nothing half-written is kept, and
what a row was given before it failed reaches it."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from engine_cases import quiet
from prefix_cases import Served, ask, tokens_of

from headlong import LLM, SamplingParams
from headlong.engine.faults import MAX_IN_A_ROW, PROBE
from headlong.state.paged_kv import PagedKv
from support import tiny, tiny_llama
from support.injection import Injector, Strike
from support.steps import load


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("dense") / "model", "dense", seed=5).folder


@pytest.fixture(scope="module")
def built(folder):
    return load(folder)


def truth_of(built, *requests):
    alone = Served.of(built, prefix_cache=False)
    results = {}
    for request in requests:
        results |= alone.run(replace(request, draft_tokens=0)).results
    return results


@contextmanager
def striking(engine, strike: Strike) -> Iterator[Injector]:
    injector = Injector(engine, strike)
    try:
        yield injector
    finally:
        injector.remove()


@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize("late", [False, True])
def test_rows_sent_back_together_are_not_lost(built, which, late):
    """An urgent row sends two back at once, and keeping what the first or the second had fails."""
    served = Served.of(built, cache_tokens=160, max_rows=3)
    low = [ask(f"low{n}", tokens_of(n, 40), 3 * n, 20, priority=1) for n in range(2)]
    urgent = ask("urgent", tokens_of(5, 140), 3, 4)
    calls = itertools.count(1)

    def strike(stage: str, is_late: bool, _injector: Injector) -> Exception | None:
        hit = (stage, is_late) == ("release", late) and next(calls) == which
        return MemoryError("no room for a copy") if hit else None

    with striking(served.engine, strike) as injector:
        trace = served.run(*low, urgent, arrivals=[0, 0, 3])
    assert injector.raised == 1 and {"low0", "low1"} <= set(trace.preempted)
    assert trace.results == truth_of(built, *low, urgent)


def test_tokens_of_a_step_that_then_failed_reach_their_row(folder):
    """Every step gives the row its tokens and fails afterwards, until the row is given up: what it was given in that
    last step, too, is in the answer."""
    llm = LLM(folder, dtype="float64", max_context=160, page_size=16, progress=quiet)
    params = SamplingParams(max_tokens=30, draft_tokens=0)
    prompt = list(tokens_of(3, 9))
    expected = llm.generate(prompt, params).token_ids
    steps, step = [], llm.engine.step

    def spy():
        steps.append(step())
        return steps[-1]

    def strike(stage: str, late: bool, _injector: Injector) -> Exception | None:
        return RuntimeError("no more") if (stage, late) == ("learn", True) else None

    with striking(llm.engine, strike) as injector:
        injector.engine.step = spy  # type: ignore[method-assign]
        done = llm.generate(prompt, params)
    assert done.finish_reason == "error" and "no more" in str(done.stop_reason)
    assert injector.raised == len(done.token_ids) > 2, "one token a step, and none is missing"
    assert done.token_ids == expected[: len(done.token_ids)]
    for one in steps:
        assert len({output.request.id for output in one.rows}) == len(one.rows)


def test_a_row_is_read_afresh_whatever_others_offer(tmp_path):
    """A page that two rows share is damaged. The one that decodes is put back to be read afresh; the other, which still
    reads its prompt and was not found out yet, must not hand it that page again."""
    tiny_llama.make(tmp_path / "model", seed=7)
    built = load(tmp_path / "model")
    served = Served.of(built, chunk_tokens=17)
    stem = tokens_of(1, 32)
    decoding = ask("decoding", (*stem, 5), 3, 40)
    reading = ask("reading", (*stem, *tokens_of(2, 160)), 3, 4)
    truth = truth_of(built, decoding, reading)
    engine, found = served.engine, {"decoding": [], "reading": []}
    engine.add(decoding)
    for number in range(200):
        if number == 5:
            engine.add(reading)
        if number == 7:
            shared = engine.state.rows["reading"].pages[0]
            assert engine.state.pages.holders(shared) == 2
            for layer in engine.state.layers.values():
                if isinstance(layer, PagedKv):
                    layer.values[shared] = torch.nan
        if not engine.has_work and number > 7:
            break
        for output in engine.step().rows:
            found[output.request.id].extend(output.token_ids)
            assert output.finish_reason != "error", output
        engine.check_integrity()
    assert {name: tuple(tokens) for name, tokens in found.items()} == {
        name: result.token_ids for name, result in truth.items()
    }


@pytest.mark.parametrize("stage", ["forward", "commit", "observe", "finish"])
@pytest.mark.parametrize("late", [False, True])
def test_an_interrupted_step_leaves_nothing_half_written(built, stage, late):
    """Somebody presses Ctrl-C in the middle of a step, the row is cancelled, and its text is asked about again."""
    served = Served.of(built)
    engine, prompt, given = served.engine, tokens_of(4, 40), []
    engine.add(ask("first", prompt, 3, 30))
    other = ask("other", tokens_of(6, 20), 3, 12)
    engine.add(other)
    rest = []

    def step() -> None:
        for output in engine.step().rows:
            (given if output.request.id == "first" else rest).extend(output.token_ids)

    for _ in range(4):
        step()

    def strike(at: str, is_late: bool, _injector: Injector) -> BaseException | None:
        return KeyboardInterrupt() if (at, is_late) == (stage, late) else None

    with striking(engine, strike), pytest.raises(KeyboardInterrupt):  # type: ignore[arg-type]
        engine.step()
    engine.check_integrity()
    step()  # tells what was given before it was interrupted, if anything was
    engine.cancel("first")
    while engine.has_work:
        step()
    assert tuple(rest) == truth_of(built, other)["other"].token_ids
    again = ask("again", (*prompt, *given, *tokens_of(7, 5)), 3, 12)
    assert served.run(again).results == truth_of(built, again)
    assert served.admitted[-1][1] > 0


def test_interrupted_while_the_engine_asks_itself(built):
    """After many faults in a row it tries a question of its own, which is nobody's row and must not stay. Rows that
    had ended by then are told so, and the others go on."""
    served = Served.of(built, max_rows=6)
    engine, requests = served.engine, [ask(f"row{n}", tokens_of(n, 20), 3, 8) for n in range(6)]
    for request in requests:
        engine.add(request)
    told: dict[str, list[int]] = {request.id: [] for request in requests}
    failed: set[str] = set()

    def step() -> None:
        for output in engine.step().rows:
            told[output.request.id].extend(output.token_ids)
            if output.finish_reason == "error":
                failed.add(output.request.id)

    def strike(stage: str, late: bool, injector: Injector) -> BaseException | None:
        if (stage, late) != ("forward", False):
            return None
        own = any(row.request.id == PROBE.id for row in injector.plan.rows)
        return KeyboardInterrupt() if own else RuntimeError("broken")

    with striking(engine, strike), pytest.raises(KeyboardInterrupt):  # type: ignore[arg-type]
        for _ in range(MAX_IN_A_ROW):
            step()
    assert engine.scheduler.find(PROBE.id) is None
    while engine.has_work:
        step()
        engine.check_integrity()
    truth = truth_of(built, *requests)
    assert 0 < len(failed) < 6
    for request in requests:
        assert tuple(told[request.id]) == (() if request.id in failed else truth[request.id].token_ids)
