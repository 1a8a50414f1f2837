"""Rows whose masks take long: they wait for their own, the others go on, and no token changes."""

import threading
import time

import pytest

from headlong.checkpoint.source import EMBEDDED
from headlong.config import EngineConfig
from headlong.engine.service import Service
from headlong.params import Grammar, SamplingParams
from headlong.text import constraint as constraint_module
from headlong.text import grammar_row
from headlong.text.constraint import Matcher
from headlong.types import Request

HELD = Grammar("lark", "start: word+\nword: /[a-z]+/ | /[a-m]+/ | word word")
LONG = Grammar("regex", "( [a-z]{2,7}){30}")


@pytest.fixture(scope="module")
def service() -> Service:
    return Service.load(EMBEDDED, EngineConfig(max_rows=4, mtp="on"))


def requests(service: Service, name: str, **options: object) -> list[Request]:
    params = SamplingParams(max_tokens=24, ignore_eos=options.get("grammar") is None, **options)
    return service.requests(service.text.encode("Once upon a time"), params, name)


def outputs(service: Service, wanted: list[Request]) -> tuple[dict[str, list[int]], list[str]]:
    """The tokens of each request, and which request each of the steps gave tokens to."""
    tokens: dict[str, list[int]] = {request.id: [] for request in wanted}
    order = []
    for request in wanted:
        service.engine.add(request)
    while service.engine.has_work:
        for row in service.engine.step().rows:
            tokens[row.request.id] += row.token_ids
            order.append(row.request.id)
    service.engine.check_integrity()
    return tokens, order


@pytest.mark.parametrize(
    "choice", [{}, {"temperature": 1.0, "seed": 3}, {"draft_tokens": 3}], ids=["greedy", "sampled", "drafted"]
)
def test_no_token_changes(service, monkeypatch, choice):
    wanted = [*requests(service, "held", grammar=HELD, **choice), *requests(service, "free", **choice)]
    expected, _ = outputs(service, wanted)
    monkeypatch.setattr(constraint_module, "MAX_MASK_SECONDS", -1.0)
    found, _ = outputs(service, wanted)
    assert found == expected and all(found.values())


def test_others_do_not_wait(service, monkeypatch):
    """A row with masks of 50 ms beside one that has none: the other ends long before it, at its usual speed."""
    wanted = [*requests(service, "held", grammar=HELD), *requests(service, "free", draft_tokens=0)]
    expected, _ = outputs(service, wanted)
    usual = Matcher.mask

    def slow(self):
        mask = usual(self)
        time.sleep(0.05)
        return mask

    monkeypatch.setattr(Matcher, "mask", slow)
    monkeypatch.setattr(constraint_module, "MAX_MASK_SECONDS", -1.0)
    found, order = outputs(service, wanted)
    assert found == expected
    last = max(place for place, name in enumerate(order) if name == "free.0")
    assert order[:last].count("held.0") < order[:last].count("free.0") / 2


@pytest.mark.parametrize("drafts", [0, 3])
def test_others_do_not_wait_for_the_first_slow_mask(service, monkeypatch, drafts):
    """A row whose masks are quick but for a few, which nothing announces, be it after what was emitted or after a
    draft. These are only made once another row has gone on; and no token changes."""
    free = requests(service, "free", draft_tokens=0)
    wanted = [*requests(service, "held", grammar=LONG, draft_tokens=drafts), *free]
    expected, _ = outputs(service, wanted)
    usual, asked, waited = Matcher.mask, [], []
    gone_on = threading.Condition()
    tokens = {"free.0": 0}

    def slow(self):
        asked.append(self)
        if len(asked) in (2, 5, 9, 10, 16):
            with gone_on:
                goal = min(tokens["free.0"] + 2, 24)
                waited.append(gone_on.wait_for(lambda: tokens["free.0"] >= goal, timeout=20))
        return usual(self)

    usual_step = service.engine.step

    def step():
        result = usual_step()
        with gone_on:
            tokens["free.0"] += sum(len(row.token_ids) for row in result.rows if row.request.id == "free.0")
            gone_on.notify_all()
        return result

    monkeypatch.setattr(Matcher, "mask", slow)
    monkeypatch.setattr(service.engine, "step", step)
    found, _ = outputs(service, wanted)
    assert found == expected and {name: len(one) for name, one in found.items()} == {
        "held.0": 24,
        "free.0": 24,
    }
    assert len(waited) >= 3 and all(waited), "a step waited for a mask"


def test_a_row_has_a_bound_on_its_masks_in_all(service, monkeypatch):
    monkeypatch.setattr(constraint_module, "MAX_MASK_SECONDS", -1.0)
    monkeypatch.setattr(grammar_row, "MAX_ROW_SECONDS", 0.0005)
    wanted = [*requests(service, "held", grammar=LONG), *requests(service, "free")]
    ends = {}
    for request in wanted:
        service.engine.add(request)
    while service.engine.has_work:
        for row in service.engine.step().rows:
            ends[row.request.id] = row
    service.engine.check_integrity()
    assert ends["free.0"].finish_reason == "length"
    assert ends["held.0"].finish_reason == "error"
    assert "took more than 0.0005 seconds" in str(ends["held.0"].stop_reason)


def test_a_row_that_leaves_while_its_mask_is_made(service, monkeypatch):
    usual = Matcher.mask
    monkeypatch.setattr(Matcher, "mask", lambda self: (time.sleep(0.05), usual(self))[1])
    monkeypatch.setattr(constraint_module, "MAX_MASK_SECONDS", -1.0)
    (held,) = requests(service, "gone", grammar=HELD)
    service.engine.add(held)
    for _ in range(3):
        service.engine.step()
    service.engine.cancel(held.id)
    assert not service.engine.has_work
    service.engine.check_integrity()


def test_masks_that_take_long_are_noticed(service):
    """A grammar that can be read in many ways, the more the longer its text."""
    ambiguous = Grammar("lark", 'start: s\ns: "a" | "b" | s s | s s s')
    assert service.grammars is not None
    constraint = service.grammars.compile(ambiguous)()
    assert not constraint.slow
    token = service.text.encode("a", False)[-1]
    worst, many = 0.0, 0
    while many < 5:
        assert constraint.advance([token]) == 1 or constraint.failure
        if constraint.failure:
            break
        while not constraint.ready(1.0):
            pass
        started = time.thread_time()
        constraint.masks([], 0, 1)
        worst, many = max(worst, time.thread_time() - started), many + constraint.slow
    assert constraint.slow or constraint.failure
    assert worst < 0.05, "the slow ones were made by another thread"
