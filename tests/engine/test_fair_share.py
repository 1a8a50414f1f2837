"""Tenants share an engine by turns: one that asks for much waits for itself, not the others for it. Tokens stay."""

import random

from engine_cases import STORY, load

from headlong import SamplingParams
from headlong.engine.turns import MAX_IDLE_TENANTS, Turns

PARAMS = SamplingParams(max_tokens=5, temperature=0.8, seed=3, ignore_eos=True)


def test_one_tenant_is_served_as_it_comes() -> None:
    turns, rng = Turns(), random.Random(1)
    given: list[int] = []
    for _ in range(200):
        given.append(turns.next(""))
        if rng.random() < 0.5:
            turns.serve(given[len(given) // 2])
    assert given == list(range(200))


def test_a_late_tenant_waits_for_one_row() -> None:
    turns = Turns()
    crowd = [turns.next("crowd") for _ in range(100)]
    turns.serve(crowd[3])
    late = [turns.next("late") for _ in range(3)]
    waiting = sorted(
        [(turn, n, "crowd") for n, turn in enumerate(crowd[4:])] + [(turn, 100, "late") for turn in late]
    )
    assert [name for _, _, name in waiting[:6]] == ["late", "crowd", "late", "crowd", "late", "crowd"]


def test_nothing_is_saved_up() -> None:
    """Whoever was away for long has no more turns than whoever was there."""
    turns = Turns()
    turns.next("rare")
    for _ in range(1000):
        turns.serve(turns.next("steady"))
    steady, rare = turns.next("steady"), [turns.next("rare") for _ in range(4)]
    assert rare[1] == steady and rare[3] > steady


def test_tenants_that_left_are_forgotten() -> None:
    turns = Turns()
    for number in range(3 * MAX_IDLE_TENANTS):
        turns.serve(turns.next(f"tenant {number}"))
        turns.serve(turns.next("steady"))
    assert len(turns._next) <= MAX_IDLE_TENANTS


def order_of(tenants: list[str]) -> tuple[list[str], dict[str, tuple[int, ...]]]:
    """In which order rows end that come at once, and their tokens by id; one runs at a time."""
    service = load("auto", max_rows=1, cache_tokens=1024).service
    prompt = service.text.encode(STORY)[:9]
    for number, tenant in enumerate(tenants):
        (request,) = service.requests(prompt, PARAMS, f"{tenant}{number}")
        service.engine.add(request.__class__(**{**request.__dict__, "tenant": tenant}))
    ended: list[str] = []
    tokens: dict[str, tuple[int, ...]] = {}
    while service.engine.has_work:
        for row in service.engine.step().rows:
            tokens[row.request.id] = tokens.get(row.request.id, ()) + row.token_ids
            if row.finish_reason is not None:
                ended.append(row.request.tenant)
    return ended, tokens


def test_rows_of_an_engine() -> None:
    tenants = ["a"] * 5 + ["b"] * 2 + ["c"]
    ended, tokens = order_of(tenants)
    assert ended == ["a", "b", "c", "a", "b", "a", "a", "a"]
    alone, same = order_of([""] * 8)
    assert alone == [""] * 8
    assert set(tokens.values()) == set(same.values()) and len(set(tokens.values())) == 1
