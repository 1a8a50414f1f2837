"""Who runs, who waits and who is sent back: priorities, order of arrival, room, and streams that never stall."""

import itertools
import random
from dataclasses import replace

import pytest
from prefix_cases import Served, ask, tokens_of

from headlong.engine import row as row_module
from support import tiny
from support.steps import load


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense") / "model"
    tiny.make(folder, "dense", seed=5)
    return load(folder)


def truth_of(built, requests):
    alone = Served.of(built, prefix_cache=False)
    results = {}
    for request in requests:
        results |= alone.run(replace(request, draft_tokens=0)).results
    return results


def first_runs(trace) -> list[str]:
    """Rows in the order of the steps they were first in."""
    seen = dict.fromkeys(row.request.id for plan in trace.plans for row in plan.rows)
    return list(seen)


def test_lower_goes_first_then_first_come(built):
    served = Served.of(built, max_rows=1)
    order = {"a": 5, "b": 0, "c": 5, "d": -3, "e": 0}
    requests = [ask(name, tokens_of(n, 9), 3, 4, priority=p) for n, (name, p) in enumerate(order.items())]
    trace = served.run(*requests)
    assert first_runs(trace) == ["d", "b", "e", "a", "c"]
    assert not trace.preempted
    assert trace.results == truth_of(built, requests)


def test_an_urgent_row_takes_a_slot_and_the_other_resumes(built):
    served = Served.of(built, max_rows=2)
    requests = [
        ask("old", tokens_of(1, 40), 3, 30, priority=1),
        ask("new", tokens_of(2, 40), 0, 30, priority=1, temperature=0.8),
        ask("urgent", tokens_of(3, 9), 3, 10),
    ]
    trace = served.run(*requests, arrivals=[0, 0, 8])
    assert trace.preempted == ["new"], "the last in rank, and no other"
    assert [row_id for row_id, _ in served.admitted] == ["old", "new", "urgent", "new"]
    assert served.admitted[-1][1] > 40, "it goes on from what it had, generated text included"
    assert trace.results == truth_of(built, requests)
    at = next(n for n, step in enumerate(trace.steps) if "new" in step.preempted)
    assert "urgent" in {row.request.id for row in trace.plans[at].rows}, "it began in that very step"


def test_equals_wait_for_each_other(built):
    served = Served.of(built, max_rows=1)
    requests = [ask("first", tokens_of(1, 9), 3, 25), ask("second", tokens_of(2, 9), 3, 5)]
    trace = served.run(*requests, arrivals=[0, 2])
    assert not trace.preempted and first_runs(trace) == ["first", "second"]


@pytest.mark.parametrize("num_rows", [2, 4])
def test_a_large_row_is_not_passed_by_small_ones_without_end(built, num_rows):
    """Small rows keep coming, and there is always room for one of them; the large one needs nine of ten pages."""
    served = Served.of(built, cache_tokens=160, max_rows=num_rows)
    small = [ask(f"small{n}", tokens_of(n, 20), 3 * (n % 2), 9) for n in range(24)]
    large = ask("large", tokens_of(50, 130), 3, 5)
    trace = served.run(*small, large, arrivals=[*range(24), 6])
    order = first_runs(trace)
    came_before = {f"small{n}" for n in range(7)}
    assert set(order[: order.index("large")]) <= came_before, "nobody who came later went first"
    ended = next(n for n, step in enumerate(trace.steps) for o in step.rows if o.request.id == "large")
    assert ended < 60 and trace.results == truth_of(built, [*small, large])


def test_nobody_starves_behind_urgent_ones(built, monkeypatch):
    """They keep coming, faster than they are served; one that is two levels less urgent lets 2 · 4 of them pass."""
    monkeypatch.setattr(row_module, "PATIENCE", 4)
    served = Served.of(built, max_rows=1)
    patient = ask("patient", tokens_of(60, 20), 3, 12, priority=2)
    urgent = [ask(f"urgent{n}", tokens_of(n, 9), 0, 3) for n in range(30)]
    trace = served.run(patient, *urgent, arrivals=[0, *range(2, 32)])
    order = first_runs(trace)
    assert order[:2] == ["patient", "urgent0"], "it began alone and was sent back"
    ended = [o.request.id for step in trace.steps for o in step.rows if o.finish_reason]
    assert ended.index("patient") == 7 and trace.preempted == ["patient"]
    assert trace.results == truth_of(built, [patient, *urgent])


def test_the_first_of_a_priority_is_never_sent_back(built):
    """However short pages are: whoever is next to end goes on, so that all of them end."""
    served = Served.of(built, cache_tokens=160, max_rows=5)
    requests = [ask(f"row{n}", tokens_of(n, 30), (0, 3, 8)[n % 3], 60) for n in range(5)]
    trace = served.run(*requests)
    assert trace.results == truth_of(built, requests)
    assert trace.preempted
    for plan, step in zip(trace.plans, trace.steps, strict=True):
        assert all(row_id > min(row.request.id for row in plan.rows) for row_id in step.preempted)


def test_nobody_is_sent_back_in_vain(built):
    """The urgent one needs 9 of 10 pages. A row as urgent holds 3 of them: no other's leaving would let it in."""
    served = Served.of(built, cache_tokens=160, max_rows=4)
    requests = [
        ask("as urgent", tokens_of(1, 40), 0, 20),
        ask("less", tokens_of(2, 30), 0, 20, priority=3),
        ask("urgent", tokens_of(3, 130), 0, 5),
    ]
    trace = served.run(*requests, arrivals=[0, 0, 4])
    left = next(
        n
        for n, s in enumerate(trace.steps)
        for o in s.rows
        if o.request.id == "as urgent" and o.finish_reason
    )
    assert not any(step.preempted for step in trace.steps[: left + 1])
    assert trace.results == truth_of(built, requests)


def test_only_those_whose_leaving_helps_are_sent_back(built):
    """The last in rank holds one page, which is of no use; the one before it holds six of ten."""
    served = Served.of(built, cache_tokens=160, max_rows=4)
    requests = [
        ask("large", tokens_of(1, 90), 0, 6, priority=2),
        ask("small", tokens_of(2, 5), 0, 8, priority=3),
        ask("urgent", tokens_of(3, 120), 0, 3),
    ]
    trace = served.run(*requests, arrivals=[0, 0, 3])
    assert trace.preempted == ["large"]
    assert trace.results == truth_of(built, requests)


def test_urgent_rows_that_could_not_begin_yet_send_nobody_back(built):
    """Three urgent prompts of four chunks each: the second sends a row back when the first is read, not before."""
    served = Served.of(built, max_rows=3, chunk_tokens=32)
    low = [ask(f"low{n}", tokens_of(n, 8), 0, 60, priority=1) for n in range(3)]
    urgent = [ask(f"urgent{n}", tokens_of(10 + n, 128), 0, 3) for n in range(3)]
    trace = served.run(*low, *urgent, arrivals=[0, 0, 0, 5, 5, 5])
    assert trace.results == truth_of(built, [*low, *urgent])
    at = [n for n, step in enumerate(trace.steps) if step.preempted]
    assert at[0] == 5 and all(later - earlier >= 3 for earlier, later in itertools.pairwise(at))


def test_streams_run_in_every_step_beside_long_prompts(built):
    """Whoever decodes is in every step until it ends, and a step's tokens are bounded."""
    served = Served.of(built, chunk_tokens=32, max_rows=4)
    streams = [ask(f"stream{n}", tokens_of(n, 6), 3 * n, 40, ignore_eos=True) for n in range(2)]
    prompts = [ask(f"prompt{n}", tokens_of(20 + n, 200), 3, 3) for n in range(2)]
    trace = served.run(*streams, *prompts, arrivals=[0, 0, 3, 3])
    assert trace.results == truth_of(built, [*streams, *prompts])
    for stream in streams:
        runs = [n for n, plan in enumerate(trace.plans) if stream.id in {row.request.id for row in plan.rows}]
        assert runs == list(range(runs[0], runs[-1] + 1))
    for plan in trace.plans:
        decoding = sum(row.query_len for row in plan.rows if not row.known_tokens)
        reading = plan.num_tokens - decoding
        assert reading <= max(32 - decoding, 16)
    together = [p for p in trace.plans if len({bool(row.known_tokens) for row in p.rows}) == 2]
    assert len(together) > 10


def test_prompts_are_read_however_many_decode(built):
    """Four rows with eight drafts each have more tokens than a step's budget of 17; prompts still get a page."""
    served = Served.of(built, chunk_tokens=17, max_rows=5)
    streams = [ask(f"stream{n}", tokens_of(n, 3), 8, 60) for n in range(4)]
    prompt = ask("prompt", tokens_of(9, 64), 8, 2)
    trace = served.run(*streams, prompt, arrivals=[0, 0, 0, 0, 5])
    read = [
        row.query_len
        for plan in trace.plans
        for row in plan.rows
        if row.request.id == "prompt" and row.known_tokens
    ]
    assert read == [16, 16, 16, 16]
    assert trace.results == truth_of(built, [*streams, prompt])


@pytest.mark.parametrize("seed", range(4))
def test_everybody_ends_in_any_room(built, seed):
    """Rows that need nearly all pages among small ones, priorities at random: no dead end, the same tokens, and
    within one priority nobody is admitted for the first time before an earlier one."""
    rng = random.Random(seed)
    served = Served.of(
        built, cache_tokens=rng.choice((112, 128, 192)), max_rows=rng.choice((1, 2, 4)), chunk_tokens=24
    )
    requests = [
        ask(
            f"row{n}",
            tokens_of(rng.randrange(6), rng.choice((3, 16, 17, 40, 80, 95))),
            rng.choice((0, 3, 8)),
            rng.choice((1, 6, 12)),
            priority=rng.choice((0, 1, 2)),
            temperature=rng.choice((0.0, 0.9)),
        )
        for n in range(12)
    ]
    arrivals = sorted(rng.randrange(30) for _ in requests)
    trace = served.run(*requests, arrivals=arrivals)
    assert trace.results == truth_of(built, requests)
    order = first_runs(trace)
    for priority in range(3):
        same = [request.id for request in requests if request.params.priority == priority]
        assert [row_id for row_id in order if row_id in same] == same


def test_a_row_that_is_to_be_alone_shares_no_step_until_it_has_its_tokens(built):
    served = Served.of(built, max_rows=2)
    requests = [
        ask("old", tokens_of(1, 40), 3, 30, priority=1),
        ask("new", tokens_of(2, 40), 0, 30, priority=1, temperature=0.8),
        replace(ask("suspect", tokens_of(3, 90), 3, 20, priority=9), alone=6),
        replace(ask("another", tokens_of(4, 9), 0, 12, priority=9), alone=4),
        ask("late", tokens_of(5, 9), 0, 9),
    ]
    trace = served.run(*requests, arrivals=[0, 0, 6, 6, 7])
    assert trace.results == truth_of(built, requests)
    for name, alone in (("suspect", 6), ("another", 4)):
        steps = [n for n, plan in enumerate(trace.plans) if name in {row.request.id for row in plan.rows}]
        given, shared = 0, 0
        for n in steps:
            if len(trace.plans[n].rows) > 1:
                shared += 1
                assert given >= alone, "in company before it had its tokens"
            else:
                assert given < alone or n == steps[-1] or shared, "alone for longer than was asked for"
            given += sum(len(row.token_ids) for row in trace.steps[n].rows if row.request.id == name)
        assert shared, "then it goes on beside the others"
        assert len(trace.plans[steps[0]].rows) == 1 and steps[0] <= 8 + 90, "nothing is waited for"
    assert first_runs(trace)[:4] == ["old", "new", "suspect", "another"]


def test_who_had_its_turn_elsewhere_has_it_here(built):
    served = Served.of(built, max_rows=1)
    requests = [ask(name, tokens_of(n, 9), 0, 4) for n, name in enumerate("abcd")]
    moved = [replace(ask(name, tokens_of(n, 9), 0, 4), again=True) for n, name in enumerate("xy", 7)]
    trace = served.run(*requests, *moved, arrivals=[0, 0, 0, 0, 1, 1])
    assert first_runs(trace) == list("axybcd")
    assert trace.results == truth_of(built, [*requests, *moved])
