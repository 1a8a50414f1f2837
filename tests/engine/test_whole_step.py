"""Steps that are one launch, on Triton's kernels: the tokens are those of steps by parts, whatever is drafted.

Without a GPU the kernels run in Triton's interpreter on a tiny model, whose head is seldom right; `right` then puts the
target's own tokens among its drafts, so that all, some and none of them stand.
"""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from headlong import SamplingParams
from headlong.config import EngineConfig
from headlong.engine.service import Service
from headlong.engine.step.device_stepper import DeviceStepper
from headlong.ops.triton_step import SEEN_IN_PROMPT
from headlong.sampling.tally import Tally
from support import tiny
from support.tiny import random_tokens

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_cuda.py has this for GPUs"),
]
LENGTHS = (3, 2, 2)
"""Of prompts. The interpreter is slow."""
SAMPLED = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.02, "seed": 3}
CHANGED = (
    {"presence_penalty": 100.0, "bad_token_ids": (5, 6), "max_tokens": 7},
    {
        "repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 40.0, "logit_bias": {9: 0.3},
        "max_tokens": 13,
    },
    {"max_tokens": 4},
)  # fmt: skip
"""The first never says anything twice. It ends soon: the last one comes into its slot."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("tiny"), seed=5, **tiny.LEAST).folder


@pytest.fixture
def service_of(folder, monkeypatch):
    monkeypatch.setenv("HEADLONG_TRITON", "interpret")

    def made(**options) -> Service:
        options = {"max_rows": 2, "max_context": 96, "page_size": 16} | options
        return Service.load(folder, EngineConfig(device="cpu", dtype="float32", **options))

    return made


def requests_of(service: Service, depths, **params) -> list:
    asked = SamplingParams(max_tokens=7, ignore_eos=True, **params)
    made = []
    for number, (length, depth) in enumerate(zip(LENGTHS, depths, strict=False)):
        prompt = tuple(random_tokens(97, length, seed=number))
        (request,) = service.requests(prompt, asked, f"row{number}")
        made.append(replace(request, draft_tokens=depth or 0, adaptive=depth is None))
    return made


def outputs(service: Service, requests) -> tuple[dict[str, list[int]], list[int]]:
    """Tokens by row, and the drafts that stood."""
    engine = service.engine
    for request in requests:
        engine.add(request)
    found, stood = {request.id: [] for request in requests}, []
    while engine.has_work:
        step = engine.step()
        engine.check_integrity()
        for row in step.rows:
            found[row.request.id].extend(row.token_ids)
            stood.append(row.num_accepted)
            assert row.finish_reason in (None, "length"), row.stop_reason
    assert not engine.faults.count
    return found, stood


@pytest.fixture(scope="module")
def truth(folder):
    """By the same kernels, plain, by parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADLONG_TRITON", "interpret")
        patch.setattr(DeviceStepper, "takes", lambda _self, _plan: False)
        service = Service.load(
            folder, EngineConfig(device="cpu", dtype="float32", max_rows=2, max_context=96, page_size=16)
        )
        return outputs(service, requests_of(service, (0, 0)))[0]


def right(service: Service, truth: dict[str, list[int]], monkeypatch) -> None:
    """Every draft at an even place of the output is what the target will say; the others are the head's own."""
    stages = service.engine.steppers.graph.stages
    honest = stages._drafts

    def drafts(plan, slots_R, ahead):
        drafts_RK, layout = honest(plan, slots_R, ahead).clone(), plan.layout
        rows = {held.slot: row_id for row_id, held in service.engine.state.rows.items()}
        position_X, each = layout.position_X, 1 + layout.num_drafts
        for line, slot in enumerate(slots_R.tolist()):
            if slot == 0:  # the row has ended
                continue
            row = service.engine.scheduler.find(rows[slot])
            for place in range(drafts_RK.shape[1]):
                at = int(position_X[line * each]) + 1 - len(row.request.prompt) + place
                if at % 4 != 3 and at < len(truth[row.id]):
                    drafts_RK[line, place] = truth[row.id][at]
        return drafts_RK

    monkeypatch.setattr(stages, "_drafts", drafts)


def counted(monkeypatch) -> list[int]:
    """The depths of the steps that were one launch."""
    honest, depths = DeviceStepper.launch, []

    def launch(self, plan, **how):
        depths.append(plan.num_drafts)
        return honest(self, plan, **how)

    monkeypatch.setattr(DeviceStepper, "launch", launch)
    return depths


@pytest.mark.parametrize("depths", [pytest.param((0, 0), marks=pytest.mark.slow), (3, 1), (None, 2)])
def test_one_launch_gives_the_tokens_of_steps_by_parts(service_of, truth, monkeypatch, depths):
    service, seen = service_of(), counted(monkeypatch)
    right(service, truth, monkeypatch)
    found, stood = outputs(service, requests_of(service, depths))
    assert found == truth
    assert len(seen) >= 2 and max(seen) >= max(depth or 0 for depth in depths)
    if any(depths):
        assert max(stood) >= 1 and 0 in stood


def of_two_kinds(service: Service, depths) -> list:
    """One that wants the best tokens beside one that is sampled."""
    best, other = requests_of(service, depths, seed=3)
    return [best, replace(other, params=replace(other.params, **SAMPLED))]


def test_rows_of_two_kinds_give_the_tokens_of_steps_by_parts(service_of, truth, monkeypatch):
    service = service_of()
    with monkeypatch.context() as patch:
        patch.setattr(DeviceStepper, "takes", lambda _self, _plan: False)
        expected, _ = outputs(service, of_two_kinds(service, (0, 0)))
    (best, other), (best_alone, other_alone) = expected.values(), truth.values()
    assert best == best_alone and other != other_alone
    plans, launches = going_by_parts(service, monkeypatch)
    right(service, expected, monkeypatch)
    found, stood = outputs(service, of_two_kinds(service, (2, 1)))
    assert found == expected
    assert max(stood) >= 1 and 0 in stood
    assert all(any(row.known_tokens for row in plan.rows) for plan in plans) and launches


def test_rows_of_two_kinds_go_by_parts_where_no_op_takes_all_filters(service_of, monkeypatch):
    service = service_of()
    monkeypatch.setattr(service.engine.sampler, "_sample", None)
    plans, launches = going_by_parts(service, monkeypatch)
    outputs(
        service, [replace(r, params=replace(r.params, max_tokens=3)) for r in of_two_kinds(service, (0, 0))]
    )
    assert plans and not launches


def test_sampled_rows_give_the_tokens_of_steps_by_parts(service_of, monkeypatch):
    """Each by its own filters."""
    service = service_of()

    def requests(depths):
        first, other = requests_of(service, depths, **SAMPLED)
        return [first, replace(other, params=replace(other.params, temperature=0.7, top_k=0))]

    with monkeypatch.context() as patch:
        patch.setattr(DeviceStepper, "takes", lambda _self, _plan: False)
        expected, _ = outputs(service, requests((0, 0)))
    seen = counted(monkeypatch)
    right(service, expected, monkeypatch)
    found, stood = outputs(service, requests((2, 1)))
    assert found == expected and max(seen) == 2
    assert max(stood) >= 1 and 0 in stood


def changed(service: Service, depths, choice) -> list:
    return [
        replace(request, params=replace(request.params, **changes))
        for request, changes in zip(requests_of(service, depths, **choice), CHANGED, strict=True)
    ]


def checked_counts(monkeypatch) -> None:
    """Before every step that counts, a device has counted what the host has."""
    honest = Tally.update

    def update(self, slots):
        slots = list(slots)
        honest(self, slots)
        for slot in set(slots) & set(self._seen):
            seen, counts_V = self._seen[slot], self.counts_SV[slot]
            assert set(counts_V.nonzero()[:, 0].tolist()) == set(seen.ids)
            assert (counts_V & (SEEN_IN_PROMPT - 1))[list(seen.ids)].tolist() == list(seen.counts)

    monkeypatch.setattr(Tally, "update", update)


def going_by_parts(service: Service, monkeypatch) -> list:
    """The steps that do, and how the others were launched."""
    host, launch, plans, launches = service.engine.steppers.host, DeviceStepper.launch, [], []
    honest = host.launch
    monkeypatch.setattr(host, "launch", lambda plan: plans.append(plan) or honest(plan))
    monkeypatch.setattr(
        DeviceStepper, "launch", lambda self, plan, **how: launches.append(how) or launch(self, plan, **how)
    )
    return [plans, launches]


@pytest.mark.parametrize(
    ("choice", "depths"),
    [({}, (3, 1, 2)), pytest.param(SAMPLED, (2, 1, 0), marks=pytest.mark.slow)],
    ids=["greedy", "sampled"],
)
def test_penalised_and_biased_rows_give_the_tokens_of_steps_by_parts(service_of, monkeypatch, choice, depths):
    """Beside each other, and beside one that is neither; steps go by parts only where a prompt is read, and between
    these some are launched ahead."""
    service = service_of()
    with monkeypatch.context() as patch:
        patch.setattr(DeviceStepper, "takes", lambda _self, _plan: False)
        expected, _ = outputs(service, changed(service, (0, 0, 0), choice))
    distinct = next(iter(expected.values()))
    assert len(set(distinct)) == len(distinct) == 7 and not {5, 6} & set(distinct)
    plans, launches = going_by_parts(service, monkeypatch)
    checked_counts(monkeypatch)
    right(service, expected, monkeypatch)
    found, stood = outputs(service, changed(service, depths, choice))
    assert found == expected
    assert max(stood) >= 1 and 0 in stood
    assert all(any(row.known_tokens for row in plan.rows) for plan in plans)
    assert {"goes_on": True} in launches


def test_penalised_rows_by_parts_where_the_device_has_other_bits(service_of, monkeypatch):
    """What its kernel would give was tried."""
    service = service_of()
    monkeypatch.setattr(service.engine.sampler, "_penalise", None)
    plans, launches = going_by_parts(service, monkeypatch)
    (request, *_) = changed(service, (0, 0, 0), {})
    outputs(service, [replace(request, params=replace(request.params, max_tokens=3))])
    assert len(plans) == 3 and not launches


@pytest.mark.parametrize(
    "depths", [pytest.param((0, 0), marks=pytest.mark.slow), (3, 1)], ids=["plain", "drafted"]
)
def test_log_probabilities_are_those_of_steps_by_parts(service_of, truth, monkeypatch, depths):
    """Of rows that ask; no step is launched ahead meanwhile."""
    service, found = service_of(), []
    plans, launches = going_by_parts(service, monkeypatch)
    for by_parts in (True, False):
        with monkeypatch.context() as patch:
            if by_parts:
                patch.setattr(DeviceStepper, "takes", lambda _self, _plan: False)
            else:
                right(service, truth, patch)
            told, other = requests_of(service, (0, 0) if by_parts else depths)
            told = replace(told, params=replace(told.params, logprobs=3))
            plans.clear()
            found.append(told_of(service, [told, replace(other, params=replace(other.params, max_tokens=9))]))
    expected, ours = found
    asked, silent = expected.values()
    assert len(asked) == 7 and silent == [] and ours == expected
    assert all(any(row.known_tokens for row in plan.rows) for plan in plans), "not only prompts went by parts"
    assert len(launches) >= 2


def told_of(service: Service, requests) -> dict[str, list]:
    """Log-probabilities by row, and where they are told the tokens are those that were emitted."""
    for request in requests:
        service.engine.add(request)
    found = {request.id: [] for request in requests}
    while service.engine.has_work:
        for row in service.engine.step().rows:
            told = row.logprobs
            assert not told or [each.token_id for each in told] == list(row.token_ids)
            found[row.request.id].extend(told)
    return found


ASKED = {"logprobs": {"logprobs": 1}, "ratio": {"temperature": 0.8, "verify": "ratio"}, "nothing": {}}


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_what_rows_cost_that_ask_the_host_is_learned_apart(service_of, monkeypatch, asked):
    service = service_of()
    plans, launches = going_by_parts(service, monkeypatch)
    (request, *_) = requests_of(service, (None, None), **asked)
    outputs(service, [replace(request, params=replace(request.params, max_tokens=4))])
    assert service.engine.depths._kind.apart == bool(asked)
    assert (len(plans) > 1) == (not launches) == ("verify" in asked)
    assert asked or {"goes_on": True} in launches


@pytest.mark.parametrize(
    "choice", [{}, pytest.param(SAMPLED, marks=pytest.mark.slow)], ids=["greedy", "sampled"]
)
def test_minimum_lengths_in_one_launch(service_of, monkeypatch, choice):
    """Every token would end the row but two; until it may end it says these alone."""
    service = service_of()

    def requests(depth):
        first, other = requests_of(service, (depth, 1), **choice)
        ends = frozenset(range(97)) - {11, 12}
        params = replace(first.params, min_tokens=4, ignore_eos=False)
        return [replace(first, params=params, stop_ids=ends), other]

    def ended() -> dict[str, list[int]]:
        found = {}
        while service.engine.has_work:
            for row in service.engine.step().rows:
                found.setdefault(row.request.id, []).extend(row.token_ids)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(DeviceStepper, "takes", lambda _self, _plan: False)
        for request in requests(0):
            service.engine.add(request)
        expected = ended()
    held, _ = expected.values()
    assert len(held) >= 4 and set(held[:4]) <= {11, 12}
    plans, launches = going_by_parts(service, monkeypatch)
    right(service, expected, monkeypatch)
    for request in requests(2):
        service.engine.add(request)
    assert ended() == expected
    assert all(any(row.known_tokens for row in plan.rows) for plan in plans) and launches
