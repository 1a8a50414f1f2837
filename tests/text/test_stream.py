"""Streaming text: equal to decoding at once, and stop strings independent of the cuts."""

import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_samples import (
    STRINGS,
    byte_fallback_backend,
    metaspace_backend,
    plain_backend,
    wordpiece_backend,
)

from headlong.errors import RequestError
from headlong.text.stream import Detokenizer, StopMatcher, TextEvent, TextStream
from headlong.text.tokenizer import Tokenizer


def cut(items, random: random.Random):
    """`items` in consecutive groups of 0 to 5."""
    start = 0
    while start < len(items):
        size = random.randrange(6)
        yield items[start : start + size]
        start += size


def streamed(tokenizer: Tokenizer, ids: list[int], skip: bool, random: random.Random) -> str:
    detokenizer = Detokenizer(tokenizer, skip)
    return "".join(detokenizer.push(group) for group in cut(ids, random)) + detokenizer.flush()


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.one_of(st.integers(0, 8300), st.integers(0, 270)), max_size=40),
    skip=st.booleans(),
    rng=st.randoms(use_true_random=False),
)
def test_random_tokens_of_the_embedded_model(tale, ids, skip, rng):
    assert streamed(tale, ids, skip, rng) == tale.decode(ids, skip)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60), rng=st.randoms(use_true_random=False))
def test_random_text(tale, text, rng):
    assert streamed(tale, tale.encode(text), False, rng) == text


def test_every_kind_of_broken_utf8(tale):
    single = {tale.token_bytes(i): i for i in range(tale.vocab_size) if len(tale.token_bytes(i)) == 1}
    # One byte at each edge of the ranges in the table of well-formed UTF-8.
    edges = (0x41, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC1, 0xC2, 0xE0, 0xE1, 0xED, 0xF0, 0xF1, 0xF4, 0xF5)
    tokens = [single[bytes([byte])] for byte in edges]
    detokenizer = Detokenizer(tale)
    for sequence in itertools.product(tokens, repeat=3):
        text = "".join([detokenizer.push((i,)) for i in sequence]) + detokenizer.flush()
        assert text == tale.decode(sequence)


def test_partial_characters_are_held(tale):
    detokenizer = Detokenizer(tale)
    single = {tale.token_bytes(i): i for i in range(tale.vocab_size)}
    pushes = [detokenizer.push([single[bytes([byte])]]) for byte in "😀é".encode()]
    assert pushes == ["", "", "", "😀", "", "é"] and detokenizer.flush() == ""


BACKENDS = {
    "byte fallback": byte_fallback_backend,
    "byte fallback, no strip": lambda: byte_fallback_backend(strip=False),
    "metaspace": metaspace_backend,
    "wordpiece": wordpiece_backend,
    "no decoder": plain_backend,
}


@pytest.mark.parametrize("name", BACKENDS)
def test_other_vocabularies(name):
    tokenizer = Tokenizer(BACKENDS[name]())
    assert not tokenizer.is_byte_level
    rng = random.Random(name)
    bytes_of_text = [3 + byte for byte in "aé😀".encode()]  # ids in the byte-fallback vocabulary
    for _ in range(300):
        ids = [rng.randrange(tokenizer.vocab_size + 1) for _ in range(rng.randrange(12))]
        if rng.random() < 0.5:  # mostly ordinary pieces, with well-formed runs of bytes
            ids = [rng.randrange(max(0, tokenizer.vocab_size - 8), tokenizer.vocab_size) for _ in ids]
            if name.startswith("byte"):
                ids[2:2] = bytes_of_text
        skip = rng.random() < 0.5
        assert streamed(tokenizer, ids, skip, rng) == tokenizer.decode(ids, skip)


def test_byte_run_is_shown_when_it_ends():
    tokenizer = Tokenizer(byte_fallback_backend())
    detokenizer = Detokenizer(tokenizer)
    run = [tokenizer._backend.token_to_id(f"<0x{byte:02X}>") for byte in "😀".encode()]
    assert [detokenizer.push([i]) for i in run] == [""] * 4
    assert detokenizer.push([tokenizer._backend.token_to_id("a")]) == "😀a"


@pytest.mark.parametrize("name", ["tale", "byte fallback", "wordpiece"])
def test_cost_per_token_does_not_grow(tale, name):
    tokenizer = tale if name == "tale" else Tokenizer(BACKENDS[name]())
    ids = [random.Random(0).randrange(tokenizer.vocab_size) for _ in range(20_000)]
    detokenizer = Detokenizer(tokenizer)
    start = time.monotonic()
    for i in ids:
        detokenizer.push((i,))
    assert time.monotonic() - start < 30  # re-decoding the whole text each time would take minutes


def oracle(text: str, stops: list[str]) -> tuple[str, str | None]:
    found = [(text.find(stop), rank) for rank, stop in enumerate(stops) if stop in text]
    if not found:
        return text, None
    start, rank = min(found)
    return text[:start], stops[rank]


def searched(pieces, stops: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    emitted = ""
    for piece in pieces:
        safe, stopped = matcher.push(piece)
        emitted += safe
        if stopped is not None:
            assert matcher.push("more") == ("", stopped) and matcher.flush() == ""
            return emitted, stopped
    return emitted + matcher.flush(), matcher.matched


@settings(max_examples=500, deadline=None)
@given(
    text=st.text("abc", max_size=40),
    stops=st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=4),
    rng=st.randoms(use_true_random=False),
)
def test_stops_equal_the_plain_search(text, stops, rng):
    expected = oracle(text, stops)
    assert searched(cut(text, rng), stops) == expected
    assert searched(text, stops) == expected
    assert searched([text], stops) == expected


def test_held_text_is_as_short_as_possible():
    matcher = StopMatcher(["\n\nUser:", "abc"])
    assert matcher.push("Hi there") == ("Hi there", None)
    assert matcher.push("!\n") == ("!", None)
    assert matcher.push("\n") == ("", None)
    assert matcher.push("\n") == ("\n", None)
    assert matcher.push("Use") == ("", None)
    assert matcher.push("ful ab") == ("\n\nUseful ", None)
    assert matcher.flush() == "ab" and matcher.matched is None


def test_overlapping_stops_wait_for_the_earlier_one():
    stops = ["abc", "b"]
    assert searched(["ab", "c"], stops) == ("", "abc")
    assert searched(["ab", "d"], stops) == ("a", "b")
    assert searched(["ab"], stops) == ("a", "b")
    assert searched(["a", "b"], ["ab", "abc"]) == ("", "ab")
    assert searched(["ab", "c"], ["abc", "ab"]) == ("", "abc")


@pytest.mark.parametrize(("stops", "field"), [([""], "stop[0]"), (["a", ""], "stop[1]"), ("abc", "stop: ")])
def test_bad_stops_are_refused(tale, stops, field):
    for build in (StopMatcher, lambda given: TextStream(tale, given)):
        with pytest.raises(RequestError) as caught:
            build(stops)
        assert str(caught.value).startswith(field)


@settings(max_examples=150, deadline=None)
@given(
    ids=st.lists(st.integers(0, 8191), max_size=30), stops=st.lists(st.sampled_from(["e", "th", " a", "�"]))
)
def test_text_stream_equals_decode_then_search(tale, ids, stops):
    stream = TextStream(tale, stops)
    shown = ""
    for i in ids:
        event = stream.push(i)
        shown += event.text
        assert stream.stopped == event.stopped
        if event.stopped:
            break
    shown += stream.finish()
    assert (shown, stream.stopped) == oracle(tale.decode(ids), stops)
    assert stream.finish() == ""


def test_stop_inside_a_token(tale):
    ids = tale.encode("Once upon a time there was")
    stream = TextStream(tale, ["on a t"])
    events = list(map(stream.push, ids))
    assert "".join(event.text for event in events) == "Once up" and stream.stopped == "on a t"
    assert events[-1] == TextEvent("", "on a t") == stream.push(ids[0])
    assert stream.finish() == ""


def test_special_tokens_are_shown_on_demand(tale):
    ids = tale.encode(STRINGS[6])
    for skip in (True, False):
        stream = TextStream(tale, skip_special_tokens=skip)
        text = "".join(stream.push(i).text for i in ids) + stream.finish()
        assert text == tale.decode(ids, skip)


def test_without_tokenizer():
    stream = TextStream(None)
    assert stream.push(5) == TextEvent("", None)
    assert stream.finish() == "" and stream.stopped is None
    with pytest.raises(RequestError, match="tokenizer"):
        TextStream(None, ["x"])
