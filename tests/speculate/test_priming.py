"""Pairs that wait: however long a row pauses, its drafts are those of a row the head followed at every step."""

from dataclasses import replace

import pytest
import torch

from headlong.speculate.deferred_pairs import MAX_WAITING
from headlong.speculate.mtp import MtpProposer
from headlong.speculate.priming import WHOLE
from headlong.state.deferred_kv import DeferredKv
from headlong.state.paged_kv import PagedKv
from support import tiny
from support.steps import Chunk, Decode, Driver, load
from support.tiny import random_tokens

DEPTH = 4


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float64"])
def built(request, tmp_path_factory):
    made = tiny.make(tmp_path_factory.mktemp("tiny"), "dense", seed=5)
    return load(made.folder, request.param)


def opened(built, scripts, *, adaptive=True):
    driver = Driver(built, max_rows=max(4, len(scripts)))
    for row, script in scripts.items():
        driver.open(row, script)
        driver.requests[row] = replace(driver.requests[row], adaptive=adaptive)
    return driver


def script(built, length, seed):
    return random_tokens(built.model.config.vocab_size, length, seed=seed)


def proposer(driver) -> MtpProposer:
    assert isinstance(driver.engine.proposer, MtpProposer)
    return driver.engine.proposer


def head_keys(driver, row):
    """What the head has of a row's settled positions."""
    held, state = driver.state.rows[row], driver.state
    layer = state.layers[proposer(driver).head.layers[0].layer.name]
    assert isinstance(layer, PagedKv)
    found = []
    for cache in (layer.keys, layer.values):
        pages = cache[torch.tensor(held.pages)].transpose(1, 2).flatten(0, 1)
        found.append(pages[: held.length])
    return torch.cat(found, dim=-1)


def assert_alike(found, expected, row):
    assert found.length(row) == expected.length(row)
    assert found.propose(row, DEPTH) == expected.propose(row, DEPTH)
    assert torch.equal(head_keys(found, row), head_keys(expected, row))
    slots = [driver.state.rows[row].slot for driver in (found, expected)]
    assert torch.equal(found.state.carry_SD[slots[0]], expected.state.carry_SD[slots[1]])


def count_passes(driver, monkeypatch) -> list[int]:
    head, sizes = proposer(driver).head, []
    honest = head.forward

    def spy(embedding, *rest):
        sizes.append(len(embedding))
        return honest(embedding, *rest)

    monkeypatch.setattr(head, "forward", spy)
    return sizes


@pytest.mark.parametrize("pause", [1, 2, 15, 16, 33, 63, 64, 65, 131])
def test_after_a_pause(built, pause):
    text = {"a": script(built, 150, seed=pause)}
    eager, lazy = opened(built, text, adaptive=False), opened(built, text)
    for driver in (eager, lazy):
        driver.feed("a", [13])
        driver.step(driver.draft("a", 3, 2, seed=1))
        driver.decode("a", pause)
    assert proposer(eager).waiting.count("a") == 0
    assert proposer(lazy).waiting.count("a") == pause % MAX_WAITING
    assert_alike(lazy, eager, "a")
    for driver in (eager, lazy):
        driver.step(driver.draft("a", 2, 0, seed=2))
    assert_alike(lazy, eager, "a")


def test_a_pausing_row_costs_the_head_nothing(built, monkeypatch):
    driver = opened(built, {"a": script(built, 120, seed=1)})
    driver.feed("a", [9])
    with monkeypatch.context() as patch:
        sizes = count_passes(driver, patch)
        driver.decode("a", MAX_WAITING - 1)
        assert sizes == []
        driver.decode("a", 1)
        assert sizes == [], "nobody asks what the head says of them"
    assert proposer(driver).waiting.count("a") == 0


def test_rows_that_pause_at_different_times(built):
    texts = {row: script(built, 120, seed=ord(row)) for row in "abc"}
    eager, lazy = opened(built, texts, adaptive=False), opened(built, texts)
    for driver in (eager, lazy):
        driver.step(*(Chunk(row, 7 * place) for place, row in enumerate("abc", 1)))
        for turn in range(40):
            parts = [
                driver.draft(row, 1 + turn % 3, turn % 2, seed=turn)
                if (turn + 3 * place) % 11 == 0 or row == "b"
                else Decode(row)
                for place, row in enumerate("abc")
                if turn < 30 or row != "c"
            ]
            driver.step(*parts)
    assert proposer(lazy).waiting.count("a") and proposer(lazy).waiting.count("c")
    drafts = lazy.propose_all({"c": 2, "a": 4, "b": 1})
    assert drafts == eager.propose_all({"c": 2, "a": 4, "b": 1})
    for row in "abc":
        assert_alike(lazy, eager, row)


def test_a_prompt_beside_a_pausing_row(built):
    texts = {"a": script(built, 60, seed=1), "b": script(built, 90, seed=2)}
    eager, lazy = opened(built, texts, adaptive=False), opened(built, texts)
    for driver in (eager, lazy):
        driver.feed("a", [11])
        for count, samples in ((1, False), (40, False), (9, False), (3, True)):
            driver.step(Decode("a"), Chunk("b", count, samples=samples))
    assert proposer(lazy).waiting.count("a") == 4 and proposer(lazy).waiting.count("b") == 0
    for row in "ab":
        assert_alike(lazy, eager, row)


def test_settled_rows_owe_nothing_where_nothing_can_be_owed(built):
    texts = {"a": script(built, 60, seed=1), "b": script(built, 60, seed=2)}
    eager, lazy = opened(built, texts, adaptive=False), opened(built, texts)
    lazy.state.deferred_kv = DeferredKv(11)
    for driver in (eager, lazy):
        for row in "ab":
            driver.feed(row, [20])
            driver.decode(row, 12)
    assert not torch.equal(head_keys(lazy, "a"), head_keys(eager, "a"))
    proposer(lazy).flush_deferred(["a", "nobody"])
    assert torch.equal(head_keys(lazy, "a"), head_keys(eager, "a")) and not lazy.state.deferred_kv
    assert [proposer(lazy).waiting.count(row) for row in "ab"] == [0, 12]
    proposer(lazy).flush_deferred(["a"])
    for row in "ab":
        assert_alike(lazy, eager, row)


@pytest.mark.parametrize("then", ["draft", "draft of others", "prompt"])
def test_what_settled_rows_owe_is_written_when_it_is_needed(built, monkeypatch, then):
    texts = {"a": script(built, 150, seed=1), "b": script(built, 150, seed=2)}
    eager, lazy = opened(built, texts, adaptive=False), opened(built, texts)
    for driver in (eager, lazy):
        for row in "ab":
            driver.feed(row, [20])
    with monkeypatch.context() as patch:
        patch.setattr(proposer(lazy).head, "remember", None)  # nothing is written
        for driver in (eager, lazy):
            for _ in range(MAX_WAITING + 5):
                driver.step(Decode("a"), Decode("b"))
        proposer(lazy).flush_deferred("ab")
        assert lazy.state.deferred_kv.num_pairs == 2 * (MAX_WAITING + 5)
        lazy.state.deferred_kv.check(lazy.state.page_size)
    if then != "draft":  # the head was not asked: drafts of another drafter, or known tokens
        part = Chunk("a", 3) if then == "prompt" else None
        for driver in (eager, lazy):
            driver.step(part or driver.draft("a", 2, 1, seed=1))
    assert_alike(lazy, eager, "a")
    assert lazy.state.deferred_kv.num_pairs == MAX_WAITING + 5, "of the other row"
    assert_alike(lazy, eager, "b")
    assert not lazy.state.deferred_kv


def test_many_rows_resume_with_a_pair_each(built):
    """More pairs than are read whole in one pass, and none before any of them."""
    texts = {row: script(built, 60, seed=ord(row)) for row in "abcdefghijkl"}
    eager, lazy = opened(built, texts, adaptive=False), opened(built, texts)
    for driver in (eager, lazy):
        for row in texts:
            driver.feed(row, [9])
        driver.step(*(Decode(row) for row in texts))
    assert len(texts) > WHOLE and all(proposer(lazy).waiting.count(row) == 1 for row in texts)
    depths = dict.fromkeys(texts, 2)
    assert lazy.propose_all(depths) == eager.propose_all(depths)


def test_a_row_that_tries_again_in_vain_goes_on_waiting(built, monkeypatch):
    text = {"a": script(built, 60, seed=5)}
    eager, lazy = opened(built, text, adaptive=False), opened(built, text)
    for driver in (eager, lazy):
        driver.feed("a", [9])
        driver.decode("a", 4)
        driver.propose("a", 2)
        driver.step(driver.draft("a", 2, 0, seed=3))
    assert proposer(lazy).waiting.count("a") == 1
    eager.decode("a", 3)
    with monkeypatch.context() as patch:
        sizes = count_passes(lazy, patch)
        lazy.decode("a", 3)
        assert sizes == [] and proposer(lazy).waiting.count("a") == 4
    assert_alike(lazy, eager, "a")


@pytest.mark.parametrize("fault", ["missing", "too many", "elsewhere", "unprimed"])
def test_books_of_what_waits_are_checked(built, fault):
    driver = opened(built, {"a": script(built, 60, seed=1)})
    driver.feed("a", [20])
    driver.decode("a", 5)
    proposer(driver).check_integrity()
    waiting = proposer(driver).waiting._rows["a"]
    if fault == "missing":
        waiting.spans[0].run.tokens.pop()
    elif fault == "too many":
        waiting.start -= MAX_WAITING
        for _ in range(MAX_WAITING):
            waiting.spans[0].run.tokens.append((0,))
            waiting.spans[0].run.hidden.append(torch.zeros(1))
    elif fault == "elsewhere":
        waiting.start += 1
    else:
        waiting.held.unprimed = [(19, torch.zeros(1))]
    with pytest.raises(AssertionError):
        proposer(driver).check_integrity()
    driver.close("a")
    proposer(driver).check_integrity()


def test_a_row_that_left_leaves_no_pairs(built):
    """The next row has the same name and the same slot."""
    first, second = script(built, 60, seed=1), script(built, 60, seed=2)
    driver, fresh = opened(built, {"a": first}), opened(built, {"a": second})
    driver.feed("a", [20])
    driver.decode("a", 12)
    driver.close("a")
    driver.open("a", second)
    driver.requests["a"] = replace(driver.requests["a"], adaptive=True)
    for each in (driver, fresh):
        each.feed("a", [8])
        each.decode("a", 3)
    assert proposer(driver).waiting.count("a") == 3
    assert_alike(driver, fresh, "a")
    driver.decode("a", 2)
    driver.close("a")
    driver.open("b", first)
    driver.feed("b", [4])
    assert proposer(driver).waiting.count("a") == 0


@pytest.mark.parametrize("chunk", [1, 5, 40])
def test_a_restored_row(built, chunk):
    """Its last pair was left out: the token after it may be another than the one it was first read with."""
    text = script(built, 90, seed=4)
    eager, restored = opened(built, {"a": text}, adaptive=False), opened(built, {"a": text})
    hidden = {}
    for driver in (eager, restored):
        hidden[driver] = driver.step(Chunk("a", 23, samples=False))["a"].hidden[-1]
    held = restored.state.rows["a"]
    layer = restored.state.layers[proposer(restored).head.layers[0].layer.name]
    assert isinstance(layer, PagedKv)
    for cache in (layer.keys, layer.values):
        cache[held.pages[22 // 16], :, 22 % 16] = torch.nan
    held.unprimed = [(22, hidden[restored].clone())]
    for driver in (eager, restored):
        driver.feed("a", [chunk])
        driver.decode("a", 6)
    assert held.unprimed == []
    assert_alike(restored, eager, "a")


def test_rows_that_never_draft_are_not_read(built, monkeypatch):
    driver = opened(built, {"a": script(built, 60, seed=1)})
    driver.requests["a"] = replace(driver.requests["a"], draft_tokens=0, adaptive=False)
    sizes = count_passes(driver, monkeypatch)
    driver.feed("a", [20])
    driver.decode("a", 5)
    assert sizes == [] and proposer(driver).waiting.count("a") == 0
