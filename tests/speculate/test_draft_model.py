"""A second model that drafts: follows the rows, rolls itself back, never changes a token."""

import random
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from drafting_cases import acceptance, assert_exact, coming_and_going, draft, load, mixed, use

from engine.engine_cases import drive, plain_alone, requests_of, with_depth
from headlong import SamplingParams
from headlong.errors import ConfigError
from headlong.speculate.draft_model import DraftModelProposer
from headlong.types import Draft, Plan
from support import tiny_llama
from support.steps import kept
from support.steps import load as build

DRAFTERS = ("llama", "recurrent", "hybrid")
"""`hybrid` is the target itself."""


@pytest.fixture(scope="module")
def drafters(models):
    return {name: build(models[name], "float64", mtp="off") for name in DRAFTERS}


@pytest.fixture(scope="module")
def known(models):
    """An engine, requests and what they are without drafts."""
    llm = load(models["hybrid"])
    requests = mixed(llm, seed=1)
    return llm, requests, plain_alone(llm, requests)


def proposer_of(llm) -> DraftModelProposer:
    assert isinstance(llm.engine.proposer, DraftModelProposer)
    return llm.engine.proposer


@pytest.mark.parametrize("name", DRAFTERS)
def test_exact_at_every_depth(known, drafters, name):
    llm, requests, truth = known
    use(llm, draft(llm, drafters[name]))
    for depth in (1, 2, 5):
        drafted, accepted = acceptance(assert_exact(llm, truth, requests, [depth]))
        assert drafted > 50 and accepted > 10
    assert_exact(llm, truth, requests, [0, 3, 6, 1, 5], arrivals=[0, 0, 1, 3, 5, 6, 7, 9, 9])
    proposer = proposer_of(llm)
    proposer.propose(Plan((), 0))
    proposer.check_integrity()
    assert not proposer.own.rows and proposer.own.pages.num_free == proposer.own.pages.size


@pytest.mark.parametrize("name", DRAFTERS)
def test_exact_while_rows_come_and_go(models, drafters, name):
    coming_and_going(lambda llm: draft(llm, drafters[name], chunk_tokens=11), models["hybrid"], seed=2)


def test_a_model_drafts_for_itself(known, drafters):
    """Greedy or seeded, its own drafts are what it would say: all are accepted, and steps are as few as can be."""
    llm, requests, truth = known
    use(llm, draft(llm, drafters["hybrid"], chunk_tokens=1024))
    for depth in (1, 3, 6):
        trace = assert_exact(llm, truth, requests, [depth])
        drafted, accepted = acceptance(trace)
        assert drafted == accepted > 0
        longest = max(len(result.token_ids) for result in truth.values())
        assert len(trace.steps) <= 2 + -(-longest // (depth + 1))


class Checked:
    """At every step a second drafter reads the rows from their beginning; it must draft the same, from a state that
    is the same."""

    def __init__(self, proposer: DraftModelProposer, fresh: DraftModelProposer) -> None:
        self.proposer, self.fresh = proposer, fresh
        fresh.texts = proposer.texts
        self.max_drafts = proposer.max_drafts
        self.observe, self.flush_deferred = proposer.observe, proposer.flush_deferred
        self.check_integrity = proposer.check_integrity
        self.num_drafts = 0

    def propose(self, plan: Plan) -> Draft | None:
        found = self.proposer.propose(plan)
        self.fresh._commit({})
        self.fresh._forget(list(self.fresh.own.rows))
        wanted = self.fresh.propose(plan)
        if found is None or wanted is None:
            assert found is wanted
            return None
        assert found.counts == wanted.counts and torch.equal(found.tokens_RK, wanted.tokens_RK)
        for row in plan.drafting:
            assert_same_state(self.proposer, self.fresh, row.request.id)
        self.num_drafts += sum(found.counts or ())
        return found


def assert_same_state(one: DraftModelProposer, other: DraftModelProposer, row_id: str) -> None:
    views = [
        SimpleNamespace(state=p.own, engine=SimpleNamespace(model=p._runner.model, runner=p._runner))
        for p in (one, other)
    ]
    found = [kept(view, row_id) for view in views]
    assert found[0].keys() == found[1].keys()
    for name in found[0].keys() - {"carry"}:
        assert torch.allclose(found[0][name], found[1][name], rtol=1e-9, atol=1e-9), name


@pytest.mark.parametrize("name", ["llama", "recurrent"])
def test_rejected_drafts_leave_no_trace(models, drafters, name):
    llm = load(models["hybrid"])
    checked = Checked(draft(llm, drafters[name]), draft(llm, drafters[name], chunk_tokens=4096))
    use(llm, checked)
    requests = with_depth(mixed(llm, seed=3, count=4, max_tokens=20), [4, 2, 6])
    drafted, accepted = acceptance(drive(llm, requests))
    assert 0 < accepted < drafted == checked.num_drafts


def test_a_long_prompt_is_read_in_pieces(models, drafters):
    """Beside a row that drafts all the time; the long one drafts as soon as its prompt is read, and not before."""
    llm = load(models["hybrid"], lambda llm: draft(llm, drafters["hybrid"], chunk_tokens=32))
    rng = random.Random(4)
    long = tuple(rng.randrange(97) for _ in range(200))
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    requests = requests_of(llm, [((1, 2, 3), params), (long, params)])
    trace = assert_exact(llm, plain_alone(llm, requests), requests, [3], arrivals=[0, 2])
    by_row = {
        request.id: [output.num_drafted for output in trace.outputs if output.request.id == request.id]
        for request in requests
    }
    short, late = by_row.values()
    assert short[1:-1] == [3] * (len(short) - 2)
    # Its first token comes with the prompt; 201 to 207 tokens are then to be read, 32 a step.
    assert late[:7] == [0] * 7 and set(late[7:-1]) == {3}


def test_rows_that_do_not_draft_cost_nothing(models, drafters):
    llm = load(models["hybrid"], lambda llm: draft(llm, drafters["llama"]))
    forwards, runner = [], proposer_of(llm)._runner
    forward = runner.forward

    def counted(batch, context):
        forwards.append(len(batch.tokens_N))
        return forward(batch, context)

    runner.forward = counted  # type: ignore[method-assign]
    drive(llm, with_depth(mixed(llm, seed=6, count=3), [0]))
    assert not forwards and not proposer_of(llm).own.rows


def test_too_few_pages_mean_fewer_drafts(models, drafters):
    """The drafter's own; the rows go on without drafts."""
    llm = load(models["hybrid"], lambda llm: draft(llm, drafters["hybrid"], num_pages=4))
    requests = mixed(llm, seed=7, count=6)
    truth = plain_alone(llm, requests)
    trace = assert_exact(llm, truth, requests, [4])
    drafted, accepted = acceptance(trace)
    assert drafted == accepted > 0
    assert any(o.num_drafted == 0 and not o.is_first and not o.finish_reason for o in trace.outputs)


def test_a_context_longer_than_the_drafters(models, tmp_path):
    """Past what it was made for it leaves the rows alone."""
    tiny_llama.make(tmp_path, seed=3, head=False, max_position_embeddings=32)
    llm = load(models["hybrid"], lambda llm: draft(llm, build(tmp_path, "float64", mtp="off")))
    requests = requests_of(llm, [((1, 2, 3), SamplingParams(max_tokens=60, ignore_eos=True))])
    trace = assert_exact(llm, plain_alone(llm, requests), requests, [4])
    length, depths = 3, []
    for output in trace.outputs:
        depths.append((length, output.num_drafted))
        length += len(output.token_ids)
    assert all((drafted > 0) == (length + 3 <= 32) for length, drafted in depths[1:-1])


@pytest.mark.parametrize("fault", ["after drafting", "while reading", "while drafting"])
def test_a_step_that_failed_leaves_no_trace(models, drafters, fault):
    """A model's own drafts would not all be accepted if its state were not what the rows are."""
    llm = load(models["hybrid"], lambda llm: draft(llm, drafters["hybrid"]))
    requests = mixed(llm, seed=8, count=4, max_tokens=16)
    truth = plain_alone(llm, requests)
    proposer = proposer_of(llm)
    propose, forward, steps = proposer.propose, proposer._runner.forward, iter(range(10_000))

    def failing(plan: Plan) -> Draft | None:
        if next(steps) % 5 != 3:
            return propose(plan)
        if fault == "after drafting":
            propose(plan)
            return propose(plan)
        passes = iter(range(10_000))

        def fail(batch, context):
            found = forward(batch, context)
            if next(passes) == (fault == "while drafting"):
                raise MemoryError
            return found

        proposer._runner.forward = fail  # type: ignore[method-assign]
        with suppress(MemoryError):
            propose(plan)
        proposer._runner.forward = forward  # type: ignore[method-assign]
        return None

    proposer.propose = failing  # type: ignore[method-assign]
    drafted, accepted = acceptance(assert_exact(llm, truth, requests, [5, 2]))
    assert drafted == accepted > 20 and next(steps) > 4
    proposer.check_integrity()


@pytest.mark.parametrize("verify", ["ratio", "block"])
def test_other_rules_accept_all_of_an_equal(models, drafters, verify):
    """q is p, so nothing is ever refused."""
    llm = load(models["hybrid"], lambda llm: draft(llm, drafters["hybrid"]))
    cases = [
        ((n, 5), SamplingParams(max_tokens=24, temperature=0.9, seed=n, verify=verify, ignore_eos=True))
        for n in range(3)
    ]
    drafted, accepted = acceptance(drive(llm, with_depth(requests_of(llm, cases), [4, 1, 0])))
    assert drafted == accepted > 20


def test_another_vocabulary_is_refused(models):
    other = build(models["other"], "float64", mtp="off")
    with pytest.raises(ConfigError, match=r"drafter has a vocabulary of 96 tokens, the model one of 97"):
        load(models["hybrid"], lambda llm: draft(llm, other))
