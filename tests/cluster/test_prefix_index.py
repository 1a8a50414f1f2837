"""Which replica holds the beginning of a prompt: what is reported and sent, what is forgotten, and who is chosen."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headlong.cluster.prefix_index import (
    KEPT_REPORTS,
    REPORTED_KEYS,
    SLACK_REQUESTS,
    PrefixIndex,
    clearly_busier,
    page_keys,
)
from headlong.state.prefix import ROOT, key_of

PAGE = 4
IDLE = {"a": 0, "b": 0, "c": 0}


def prompt(seed: int, count: int, start: tuple[int, ...] = ()) -> tuple[int, ...]:
    rng = random.Random(seed)
    return (*start, *(rng.randrange(100) for _ in range(count)))


def told(keys: dict[str, tuple[int, ...]], **options) -> PrefixIndex:
    """An index whose replicas reported the pages of these prompts."""
    index = PrefixIndex(**options)
    for replica, tokens in keys.items():
        index.report(replica, page_keys((*tokens, 0), PAGE)[::-1], PAGE)
    index.check()
    return index


def test_keys_are_the_beginnings_of_the_prefix_caches_own():
    tokens = tuple(range(10))
    first = key_of(ROOT, tokens[:4])
    assert page_keys(tokens, PAGE) == [first[:8], key_of(first, tokens[4:8])[:8]]
    assert len(page_keys(tokens[:8], PAGE)) == 1, "a token is left to read"
    assert page_keys((), PAGE) == []


def test_the_longest_beginning_wins():
    tokens = prompt(1, 17)
    index = told({"a": tokens[:4], "b": tokens[:12], "c": prompt(2, 16)})
    assert index.cached(tokens, IDLE) == {"a": 4, "b": 12, "c": 0}
    choice = index.choose(tokens, 20, IDLE)
    assert (choice.replicas[0], choice.cached_tokens) == ("b", 12)
    assert index.choose(tokens, 20, {"a": 0, "c": 0}).replicas[0] == "a"


def test_a_later_page_alone_is_enough():
    """Replicas with memories report the pages with checkpoints, which are not all."""
    tokens = prompt(1, 17)
    index = PrefixIndex()
    index.report("a", page_keys(tokens, PAGE)[2:3], PAGE)
    assert index.cached(tokens, ["a"]) == {"a": 12}


def test_a_clearly_busier_replica_is_spared():
    tokens = prompt(1, 128)
    index = told({"a": tokens[:96]})
    weight = 200
    most = SLACK_REQUESTS * weight * 96 // 128
    assert index.choose(tokens, weight, {"a": most, "b": 0}).replicas == ("a", "b")
    assert index.choose(tokens, weight, {"a": most + 1, "b": 0}).replicas == ("b", "a")
    assert not clearly_busier(14_000, 10_000, 1.0, 100), "less than half as much again"
    assert clearly_busier(15_001, 10_000, 1.0, 100)
    assert clearly_busier(14_000, 10_000, 0.5, 100), "for half a prompt it is too much"


def test_a_short_beginning_that_all_prompts_share_does_not_draw_them_to_one_place():
    index = told({"a": prompt(1, 8)})
    assert index.choose(prompt(2, 392, prompt(1, 8)), 500, {"a": 500, "b": 0}).replicas[0] == "b"
    assert index.choose(prompt(2, 392, prompt(1, 8)), 500, {"a": 70, "b": 0}).replicas[0] == "a"


def test_the_second_longest_stands_in_for_a_busy_one():
    tokens = prompt(1, 40)
    index = told({"a": tokens[:36], "b": tokens[:16]})
    loads = {"a": 10_000, "b": 90, "c": 0}
    assert index.choose(tokens, 50, loads).replicas == ("b", "c", "a")


def test_unknown_prompts_go_to_the_less_busy_of_two():
    index = PrefixIndex(seed=3)
    loads = {"a": 10, "b": 20, "c": 30, "d": 40}
    chosen = Counter(index.choose(prompt(seed, 9), 1, loads).replicas[0] for seed in range(600))
    # Of six pairs a is the less busy in three, b in two, c in one.
    assert set(chosen) == {"a", "b", "c"}
    assert chosen["a"] == pytest.approx(300, abs=60)
    assert chosen["c"] == pytest.approx(100, abs=45)


def test_what_was_sent_counts_until_reports_should_name_it():
    tokens = prompt(1, 17)
    index = told({"a": ()})
    index.sent("a", tokens)
    for _ in range(KEPT_REPORTS):
        assert index.cached(tokens, ["a"]) == {"a": 16}
        index.report("a", [], PAGE)
    assert index.cached(tokens, ["a"]) == {"a": 16}
    index.report("a", [], PAGE)
    assert index.cached(tokens, ["a"]) == {"a": 0}
    index.check()


def test_a_report_that_could_name_no_more_says_nothing_of_the_rest():
    tokens = prompt(1, 17)
    index = told({"a": tokens})
    full = [number.to_bytes(16) for number in range(REPORTED_KEYS)]
    index.report("a", full, PAGE)
    assert index.cached(tokens, ["a"]) == {"a": 16}
    index.report("a", full[1:], PAGE)
    assert index.cached(tokens, ["a"]) == {"a": 0}


def test_the_dead_are_forgotten():
    tokens = prompt(1, 17)
    index = told({"a": tokens, "b": tokens[:8]})
    index.forget("a")
    index.forget("nobody")
    index.check()
    assert index.cached(tokens, IDLE) == {"a": 0, "b": 8, "c": 0}
    index.sent("a", tokens)  # a call that was on its way when it died
    assert list(index.replicas) == ["b"]


def test_pages_of_another_size_are_another_cache():
    tokens = prompt(1, 33)
    index = told({"a": tokens[:16], "b": tokens[:16]})
    index.report("b", page_keys(tokens, 8), 8)
    assert index.cached(tokens, IDLE) == {"a": 16, "b": 32, "c": 0}
    index.check()


def test_nobody_to_choose_from():
    assert PrefixIndex().choose((1, 2, 3), 3, {}).replicas == ()


def test_a_long_prompt_is_placed_in_little_time():
    """Of work, not of seconds: every page is hashed once, whatever the number of replicas."""
    tokens = prompt(1, 4 * 2000)
    index = told({f"r{number}": tokens[: 4 * number] for number in range(100)})
    assert index.choose(tokens, 1, dict.fromkeys(index.replicas, 0)).cached_tokens == 4 * 99


REPLICAS = st.sampled_from("abcd")
TOKENS = st.lists(st.integers(0, 2), max_size=24).map(tuple)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("report"), REPLICAS, st.lists(TOKENS, max_size=3), st.sampled_from((2, 4))),
        st.tuples(st.just("sent"), REPLICAS, TOKENS),
        st.tuples(st.just("forget"), REPLICAS),
    ),
    max_size=24,
)


def apply(index: PrefixIndex, event: tuple) -> None:
    kind, replica, *rest = event
    if kind == "report":
        prompts, page_size = rest
        keys = dict.fromkeys(key for tokens in prompts for key in page_keys(tokens, page_size))
        index.report(replica, list(keys), page_size)
    elif kind == "sent":
        index.sent(replica, *rest)
    else:
        index.forget(replica)


@settings(max_examples=80, deadline=None)
@given(EVENTS, st.integers(4, 24), TOKENS, st.dictionaries(REPLICAS, st.integers(0, 60), min_size=1))
def test_whatever_happens(events, max_keys, tokens, loads):
    index, twin = PrefixIndex(max_keys, seed=7), PrefixIndex(max_keys, seed=7)
    for event in events:
        for one in (index, twin):
            apply(one, event)
        index.check()
        assert len(index) <= max_keys
    choice = index.choose(tokens, 5, loads)
    assert choice == twin.choose(tokens, 5, loads), "two that were told the same choose alike"
    assert sorted(choice.replicas) == sorted(loads)
    best, idle = choice.replicas[0], min(loads.values())
    cached = index.cached(tokens, loads)
    assert choice.cached_tokens == cached[best] < max(1, len(tokens))
    if cached[best]:
        assert not clearly_busier(loads[best], idle, cached[best] / len(tokens), 5)
    else:
        assert len(loads) == 1 or loads[best] < max(loads.values()) or len(set(loads.values())) < len(loads)


@settings(max_examples=60, deadline=None)
@given(EVENTS, TOKENS)
def test_without_a_bound_that_matters_only_what_was_told_is_found(events, tokens):
    """Against a list of what each replica was told, searched by comparing tokens."""
    index, sizes = PrefixIndex(), {}
    named: dict[str, set[tuple[int, ...]]] = {}
    for event in events:
        apply(index, event)
        kind, replica, *rest = event
        if kind == "forget" or (kind == "report" and sizes.get(replica, rest[1]) != rest[1]):
            named.pop(replica, None), sizes.pop(replica, None)
        if kind == "report":
            sizes[replica] = rest[1]
            beginnings = named.setdefault(replica, set())
            beginnings |= {one[:end] for one in rest[0] for end in range(rest[1], len(one), rest[1])}
        elif kind == "sent" and replica in sizes:
            size = sizes[replica]
            named[replica] |= {rest[0][:end] for end in range(size, len(rest[0]), size)}
    for replica, length in index.cached(tokens, "abcd").items():
        assert length == 0 or tokens[:length] in named[replica]
