"""Penalties and biases of whole rows of logits, bit by bit those of steps by parts; and the counts behind them."""

import pytest
import torch

from headlong.ops.penalise import reference
from headlong.ops.triton_step import SEEN_IN_PROMPT
from headlong.params import SamplingParams
from headlong.sampling import trials
from headlong.sampling.changes import adjust
from headlong.sampling.entries import Entries, Entry
from headlong.sampling.table import SamplingTable
from headlong.types import Request

pytest.importorskip("triton")
from headlong.ops.penalise import triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 1500
KINDS = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "repetition": {"repetition_penalty": 1.3},
    "all": {"repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 0.31},
    "bias": {"logit_bias": {1: 3.7, 8: -0.3, 1499: -torch.inf}, "bad_token_ids": (2, 1024)},
    "all and a bias": {
        "repetition_penalty": 1.1, "presence_penalty": 1.5, "frequency_penalty": 0.2,
        "logit_bias": {1: 3.7}, "bad_token_ids": (17,),
    },
    "nothing": {},
}  # fmt: skip
PROMPT, OUTPUT = (0, 1, 1, 1499), [1, 5, 5, 1024, 5, 1300]
DRAFTS = [17, 5, 17, 0, 800, 17]
"""That repeat each other, the output and the prompt."""


@pytest.fixture(params=[reference, triton], ids=["reference", "triton"])
def ops(request):
    return request.param


def table_of(kinds) -> SamplingTable:
    """In slots from 1 on. Somebody else was in each of them before."""
    table = SamplingTable(len(kinds), VOCAB, DEVICE)
    slots = range(1, len(kinds) + 1)
    for slot in slots:
        former = SamplingParams(presence_penalty=9.0, logit_bias={7: 9.0})
        table.set(slot, Request("former", (3,), former, seed=0), [7, 8, 9])
    table.tally.update(slots)
    for slot, kind in zip(slots, kinds, strict=True):
        table.clear(slot)
        table.set(slot, Request(kind, PROMPT, SamplingParams(**KINDS[kind]), seed=0), OUTPUT)
    table.tally.update(slots)
    return table


def logits_of(lines: int) -> torch.Tensor:
    """Not side by side in memory; some are odd."""
    wide_NV = 3 * torch.randn(lines, VOCAB + 20, generator=torch.Generator().manual_seed(1))
    wide_NV[:, 0:40:7] = -0.0
    wide_NV[0, 5], wide_NV[0, 6], wide_NV[0, 17] = torch.nan, torch.inf, -torch.inf
    return wide_NV.to(DEVICE)[:, :VOCAB]


def same_bits(found_NV: torch.Tensor, wanted_NV: torch.Tensor) -> bool:
    odd_NV = wanted_NV.isnan()
    same_NV = found_NV.contiguous().view(torch.int32) == wanted_NV.contiguous().view(torch.int32)
    return bool((same_NV | (odd_NV & found_NV.isnan())).all())


def penalised(ops, table: SamplingTable, logits_NV, slots, drafts_RK) -> torch.Tensor:
    slots_R = torch.tensor(slots, device=DEVICE)
    return ops.penalise(logits_NV, slots_R, table.changes_S5, table.tally.counts_SV, table.bias, drafts_RK)


@pytest.mark.parametrize("num_drafts", [0, 1, 6])
def test_the_targets_logits(ops, num_drafts):
    """Rows of all kinds in one step, each at all its places."""
    kinds, each = list(KINDS), num_drafts + 1
    table, slots = table_of(kinds), list(range(len(kinds), 0, -1))
    drafts_RK = torch.tensor([DRAFTS[:num_drafts]] * len(kinds), dtype=torch.long, device=DEVICE)
    entries = Entries([Entry(slot, 10, 0, each) for slot in slots], table, drafts_RK)
    logits_NV = logits_of(len(kinds) * each)
    before_NV = logits_NV.clone()
    assert same_bits(penalised(ops, table, logits_NV, slots, drafts_RK), adjust(logits_NV, entries, table))
    assert same_bits(logits_NV, before_NV), "they are asked for afterwards"


@pytest.mark.parametrize("place", [0, 1, 4])
def test_the_heads_logits(ops, place):
    """One line a row, after the drafts that were made so far."""
    kinds = list(KINDS)
    table, slots = table_of(kinds), list(range(1, len(kinds) + 1))
    drafts_RK = torch.tensor([DRAFTS[:place]] * len(kinds), dtype=torch.long, device=DEVICE)
    entries = Entries([Entry(slot, 10, place) for slot in slots], table, drafts_RK)
    logits_NV = logits_of(len(kinds))
    assert same_bits(penalised(ops, table, logits_NV, slots, drafts_RK), adjust(logits_NV, entries, table))


def test_rows_without_anything_keep_their_bits(ops):
    """Whatever was counted in their slots."""
    table, logits_NV = table_of(["nothing", "nothing"]), logits_of(4)
    drafts_RK = torch.tensor([[5], [7]], device=DEVICE)
    assert table.tally.counts_SV[1, 7], "of somebody else"
    assert same_bits(penalised(ops, table, logits_NV, [2, 1], drafts_RK), logits_NV)


def test_counts_or_biases_alone(ops):
    table, logits_NV, slots_R = (
        table_of(["presence", "bias"]),
        logits_of(2),
        torch.tensor([1, 2], device=DEVICE),
    )
    none_RK = slots_R.new_empty(2, 0)
    both = penalised(ops, table, logits_NV, [1, 2], none_RK)
    counted = ops.penalise(logits_NV, slots_R, table.changes_S5, table.tally.counts_SV, None, none_RK)
    biased = ops.penalise(logits_NV, slots_R, table.changes_S5, None, table.bias, none_RK)
    assert same_bits(torch.stack((counted[0], biased[1])), both)
    assert same_bits(torch.stack((biased[0], counted[1])), logits_NV)


def test_it_passes_its_trial(ops):
    assert trials.penalises_alike(ops.penalise, DEVICE)
    wrong = lambda *given: ops.penalise(*given) + 1e-6  # noqa: E731
    assert not trials.penalises_alike(wrong, DEVICE)


def test_what_stands_is_counted(ops):
    counts_SV = torch.zeros(4, 10, dtype=torch.int32, device=DEVICE)
    counts_SV[3, 9] = SEEN_IN_PROMPT
    last_R = torch.tensor([2, 3, 7], device=DEVICE)  # all three, one, two of three tokens
    chosen_N = torch.tensor([9, 4, 9, 5, 6, 7, 1, 1, 1], device=DEVICE)
    ops.count(last_R, torch.tensor([3, 0, 1], device=DEVICE), chosen_N, counts_SV)
    wanted_SV = torch.zeros(4, 10, dtype=torch.int32, device=DEVICE)
    wanted_SV[3, 9], wanted_SV[3, 4], wanted_SV[1, 1] = SEEN_IN_PROMPT + 2, 1, 2
    assert torch.equal(counts_SV, wanted_SV), "slot 0 is nobody's"


def test_a_device_and_the_host_count_the_same(ops):
    """Steps that count by themselves and others by turns; then somebody else comes."""
    table = table_of(["all"])
    for turn in range(6):
        tokens = [(turn * 7 + n) % 11 for n in range(3)]
        if turn % 3:  # the device has counted, and the host hears of it
            chosen_N = torch.tensor(tokens, device=DEVICE)
            last_R, slots_R = torch.tensor([2], device=DEVICE), torch.tensor([1], device=DEVICE)
            ops.count(last_R, slots_R, chosen_N, table.tally.counts_SV)
            table.tally.advance(1, 3)
        table.count(1, tokens)
        before_SV = table.tally.counts_SV.clone()
        table.tally.update([1])
        assert torch.equal(before_SV, table.tally.counts_SV) == (turn % 3 > 0), "brought only where it lacks"
        produced_V = table.tally.counts_SV[1] & (SEEN_IN_PROMPT - 1)
        seen = table.seen[1]
        assert {token: int(produced_V[token]) for token in seen.ids} == dict(
            zip(seen.ids, seen.counts, strict=True)
        )
        assert set(table.tally.counts_SV[1].nonzero()[:, 0].tolist()) == set(seen.ids)
    where = table.tally.counts_SV.data_ptr()
    table.clear(1)
    table.set(1, Request("next", (8,), SamplingParams(frequency_penalty=1.0), seed=0), [])
    table.tally.update([1])
    assert not table.tally.counts_SV.any(), "of a prompt it does not ask"
    assert table.tally.counts_SV.data_ptr() == where
