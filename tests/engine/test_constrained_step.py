"""Rows that a constraint holds, on Triton's kernels: in three launches they give the tokens of steps by parts, whatever
is drafted, and beside rows that are free."""

from dataclasses import replace

import pytest
import torch
from test_whole_step import (  # noqa: F401
    SAMPLED,
    folder,
    going_by_parts,
    outputs,
    pytestmark,
    requests_of,
    right,
    service_of,
)

from headlong.engine.step.device_stepper import DeviceStepper
from headlong.params import Grammar
from headlong.sampling.constraints import packed, unpacked
from support.ruled import Ruled

VOCAB = 97
HELD = Grammar("regex", "whatever: the rule below is what counts")


def third(output: list[int]) -> set[int] | None:
    """Every third token, which ones depends on the last; after a multiple of five all."""
    last = output[-1] if output else 1
    return None if last % 5 == 0 else {token for token in range(VOCAB) if (token + last) % 3 == 0}


def obeys(tokens: list[int]) -> bool:
    return all((rule := third(tokens[:n])) is None or token in rule for n, token in enumerate(tokens))


def constrained(request, *, fails_at: int = 999):
    params = replace(request.params, ignore_eos=False, grammar=HELD, stop_token_ids=())
    return replace(
        request, params=params, stop_ids=frozenset(), constraint=lambda: Ruled(third, VOCAB, fails_at)
    )


def mixed(service, depths, **choice) -> list:
    """One that is held and one that is free, the latter penalised."""
    held, free = requests_of(service, depths, **choice)
    return [constrained(held), replace(free, params=replace(free.params, presence_penalty=0.5))]


@pytest.mark.parametrize(
    ("choice", "depths"),
    [
        pytest.param({}, (0, 0), marks=pytest.mark.slow),
        ({}, (3, 1)),
        pytest.param({}, (None, 2), marks=pytest.mark.slow),
        pytest.param(SAMPLED, (1, 2), marks=pytest.mark.slow),
    ],
    ids=["plain", "drafted", "as the engine chooses", "sampled"],
)
def test_three_launches_give_the_tokens_of_steps_by_parts(service_of, monkeypatch, choice, depths):  # noqa: F811
    service = service_of()
    with monkeypatch.context() as patch:
        patch.setattr(DeviceStepper, "takes", lambda _self, _plan: False)
        expected, _ = outputs(service, mixed(service, (0, 0), **choice))
    held, free = expected.values()
    assert obeys(held) and not obeys(free)
    plans, launches = going_by_parts(service, monkeypatch)
    right(service, expected, monkeypatch)
    found, stood = outputs(service, mixed(service, depths, **choice))
    assert found == expected
    assert all(any(row.known_tokens for row in plan.rows) for plan in plans), "not only prompts went by parts"
    assert len(launches) >= 2
    if any(depths):
        assert max(stood) >= 1 and 0 in stood


def test_nothing_is_launched_before_a_held_row_was_read(service_of, monkeypatch):  # noqa: F811
    """The free one that stays behind is launched ahead again."""
    service = service_of()
    held, free = mixed(service, (0, 0))
    held = replace(held, params=replace(held.params, max_tokens=3))
    _, launches = going_by_parts(service, monkeypatch)
    constraints, honest = service.engine.sampler.table.constraints, DeviceStepper.launch

    def launch(self, plan, *, goes_on=False):
        assert not (goes_on and constraints)
        return honest(self, plan, goes_on=goes_on)

    monkeypatch.setattr(DeviceStepper, "launch", launch)
    outputs(service, [held, free])
    assert {"goes_on": True} in launches


def test_the_first_draft_is_made_among_what_is_allowed(service_of, monkeypatch):  # noqa: F811
    service = service_of()
    stages = service.engine.steppers.graph.stages
    honest, firsts = stages._drafts, []

    def draft(plan, slots_R, ahead):
        drafts_RK = honest(plan, slots_R, ahead)
        for slot, token in zip(slots_R.tolist(), drafts_RK[:, 0].tolist(), strict=True):
            firsts.append((list(service.engine.sampler.table.constraints[slot].output), token))
        return drafts_RK

    monkeypatch.setattr(stages, "_drafts", draft)
    (held, *_) = requests_of(service, (2,))
    outputs(service, [constrained(held)])
    assert len(firsts) >= 2
    assert all((rule := third(output)) is None or token in rule for output, token in firsts)


@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_a_constraint_that_breaks_ends_its_row(service_of, monkeypatch, depth):  # noqa: F811
    """Where it does by parts, and saying the same."""
    service, ends = service_of(), []
    for by_parts in (True, False):
        with monkeypatch.context() as patch:
            if by_parts:
                patch.setattr(DeviceStepper, "takes", lambda _self, _plan: False)
            (request, *_) = requests_of(service, (0 if by_parts else depth,))
            service.engine.add(constrained(request, fails_at=4))
            tokens, told = [], None
            while service.engine.has_work:
                for row in service.engine.step().rows:
                    tokens += row.token_ids
                    told = (row.finish_reason, row.stop_reason)
            service.engine.check_integrity()
            ends.append((tokens, told))
    assert ends[0] == ends[1] and len(ends[0][0]) == 4 and "out of steps" in str(ends[0][1])


@pytest.mark.parametrize("vocab", [8, 13, 97])
def test_bits_of_tokens(vocab):
    allowed = [{0, 3, vocab - 1}, None, set()]
    masks = Ruled(lambda output: allowed[len(output)], vocab).masks([1, 1], 0, 3)
    bits = packed(masks, vocab)
    assert bits.dtype == torch.uint8 and bits.shape == (3, -(-vocab // 8))
    found = unpacked(bits, vocab)
    for line, tokens in zip(found, allowed, strict=True):
        assert line.tolist() == [tokens is None or token in tokens for token in range(vocab)]
