"""N-gram lookup: what it finds, what it costs, and that it never changes a token."""

import random
import time
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from drafting_cases import (
    VOCAB,
    acceptance,
    assert_exact,
    coming_and_going,
    drive_in_company,
    load,
    mixed,
    ngram,
)

from engine.engine_cases import drive, plain_alone, requests_of, with_depth
from headlong import SamplingParams
from headlong.speculate.history import UNKNOWN, Text, Texts
from headlong.speculate.ngram import MAX_MATCH, MIN_MATCH, NgramProposer, SuffixIndex
from headlong.types import Plan, Request, RowPlan, Verdict


def request_of(prompt, draft_tokens: int = 4, **params) -> Request:
    return Request("row", tuple(prompt), SamplingParams(**params), 0, draft_tokens=draft_tokens)


def index_of(tokens, min_match: int = MIN_MATCH, max_match: int = MAX_MATCH) -> SuffixIndex:
    index = SuffixIndex(Text(request_of(tokens)), min_match, max_match)
    index.follow()
    return index


def slow_search(tokens: list[int], extra: list[int], count: int, min_match: int, max_match: int) -> list[int]:
    """The definition: the longest run of last tokens that ended before the last one, the latest such place."""
    whole = [*tokens, *extra]
    for length in range(min(max_match, len(whole)), min_match - 1, -1):
        for end in range(len(tokens) - 2, length - 2, -1):
            if tokens[end + 1 - length : end + 1] == whole[-length:]:
                made = list(whole)
                for place in range(end + 1, end + 1 + count):
                    made.append(made[place])
                return made[len(whole) :]
    return []


@pytest.mark.parametrize(
    ("text", "count", "drafts"),
    [
        ([1, 2, 3, 4, 9, 1, 2], 2, [3, 4]),
        ([1, 2, 3, 4, 9, 1, 2], 5, [3, 4, 9, 1, 2]),
        ([1, 2, 3, 5, 1, 2, 4, 6, 1, 2], 2, [4, 6]),  # the latest
        ([9, 1, 2, 3, 5, 1, 2, 4, 9, 1, 2], 2, [3, 5]),  # but rather the longest
        ([7, 8, 7, 8, 7], 6, [8, 7, 8, 7, 8, 7]),  # overlapping its own end
        ([5, 5, 5], 4, [5, 5, 5, 5]),
        ([1, 2, 3, 4, 5, 2], 3, []),  # one token is no match
        ([1], 3, []),
        ([1, 1], 3, []),
    ],
)
def test_what_followed_follows_again(text, count, drafts):
    assert index_of(text).continuation([], count) == drafts


@pytest.mark.parametrize("seed", range(6))
def test_the_index_finds_what_a_search_finds(seed):
    """Few enough places that the search's limit is not met."""
    rng = random.Random(seed)
    min_match, max_match = rng.choice([(1, 3), (2, 4), (3, 3), (2, 6)])
    text = Text(request_of([rng.randrange(9)]))
    index = SuffixIndex(text, min_match, max_match)
    found = 0
    for _ in range(110):
        text.tokens.extend(rng.randrange(9) for _ in range(rng.randrange(3)))
        index.follow()
        extra = [rng.randrange(9) for _ in range(rng.randrange(3))]
        drafts = index.continuation(extra, 5)
        assert drafts == slow_search(list(text.tokens), extra, 5, min_match, max_match)
        found += bool(drafts)
    assert found > 10


@pytest.mark.parametrize("min_match", [1, 2, 4])
def test_a_prompt_is_indexed_at_once_or_bit_by_bit(min_match):
    """Pieces on either side of what is hashed in one go, tokens nobody told among them."""
    rng = random.Random(min_match)
    tokens = [UNKNOWN if rng.random() < 0.05 else rng.randrange(150_000 if n % 2 else 9) for n in range(900)]
    slow, quick = (SuffixIndex(Text(request_of([1])), min_match, 6) for _ in range(2))
    for token in tokens:
        slow.text.tokens.append(token)
        slow.follow()
    for first, last in pairwise([0, 1, 3, 70, 75, 300, 301, 900]):
        quick.text.tokens.extend(tokens[first:last])
        quick.follow()
    assert (slow._newest, slow._older) == (quick._newest, quick._older)
    assert max(slow._older) > 0


def test_tokens_nobody_told_are_never_drafted():
    text = Text(request_of([1, 2, 3]))
    text.tokens.extend([UNKNOWN, UNKNOWN, UNKNOWN, 4, 1, 2])
    index = SuffixIndex(text, 2, 4)
    index.follow()
    assert index.continuation([], 5) == [3]
    assert index.continuation([UNKNOWN, UNKNOWN], 3) == []


def test_memory_is_bounded():
    rng = random.Random(0)
    index = index_of([rng.randrange(150_000) for _ in range(100_000)])
    assert index.nbytes <= 100_000 * 4 + (1 << 16) * 4
    assert index_of([1, 2, 3]).nbytes < 8192


@pytest.mark.serial
def test_a_step_costs_little(models):
    """Sixteen rows in the middle of 8,000 tokens: a text is read once, and a step does not depend on its length."""
    llm = load(models["hybrid"], max_rows=16)
    state, rng = llm.engine.state, random.Random(0)
    rows = []
    for n in range(16):
        request = replace(
            request_of([rng.randrange(VOCAB) for _ in range(8000)], max_tokens=64), id=f"row{n}"
        )
        held = state.admit(request.id)
        assert held is not None
        rows.append(RowPlan(request, held.slot, 7999, 5, 4, 0, (), True, 0, ()))
    proposer, plan = ngram(llm), Plan(tuple(rows), 4)
    costs = []
    for _ in range(21):
        started = time.perf_counter()
        assert proposer.propose(plan) is not None
        costs.append(time.perf_counter() - started)
    assert costs[0] < 20.0 and sorted(costs[1:])[10] < 0.1, costs


class TestTexts:
    """What is known of rows that come, go, come back and are cut."""

    def setup_method(self):
        self.state = type("FakeState", (), {"rows": {}, "slots": type("Slots", (), {"size": 2})})()
        self.texts = Texts(self.state)

    def plan(self, request, start, count, generated, known=()):
        self.state.rows[request.id] = None
        row = RowPlan(request, 1, start, count, 0, 0, (), True, generated, tuple(known))
        return Plan((row,), 0)

    def tokens(self, request):
        return list(self.texts[request.id].tokens)

    def test_a_prompt_whose_beginning_was_restored(self):
        request = request_of(range(10))
        self.texts.follow(self.plan(request, 8, 2, 0, known=(8, 9)))
        assert self.tokens(request) == list(range(10)) and self.texts[request.id].complete

    def test_a_row_that_resumes_inside_its_output(self):
        request = request_of(range(4))
        plan = self.plan(request, 0, 4, 0, known=range(4))
        self.texts.follow(plan)
        self.texts.observe(plan, verdict_of((50,)))
        plan = self.plan(request, 4, 1, 1)
        self.texts.follow(plan)
        self.texts.observe(plan, verdict_of((51, 52)))
        self.state.rows.clear()
        self.texts.follow(Plan((), 0))
        assert request.id not in self.texts
        self.texts.follow(self.plan(request, 6, 1, 3, known=(52,)))
        text = self.texts[request.id]
        assert list(text.tokens) == [0, 1, 2, 3, 50, 51, 52] and text.complete and text.version == 0

    def test_a_step_that_never_happened(self):
        """The proposer saw its tokens, the row did not take them: it is read again and goes on otherwise."""
        request = request_of(range(4))
        plan = self.plan(request, 0, 4, 0, known=range(4))
        self.texts.follow(plan)
        self.texts.observe(plan, verdict_of((50, 51)))
        self.texts.follow(self.plan(request, 0, 4, 0, known=range(4)))
        assert self.tokens(request) == [0, 1, 2, 3] and self.texts[request.id].version == 1

    def test_a_row_that_was_forgotten(self):
        request = request_of(range(4))
        self.texts.follow(self.plan(request, 6, 1, 3, known=(52,)))
        text = self.texts[request.id]
        assert list(text.tokens) == [0, 1, 2, 3, UNKNOWN, UNKNOWN, 52] and not text.complete
        self.texts.follow(self.plan(request, 0, 6, 3, known=(0, 1, 2, 3, 50, 51, 52)))
        assert list(text.tokens) == [0, 1, 2, 3, 50, 51, 52] and text.complete

    def test_an_id_that_is_used_again(self):
        first, second = request_of(range(4)), request_of(range(20, 23))
        self.texts.follow(self.plan(first, 0, 4, 0, known=range(4)))
        self.texts.follow(self.plan(second, 0, 3, 0, known=range(20, 23)))
        assert self.tokens(second) == [20, 21, 22]

    def test_few_of_those_that_left_are_kept(self):
        for n in range(50):
            self.state.rows.clear()
            request = replace(request_of(range(100)), id=f"row{n}")
            self.texts.follow(self.plan(request, 0, 100, 0, known=range(100)))
        assert len(self.texts._texts) == 1 and len(self.texts._away) == 2

    def test_rows_that_never_draft_are_not_followed(self):
        request = request_of(range(4), draft_tokens=0)
        self.texts.follow(self.plan(request, 0, 4, 0, known=range(4)))
        assert request.id not in self.texts


def verdict_of(tokens):
    nothing = torch.zeros(0, dtype=torch.long)
    return Verdict(nothing, (len(tokens) - 1,), (tuple(tokens),), ((),), ((),))


def test_exact_at_every_depth(models):
    llm = load(models["forgetful"], ngram)
    requests = mixed(llm, seed=1)
    truth = plain_alone(llm, requests)
    for depth in range(1, 7):
        trace = assert_exact(llm, truth, requests, [depth])
        assert acceptance(trace)[0] > 0
    assert_exact(llm, truth, requests, [0, 3, 6, 1], arrivals=[0, 0, 1, 3, 5, 6, 7, 9, 9])


@pytest.mark.parametrize("seed", range(3))
def test_exact_while_rows_come_and_go(models, seed):
    coming_and_going(ngram, models["forgetful"], seed)


def test_text_that_runs_in_circles(models):
    """Nearly all drafts are accepted once the circle was gone through."""
    llm = load(models["forgetful"], ngram)
    params = [SamplingParams(max_tokens=120, ignore_eos=True, repetition_penalty=p) for p in (1.0, 1.0, 1.02)]
    requests = requests_of(llm, [((n + 1,), own) for n, own in enumerate(params)])
    truth = plain_alone(llm, requests)
    trace = assert_exact(llm, truth, requests, [6])
    drafted, accepted = acceptance(trace)
    assert accepted > 0.85 * drafted and accepted > 0.6 * trace.num_tokens
    assert len(trace.steps) < 120 / 2
    starts = [next(o for o in trace.outputs if o.request.id == r.id) for r in requests]
    assert all(output.is_first for output in starts)


def test_rows_without_a_match_draft_nothing(models):
    """Their statistics say so, and the step is as long as a plain one."""
    llm = load(models["hybrid"], ngram)
    params = SamplingParams(max_tokens=8, logit_bias=dict.fromkeys(range(40), -50.0), ignore_eos=True)
    requests = requests_of(llm, [(tuple(range(10, 30)), params)])
    tokens = plain_alone(llm, requests)[requests[0].id].token_ids
    everything = [*range(10, 30), *tokens]
    assert len(set(pairwise(everything))) == len(everything) - 1, "this text has no pair twice"
    assert acceptance(drive(llm, with_depth(requests, [5]))) == (0, 0)


@pytest.mark.parametrize("verify", ["ratio", "block"])
def test_other_rules_do_not_depend_on_company(models, verify):
    llm = load(models["forgetful"], ngram)
    trace = drive_in_company(llm, max_tokens=30, temperature=0.2, verify=verify)
    assert acceptance(trace)[1] > 3


def test_indexes_go_with_their_rows(models):
    llm = load(models["hybrid"], ngram)
    requests = with_depth(mixed(llm, seed=2), [3])
    drive(llm, requests)
    proposer = llm.engine.proposer
    assert isinstance(proposer, NgramProposer) and len(proposer.indexes) <= llm.engine.state.slots.size
    proposer.propose(Plan((), 0))
    assert not proposer.indexes
