"""Steps that are launched before the one before them is read: the tokens stay, whoever ends, leaves, comes or fails.

On Triton's kernels in its interpreter, which is slow: a tiny model, few tokens.
"""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from headlong import SamplingParams
from headlong.config import EngineConfig
from headlong.engine.engine import Engine
from headlong.engine.service import Service
from headlong.engine.step.device_stepper import DeviceStepper
from headlong.state.row_table import MOST_STOPS
from headlong.types import Request
from support import tiny
from support.tiny import random_tokens

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="made for the interpreter; test_cuda.py is for GPUs"
    ),
]
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("tiny"), seed=5, vocab_size=61, **tiny.LEAST).folder


def load(folder, **options) -> Service:
    options = {"max_rows": 2, "max_context": 96, "page_size": 16, "prefix_cache": False} | options
    return Service.load(folder, EngineConfig(device="cpu", dtype="float32", **options))


def request(name: str, prompt: tuple[int, ...], *, drafts: int = 0, **changes) -> Request:
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    return replace(Request(name, prompt, params, seed=0, draft_tokens=drafts), **changes)


PENALISED = SamplingParams(
    max_tokens=12, ignore_eos=True, presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.2
)
PROMPTS = {"a": tuple(random_tokens(61, 2, seed=0)), "b": tuple(random_tokens(61, 1, seed=1))}


def run(engine: Engine) -> dict[str, list[int]]:
    """What every row gives from here on."""
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for row in engine.step().rows:
            found.setdefault(row.request.id, []).extend(row.token_ids)
        check(engine)
    return found


def check(engine: Engine) -> None:
    """A step ahead reckons with what the one before it may give, and with no more."""
    engine.check_integrity()
    if engine.ahead.launch is not None:
        for row, held in zip(engine.ahead.launch.plan.rows, engine.ahead.launch.held, strict=True):
            assert not held.ahead or row.start - held.length <= engine.max_drafts


def step_until_ahead(engine: Engine) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    while engine.ahead.launch is None:
        for row in engine.step().rows:
            found.setdefault(row.request.id, []).extend(row.token_ids)
    return found


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setenv("HEADLONG_TRITON", "interpret")


@pytest.fixture(scope="module")
def truth(folder):
    return told(folder)


@pytest.fixture(scope="module")
def penalised_truth(folder):
    return told(folder, params=PENALISED)


def told(folder, **changes) -> dict[str, list[int]]:
    """By the same kernels, without drafts, by parts, one row after the other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADLONG_TRITON", "interpret")
        patch.setattr(DeviceStepper, "takes", lambda _self, _plan: False)
        engine = load(folder).engine
        found = {}
        for name, prompt in PROMPTS.items():
            engine.add(request(name, prompt, **changes))
            found |= run(engine)
        return found


def the_truth_as_drafts(engine: Engine, truth: dict[str, list[int]], monkeypatch) -> None:
    """Every draft is what the target will say."""
    assert engine.steppers.graph is not None

    def drafts(plan, slots_R, _ahead):
        layout = plan.layout
        drafts_RK = torch.zeros(len(slots_R), layout.num_drafts, dtype=torch.long)
        held = {own.slot: row_id for row_id, own in engine.state.rows.items()}
        for line, slot in enumerate(slots_R.tolist()):
            if slot:
                row_id = held[slot]
                first = int(layout.position_X[line * (1 + layout.num_drafts)]) + 1 - len(PROMPTS[row_id])
                tokens = truth[row_id][first : first + layout.num_drafts]
                drafts_RK[line, : len(tokens)] = torch.tensor(tokens)
        return drafts_RK

    monkeypatch.setattr(engine.steppers.graph.stages, "_drafts", drafts)


def test_a_row_that_stops_while_the_next_step_is_under_way_is_kept_as_it_was(folder, truth, monkeypatch):
    """It stops inside its accepted drafts; what it had is found by a prompt that goes on from there, and gives the
    tokens of one that was read afresh. The row beside it does not notice."""
    stop = next(n for n in range(4, NUM_TOKENS) if truth["a"].index(truth["a"][n]) == n)
    engine = load(folder, prefix_cache=True).engine
    the_truth_as_drafts(engine, truth, monkeypatch)
    long = SamplingParams(max_tokens=4 * NUM_TOKENS, ignore_eos=True)
    stops = frozenset([truth["a"][stop]])
    engine.add(request("a", PROMPTS["a"], drafts=2, params=long, stop_ids=stops))
    engine.add(request("b", PROMPTS["b"]))
    found, was_ahead = {}, []
    while engine.has_work:
        for row in engine.step().rows:
            found.setdefault(row.request.id, []).extend(row.token_ids)
            if row.finish_reason == "stop":
                was_ahead.append(engine.ahead.launch is not None)
                assert row.num_accepted >= len(row.token_ids), "it was to stop inside its drafts"
        check(engine)
    assert was_ahead == [True] and not engine.faults.count
    ended_by_length = (*PROMPTS["b"], *truth["b"], 5)
    kept = engine.state.prefix.find(ended_by_length, primed=False).length
    assert kept >= len(ended_by_length) - 2, "a row that ends by its length is kept as well"
    assert found == {"a": truth["a"][: stop + 1], "b": truth["b"]}
    more = (*PROMPTS["a"], *found["a"], 5, 6)
    engine.add(request("more", more))
    again, cached = [], []
    while engine.has_work:
        for row in engine.step().rows:
            again.extend(row.token_ids)
            cached.append(row.num_cached)
    assert cached[0] >= len(PROMPTS["a"]) + stop, "what it had was not kept"
    afresh = load(folder).engine
    afresh.add(request("more", more))
    assert again == run(afresh)["more"]


def test_rows_come_and_leave_while_a_step_is_under_way(folder, truth):
    engine = load(folder).engine
    engine.add(request("a", PROMPTS["a"], drafts=2))
    engine.add(request("b", PROMPTS["b"], drafts=1))
    before = step_until_ahead(engine)
    held = engine.state.rows["a"]
    assert held.ahead
    engine.cancel("b")
    engine.check_integrity()
    assert engine.ahead.launch is None and engine.scheduler.find("b") is None and not held.ahead
    again = replace(request("b", PROMPTS["b"]), id="b again")
    engine.add(again)
    after = run(engine)
    assert before["a"] + after["a"] == truth["a"]
    assert "b" not in after and after["b again"] == truth["b"]


def test_the_last_row_leaves_and_nothing_of_the_others_is_lost(folder, truth):
    """A step that had to be settled between steps may bring a row to its end: that is told, though nobody runs."""
    engine = load(folder).engine
    short = replace(request("a", PROMPTS["a"]).params, max_tokens=4)
    engine.add(replace(request("a", PROMPTS["a"]), params=short))
    engine.add(request("b", PROMPTS["b"]))
    before = step_until_ahead(engine)
    while len(before["a"]) < 3:
        for row in engine.step().rows:
            before[row.request.id].extend(row.token_ids)
    assert engine.ahead.launch is not None, "its last token was to be under way"
    engine.cancel("b")
    assert not engine.scheduler.running and engine.has_work
    after = run(engine)
    assert before["a"] + after["a"] == truth["a"][:4]
    assert not engine.has_work


@pytest.mark.slow
def test_a_fault_while_a_step_is_under_way(folder, truth, monkeypatch):
    engine = load(folder).engine
    for name, prompt in PROMPTS.items():
        engine.add(request(name, prompt, drafts=1))
    before = step_until_ahead(engine)
    with monkeypatch.context() as patch:
        patch.setattr(DeviceStepper, "land", lambda *_, **__: 1 / 0)
        assert not engine.step().rows
    assert engine.faults.count == 1
    after = run(engine)
    assert {name: before[name] + after[name] for name in truth} == truth


def test_poison_while_a_step_is_under_way(folder, truth, monkeypatch):
    """The row is read afresh; the step ahead that knew it as poisoned is nothing to it."""
    engine = load(folder).engine
    engine.add(request("a", PROMPTS["a"]))
    engine.add(request("b", PROMPTS["b"]))
    before = step_until_ahead(engine)
    honest = engine.model.logits
    with monkeypatch.context() as patch:

        def poisoned(hidden_ND):
            logits_NV = honest(hidden_ND).clone()
            logits_NV[0, 7] = torch.nan
            return logits_NV

        patch.setattr(engine.model, "logits", poisoned)
        for row in engine.step().rows:  # the step ahead of this one is launched with poison in it
            before[row.request.id].extend(row.token_ids)
    after = run(engine)
    assert engine.faults.count == 1
    assert {name: before[name] + after[name] for name in truth} == truth


@pytest.mark.slow
def test_penalised_rows_are_read_again(folder, penalised_truth, monkeypatch):
    """After a fault, and after one was put back, while the device counted what nobody had read."""
    engine = load(folder).engine
    the_truth_as_drafts(engine, penalised_truth, monkeypatch)
    for name, prompt in PROMPTS.items():
        engine.add(request(name, prompt, drafts=2, params=PENALISED))
    found = step_until_ahead(engine)
    with monkeypatch.context() as patch:
        patch.setattr(DeviceStepper, "land", lambda *_, **__: 1 / 0)
        assert not engine.step().rows
    assert engine.faults.count == 1
    parts = [step_until_ahead(engine)]
    engine._land_ahead()
    engine.scheduler.put_back(engine.scheduler.find("b"))
    parts.append(run(engine))
    for part in parts:
        for name, tokens in part.items():
            found[name] += tokens
    assert found == penalised_truth


def test_a_penalised_row_that_stops_leaves_the_counts_of_others_alone(folder, penalised_truth, monkeypatch):
    """It is computed once more where nobody looks; then somebody comes into its slot."""
    tokens = penalised_truth["a"]
    stop = next(n for n in range(2, len(tokens)) if tokens.index(tokens[n]) == n)
    engine = load(folder).engine
    the_truth_as_drafts(engine, penalised_truth, monkeypatch)
    long = replace(PENALISED, max_tokens=40)
    engine.add(request("a", PROMPTS["a"], drafts=1, params=long, stop_ids=frozenset([tokens[stop]])))
    engine.add(request("b", PROMPTS["b"], params=PENALISED))
    found, slots = {"a": [], "b": []}, {}
    while engine.scheduler.find("a") is not None:
        for row in engine.step().rows:
            found[row.request.id] += row.token_ids
        slots |= {row_id: held.slot for row_id, held in engine.state.rows.items()}
    assert engine.ahead.launch is not None and found["a"] == tokens[: stop + 1]
    engine.add(request("a", PROMPTS["a"], params=PENALISED))
    again = {"a": [], "b": found["b"]}
    while engine.has_work:
        for row in engine.step().rows:
            again[row.request.id] += row.token_ids
        if "a" in engine.state.rows:
            assert engine.state.rows["a"].slot == slots["a"]
    assert again == penalised_truth


@pytest.mark.parametrize("why", ["a stop string", "many stop tokens", "somebody waits", "the end is near"])
def test_no_step_is_launched_ahead(folder, why):
    engine = load(folder, max_rows=1).engine
    params = SamplingParams(max_tokens=4 if why == "the end is near" else 5, ignore_eos=True)
    changes = {}
    if why == "many stop tokens":
        changes["stop_ids"] = frozenset(range(40, 41 + MOST_STOPS))
    engine.add(
        request("a", PROMPTS["a"], drafts=3 if why == "the end is near" else 0, params=params, **changes)
    )
    if why == "somebody waits":
        engine.add(request("b", PROMPTS["b"]))
    if why == "a stop string":
        (row,) = engine.scheduler.waiting
        row.request = replace(row.request, params=replace(params, stop=("never said",)))
    for _ in range(3):
        engine.step()
        assert engine.ahead.launch is None
