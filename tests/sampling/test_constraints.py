"""Constraints at every position by its own prefix, on a vocabulary small enough to write the rule down."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import toy_pair
from sampling_tables import entries_of, request, table_of
from toy_pair import PROMPT, ToyPair, p_value

from headlong.params import SamplingParams
from headlong.sampling.changes import adjust
from headlong.sampling.entries import Entry
from headlong.sampling.sampler import Sampler
from support.ruled import Rule, Ruled

VOCAB = 11


def neighbours(output: list[int]) -> set[int] | None:
    """Only the tokens next to the last one; everything after 7."""
    last = output[-1] if output else 0
    return None if last == 7 else {(last + step) % VOCAB for step in (-1, 1, 2)}


def constrained(number: int, params: SamplingParams, rule: Rule = neighbours):
    return replace(request(number, params), constraint=lambda: Ruled(rule, VOCAB))


GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=1.0)


def test_each_position_has_the_mask_of_its_own_prefix():
    """Rows of several depths, constrained and not; what an output before a preemption said counts too."""
    requests = [constrained(0, GREEDY), request(1, GREEDY), constrained(2, SAMPLED), constrained(3, GREEDY)]
    outputs = [[4], [5], [3, 7], []]
    table = table_of(requests, VOCAB, outputs)
    drafts = [[5, 7, 6], [1, 2, 3], [1, 0, 9], [8, 8, 8]]
    rows = [Entry(1, 9, 0, 4), Entry(2, 9, 0, 4), Entry(3, 9, 1, 2), Entry(4, 9, 0, 0)]
    logits = torch.randn(10, VOCAB, generator=torch.Generator().manual_seed(1))
    adjusted = adjust(logits, entries_of(table, rows, drafts), table)
    prefixes = [(0, 0), (0, 1), (0, 2), (0, 3), *[None] * 4, (2, 1), (2, 2)]
    for entry, prefix in enumerate(prefixes):
        allowed = None
        if prefix is not None:
            row, offset = prefix
            allowed = neighbours(outputs[row] + drafts[row][:offset])
        for token in range(VOCAB):
            kept = allowed is None or token in allowed
            assert adjusted[entry, token] == (logits[entry, token] if kept else -torch.inf)


def test_rows_without_a_constraint_keep_their_bits():
    table = table_of([request(0, GREEDY), constrained(1, GREEDY)], VOCAB)
    logits = torch.randn(2, VOCAB)
    alone = entries_of(table, [Entry(1, 9, 0)], None)
    mine = logits[:1]
    assert alone.allowed is None and adjust(mine, alone, table) is mine, "not even copied"
    together = adjust(logits, entries_of(table, [Entry(1, 9, 0), Entry(2, 9, 0)], None), table)
    assert torch.equal(together[0], logits[0]) and not torch.equal(together[1], logits[1])


def test_masks_are_asked_for_once():
    """`propose` for a `ratio` row and `probabilities` go over the same entries several times."""
    table = table_of([constrained(0, SamplingParams(temperature=1.0, verify="ratio"))], VOCAB)
    constraint, sampler = table.constraints[1], Sampler(table)
    assert isinstance(constraint, Ruled)
    entries = entries_of(table, [Entry(1, 9, 0, 3)], [[1, 2]])
    logits = torch.randn(3, VOCAB)
    sampler.propose(logits, entries)
    sampler.probabilities(logits, entries, [0, 1, 2])
    assert constraint.asked == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("temperature", [0.0, 1e-4, 1.0])
def test_the_constraint_wins_over_bans_and_biases(dtype, temperature):
    """Bans of all that is allowed leave it equally likely; a ban of a part is a ban."""
    own = {"temperature": temperature, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 1}
    all_banned = SamplingParams(**own, bad_token_ids=(10, 1, 2), logit_bias={5: 100.0})
    one_banned = SamplingParams(**own, bad_token_ids=(10,), logit_bias={1: -float("inf"), 5: 100.0})
    seen: dict[int, set[int]] = {1: set(), 2: set()}
    for position in range(40):
        table = table_of([constrained(0, all_banned), constrained(1, one_banned)], VOCAB)
        entries = entries_of(table, [Entry(1, position, 0), Entry(2, position, 0)], None)
        logits = 10 * torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(position)).to(dtype)
        for slot, token in enumerate(Sampler(table).choose(logits, entries).tolist(), 1):
            seen[slot].add(token)
    assert seen[2] == {2}
    assert seen[1] == ({10, 1, 2} if temperature == 1.0 else seen[1] & {10, 1, 2}) and seen[1]


def test_settling_and_leaving():
    table = table_of([constrained(0, GREEDY), request(1, GREEDY)], VOCAB)
    assert table.commit(1, (1, 2)) == ((1, 2), None) and table.commit(2, (5,)) == ((5,), None)
    table.constraints[1] = Ruled(neighbours, VOCAB, fails_at=3)
    assert table.commit(1, (1, 2)) == ((1, 2), None)
    assert table.commit(1, (3, 4, 5)) == ((3,), "out of steps")
    table.clear(1)
    assert not table.constraints and table.commit(1, (9,)) == ((9,), None)


def odd_even(output: list[int]) -> set[int] | None:
    """Of four tokens: the same parity as the last one never twice in a row; all after a 3."""
    if output and output[-1] == 3:
        return None
    return {0, 2} if output and output[-1] % 2 else {1, 3, 2}


class RuledPair(ToyPair):
    """The toy model under a rule: its law is the target's, what is not allowed left out at each token."""

    def law(self, length: int, temperature: float = 1.0) -> np.ndarray:
        law = []
        for sequence in itertools.product(range(self.vocab), repeat=length):
            history, chance = list(PROMPT), 1.0
            for token in sequence:
                logits = self.look_up(self.target, [history])[0] / temperature
                allowed = odd_even(history[len(PROMPT) :])
                if allowed is not None:
                    logits[[t for t in range(self.vocab) if t not in allowed]] = -torch.inf
                chance *= float(torch.softmax(logits, 0)[token])
                history.append(token)
            law.append(chance)
        return np.array(law)

    def step(self, sampler, requests, histories, who, depth, rule) -> list[int]:
        who = list(who)
        before = {i: len(histories[i]) for i in who}
        accepted = super().step(sampler, requests, histories, who, depth, rule)
        for i in who:
            sampler.table.commit(i + 1, tuple(histories[i][before[i] :]))
        return accepted


@pytest.mark.parametrize(("verify", "depth"), [("coupled", 0), ("coupled", 3), ("ratio", 3), ("block", 3)])
def test_every_rule_gives_the_constrained_law(monkeypatch, verify, depth):
    plain = toy_pair.request
    monkeypatch.setattr(
        toy_pair, "request", lambda *a, **k: replace(plain(*a, **k), constraint=lambda: Ruled(odd_even, 4))
    )
    pair = RuledPair(vocab=4, distance=1.5, seed=2)
    counts, _ = pair.generate(SamplingParams(temperature=1.0, verify=verify), depth, length=3, rows=1500)
    law = pair.law(3)
    assert counts[law == 0].sum() == 0 and (law == 0).sum() > 20
    assert p_value(counts, law) > 1e-3
