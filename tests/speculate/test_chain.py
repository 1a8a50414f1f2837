"""Drafters put together: who drafts for whom, that tokens and laws stay, and how an engine's config names them."""

from dataclasses import replace

import pytest
import torch
from drafting_cases import (
    VOCAB,
    acceptance,
    assert_exact,
    coming_and_going,
    draft,
    drive_in_company,
    load,
    mixed,
    mtp,
    ngram,
    use,
)

from engine.engine_cases import drive, plain_alone, requests_of, with_depth
from headlong import SamplingParams
from headlong.config import EngineConfig
from headlong.engine import proposers
from headlong.errors import ConfigError
from headlong.sampling.sampler import needs_q
from headlong.speculate.chain import First, Then
from headlong.speculate.draft_model import DraftModelProposer
from headlong.speculate.mtp import MtpProposer
from headlong.speculate.ngram import NgramProposer
from headlong.speculate.proposer import NoDrafts
from headlong.types import Draft, Plan, Request, RowPlan
from support.steps import load as build


@pytest.fixture(scope="module")
def parts(models):
    """Ways to draft for `forgetful`, by name; its text runs in circles, so n-grams match now and then."""
    target, other = build(models["forgetful"], "float64"), build(models["llama"], "float64", mtp="off")
    return {
        "ngram+mtp": lambda llm: First(ngram(llm), mtp(llm, target)),
        "mtp>ngram": lambda llm: Then(mtp(llm, target), ngram(llm), 2),
        "ngram+draft": lambda llm: First(ngram(llm), draft(llm, other)),
        "draft>ngram": lambda llm: Then(draft(llm, other, chunk_tokens=5), ngram(llm), 2),
        "ngram+draft+mtp": lambda llm: First(ngram(llm), draft(llm, other, chunk_tokens=3), mtp(llm, target)),
        "ngram+draft>ngram": lambda llm: First(ngram(llm), Then(draft(llm, target), ngram(llm), 1)),
    }


NAMES = ("ngram+mtp", "mtp>ngram", "ngram+draft", "draft>ngram", "ngram+draft+mtp", "ngram+draft>ngram")


@pytest.fixture(scope="module")
def known(models):
    llm = load(models["forgetful"])
    requests = mixed(llm, seed=1)
    return llm, requests, plain_alone(llm, requests)


@pytest.mark.parametrize("name", NAMES)
def test_exact_at_every_depth(known, parts, name):
    llm, requests, truth = known
    use(llm, parts[name](llm))
    for depth in (1, 5):
        assert acceptance(assert_exact(llm, truth, requests, [depth]))[1] > 10
    assert_exact(llm, truth, requests, [0, 4, 6, 1, 2], arrivals=[0, 0, 1, 3, 5, 6, 7, 9, 9])


@pytest.mark.parametrize("name", ["ngram+mtp", "mtp>ngram", "ngram+draft+mtp"])
def test_exact_while_rows_come_and_go(models, parts, name):
    coming_and_going(parts[name], models["forgetful"], seed=3)


class Fixed:
    """Offers the same tokens for a row whenever it is asked, and remembers what it was asked for."""

    def __init__(self, lines: dict[str, list[int]], max_drafts: int = 8) -> None:
        self.lines = lines
        self.max_drafts = max_drafts
        self.asked: list[dict[str, int]] = []
        self.num_observed = 0
        self.flushed: list[str] = []

    def propose(self, plan: Plan) -> Draft | None:
        return self.extend(plan, None)

    def extend(self, plan: Plan, draft: Draft | None) -> Draft | None:
        self.asked.append({row.request.id: row.num_drafts for row in plan.rows})
        lines = [[]] * len(plan.rows) if draft is None else draft.tokens_RK.tolist()
        given = [0] * len(plan.rows) if draft is None else list(draft.counts or ())
        whole = [
            [*line[:count], *self.lines.get(row.request.id, ())][: row.num_drafts]
            for line, count, row in zip(lines, given, plan.rows, strict=True)
        ]
        counts = tuple(len(line) for line in whole)
        if not any(counts):
            return None
        return Draft(
            torch.tensor([[*line, *([0] * (max(counts) - len(line)))] for line in whole]), None, counts
        )

    def observe(self, *_) -> None:
        self.num_observed += 1

    def flush_deferred(self, row_ids) -> None:
        self.flushed.extend(row_ids)

    def check_integrity(self) -> None:
        pass


def plan_of(**depths: int) -> Plan:
    rows = tuple(
        RowPlan(
            Request(name, (1,), SamplingParams(), 0, 0, 8), n + 1, 5, 1 + depth, depth, 0, (), True, 5, ()
        )
        for n, (name, depth) in enumerate(depths.items())
    )
    return Plan(rows, max(depths.values()))


def test_first_come():
    """Each row has the drafts of the first that has any; the next is not asked for it."""
    one, two = Fixed({"a": [1, 2, 3]}), Fixed({"a": [9], "b": [4, 5], "c": [6] * 9})
    chain = First(one, two)
    draft = chain.propose(plan_of(a=2, b=4, c=3, d=3))
    assert draft is not None and draft.counts == (2, 2, 3, 0)
    assert draft.tokens_RK.tolist() == [[1, 2, 0], [4, 5, 0], [6, 6, 6], [0, 0, 0]]
    assert two.asked == [{"a": 0, "b": 4, "c": 3, "d": 3}]
    assert chain.propose(plan_of(d=3)) is None and chain.propose(plan_of(a=0, b=0)) is None
    assert len(two.asked) == 3, "it sees every step, drafting or not"
    chain.observe(*[None] * 5)  # type: ignore[arg-type]
    chain.flush_deferred(iter(["a", "b"]))
    assert one.num_observed == two.num_observed == 1 and one.flushed == two.flushed == ["a", "b"]


def test_one_goes_on_after_the_other():
    one, two = Fixed({"a": [1, 2, 3], "b": [4]}), Fixed({"a": [7, 8, 9], "b": [5], "c": [6]})
    chain = Then(one, two, 2)
    draft = chain.propose(plan_of(a=4, b=4, c=4, d=4, e=1))
    assert draft is not None and draft.counts == (4, 2, 1, 0, 0)
    assert draft.tokens_RK.tolist()[:3] == [[1, 2, 7, 8], [4, 5, 0, 0], [6, 0, 0, 0]]
    assert one.asked == [{"a": 2, "b": 2, "c": 2, "d": 2, "e": 1}]
    assert chain.propose(plan_of(d=3)) is None
    chain.observe(*[None] * 5)  # type: ignore[arg-type]
    chain.flush_deferred(iter(["a", "b"]))
    assert one.num_observed == two.num_observed == 1 and one.flushed == two.flushed == ["a", "b"]


def test_ngram_goes_on_where_the_drafts_lead(models):
    """The text says 10 11 12 13 14; after the drafts 10 11 come 12 and 13, whatever the text ends with."""
    llm = load(models["forgetful"])
    request = Request("row", (10, 11, 12, 13, 14, 40, 41), SamplingParams(), 0, draft_tokens=8)
    held = llm.engine.state.admit("row")
    assert held is not None
    plan = Plan((RowPlan(request, held.slot, 6, 7, 6, 0, (), True, 0, ()),), 6)
    chain = Then(Fixed({"row": [10, 11]}), ngram(llm), 3)
    draft = chain.propose(plan)
    assert (
        draft is not None and draft.tokens_RK.tolist() == [[10, 11, 12, 13, 14, 40]] and draft.counts == (6,)
    )
    chain = Then(Fixed({"row": [50, 51]}), ngram(llm), 3)
    draft = chain.propose(plan)
    assert draft is not None and draft.tokens_RK.tolist() == [[50, 51]] and draft.counts == (2,)


@pytest.mark.parametrize(
    ("name", "rule"), [("ngram+mtp", "ratio"), ("mtp>ngram", "block"), ("ngram+draft", "block")]
)
def test_other_rules_do_not_depend_on_company(models, parts, name, rule):
    llm = load(models["forgetful"], parts[name])
    drive_in_company(llm, max_tokens=24, temperature=0.4, verify=rule)


def test_q_is_there_for_whom_it_judges(models, parts):
    """Every drafted row that is judged by q has a law at each of its drafts, whoever made them."""
    llm = load(models["forgetful"], parts["ngram+mtp"])
    seen, own = [], llm.engine.proposer.propose

    def propose(plan: Plan) -> Draft | None:
        draft = own(plan)
        if draft is not None:
            for row, count, line, n in zip(
                plan.rows, draft.counts or (), draft.tokens_RK.tolist(), range(len(plan.rows)), strict=True
            ):
                if count and needs_q(row.request.params):
                    assert draft.q_RKV is not None
                    q_KV = draft.q_RKV[n, :count]
                    assert torch.allclose(q_KV.sum(-1), torch.ones(count, dtype=q_KV.dtype))
                    assert all(q_KV[i, line[i]] > 0 for i in range(count))
                    seen.append(bool((q_KV.amax(-1) == 1.0).all()))
        return draft

    llm.engine.proposer.propose = propose  # type: ignore[method-assign]
    cases = [
        ((n, n + 1, 30, n, n + 1), SamplingParams(max_tokens=24, temperature=0.5, seed=n, verify=rule))
        for n, rule in enumerate(["ratio", "block", "coupled", "ratio"])
    ]
    drive(llm, with_depth(requests_of(llm, cases), [4, 3]))
    assert True in seen and False in seen, "n-grams and the head both drafted for such rows"


@pytest.fixture(scope="module")
def headed(models):
    return build(models["hybrid"], "float64")


@pytest.fixture(scope="module")
def plain(models):
    return build(models["llama"], "float64", mtp="off")


class TestNames:
    """What EngineConfig.proposer may say."""

    def resolve(self, built, drafter=None, **config) -> proposers.Drafting:
        return proposers.resolve_proposer(EngineConfig(**config), built, drafter)

    def test_auto(self, headed, plain):
        assert self.resolve(headed).parts == ("mtp",)
        assert self.resolve(plain).parts == ()
        assert self.resolve(plain, headed).parts == ("draft",)
        assert self.resolve(headed, plain).parts == ("draft",), "who names a draft model wants it"

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("medusa", "'medusa' is none of mtp, ngram, draft"),
            ("", "'' is none of"),
            ("ngram+", "'' is none of"),
            ("ngram+mtp+ngram", "names 'ngram' twice"),
            ("ngram>mtp", "after '>' only ngram can go on"),
            ("draft", "proposer 'draft' needs drafter"),
            ("ngram+draft", "needs drafter"),
        ],
    )
    def test_refusals(self, headed, name, message):
        with pytest.raises(ConfigError, match=message.replace("+", r"\+")):
            self.resolve(headed, proposer=name)

    def test_no_head(self, plain, headed):
        with pytest.raises(ConfigError, match="needs an MTP head, but MTP was turned off"):
            self.resolve(plain, proposer="ngram+mtp")
        with pytest.raises(ConfigError, match="drafter is given, but proposer 'ngram' does not use it"):
            self.resolve(plain, headed, proposer="ngram")

    @pytest.mark.parametrize(
        ("name", "kinds"),
        [
            ("mtp", (MtpProposer,)),
            ("ngram", (NgramProposer,)),
            ("draft", (DraftModelProposer,)),
            ("ngram+mtp", (First, NgramProposer, MtpProposer)),
            ("mtp>ngram", (Then, MtpProposer, NgramProposer)),
            ("ngram+draft", (First, NgramProposer, DraftModelProposer)),
        ],
    )
    def test_each_is_built_and_exact(self, models, headed, plain, name, kinds):
        llm = load(models["hybrid"])
        drafter = plain if "draft" in name else None
        config = EngineConfig(proposer=name, page_size=16)
        drafting = proposers.resolve_proposer(config, headed, drafter)
        made = proposers.make_proposer(
            drafting, config, headed, drafter, llm.engine.state, llm.engine.sampler
        )
        inside = (
            made.parts
            if isinstance(made, First)
            else (made.first, made.second)
            if isinstance(made, Then)
            else ()
        )
        assert tuple(type(part) for part in (made, *inside)) == kinds
        use(llm, made)
        requests = mixed(llm, seed=9, count=3, max_tokens=12)
        assert_exact(llm, plain_alone(llm, requests), requests, [5])

    def test_nobody_drafts(self, models, plain):
        llm = load(models["hybrid"])
        none = proposers.make_proposer(
            proposers.Drafting(), EngineConfig(), plain, None, llm.engine.state, llm.engine.sampler
        )
        assert isinstance(none, NoDrafts)

    def test_loading_a_draft_model(self, models):
        device = torch.device("cpu")
        config = EngineConfig(drafter=str(models["hybrid"]), dtype="float64")
        built = proposers.load_draft_model(config, VOCAB, device)
        assert built is not None and built.head is None and built.ops.dtype == torch.float64
        assert proposers.load_draft_model(EngineConfig(), VOCAB, device) is None
        with pytest.raises(ConfigError, match="vocabulary of 96 tokens, the model one of 97"):
            proposers.load_draft_model(replace(config, drafter=str(models["other"])), VOCAB, device)


@pytest.mark.parametrize("name", ["draft", "ngram+draft", "draft>ngram"])
def test_the_engine_checks_a_draft_models_state_too(models, name):
    llm = load(models["llama"], proposer=name, drafter=str(models["recurrent"]))
    (request,) = llm.service.requests((1, 2, 3), SamplingParams(max_tokens=20, ignore_eos=True), "row")
    llm.engine.add(request)
    for _ in range(4):
        llm.engine.step()
    llm.engine.check_integrity()
    made = llm.engine.proposer
    inside = made.parts if isinstance(made, First) else (made.first,) if isinstance(made, Then) else (made,)
    (drafter,) = (part for part in inside if isinstance(part, DraftModelProposer))
    drafter.own.rows[request.id].pages.pop()
    with pytest.raises(AssertionError):
        llm.engine.check_integrity()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "serving without drafting: the checkpoint has no MTP head"),
        ({"proposer": "ngram"}, "serving without the MTP head: the checkpoint has no MTP head"),
        ({"drafter": "recurrent"}, "serving without the MTP head: the checkpoint has no MTP head"),
    ],
)
def test_what_is_done_without_is_told(models, caplog, options, told):
    load(models["llama"], **{name: str(models.get(value, value)) for name, value in options.items()})
    assert [record.message for record in caplog.records if told in record.message]
    assert sum("serving without" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("name", ["ngram", "draft", "ngram+draft"])
def test_an_engine_without_a_head_drafts_too(models, name):
    drafter = {"drafter": str(models["recurrent"])} if "draft" in name else {}
    llm = load(models["llama"], proposer=name, **drafter)
    monotonous = SamplingParams(max_tokens=16, logit_bias={3: 100.0}, ignore_eos=True)
    requests = [*mixed(llm, seed=2, count=4), *llm.service.requests((1, 2), monotonous, "monotonous")]
    trace = assert_exact(llm, plain_alone(llm, requests), requests, [4, 2])
    assert acceptance(trace)[1] > 8
    with pytest.raises(ConfigError, match="needs an MTP head, but the checkpoint has no MTP head"):
        load(models["llama"], proposer="mtp>ngram")
    with pytest.raises(ConfigError, match="choose a draft model with the same tokenizer"):
        load(models["llama"], drafter=str(models["other"]))
