"""How a step begins and ends on the device, by the kernels and by their reference, against the same in Python."""

import pytest
import torch

from headlong.engine.step.layout import EvenLayout
from headlong.ops.step import reference
from headlong.ops.triton_step import ENDED, NUM_TIMESTAMPS, START_ON_DEVICE

pytest.importorskip("triton")
from headlong.ops.step import triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS, PAGES, PAGE_SIZE = 6, 300, 16


@pytest.fixture(params=[reference, triton], ids=["reference", "triton"])
def ops(request):
    return request.param.OPS


def here(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("num_drafts", [0, 1, 4])
def test_rows_begin_where_the_host_says_or_where_the_device_left_them(ops, num_drafts):
    layout = EvenLayout(3, num_drafts, DEVICE)
    resume_S2 = here([[9, 9]] * 3 + [[70, 2], [ENDED, 1], [9, 9], [9, 9]])
    pages_SP = torch.arange((SLOTS + 1) * PAGES, dtype=torch.int32, device=DEVICE).view(-1, PAGES)
    rows_R4 = here([[2, 40, 1, 0], [3, START_ON_DEVICE, 0, 0], [4, START_ON_DEVICE, 0, 0]])
    times = torch.zeros(NUM_TIMESTAMPS, dtype=torch.long, device=DEVICE)
    slots_R, pages_RP = ops.begin(
        rows_R4, resume_S2, pages_SP, layout.table_PR6, layout.position_X, 290, num_drafts, times
    )
    slots, starts, replays = [2, 3, 0], [40, 70, 0], [1, 2, 0]
    assert slots_R.tolist() == slots
    assert torch.equal(pages_RP, pages_SP[slots, :290])
    target, *ahead = layout.passes()
    each = 1 + num_drafts
    expected = [
        [slot, start, each, num_drafts, replay, number * each]
        for number, (slot, start, replay) in enumerate(zip(slots, starts, replays, strict=True))
    ]
    assert target.table_R6.tolist() == expected
    assert target.row_N.tolist() == [n for n in range(3) for _ in range(each)]
    assert target.position_N.tolist() == [start + j for start in starts for j in range(each)]
    assert len(ahead) == max(num_drafts - 1, 0)
    for further, part in enumerate(ahead):
        assert part.table_R6.tolist() == [
            [0, start + further, 1, 0, 0, number] for number, start in enumerate(starts)
        ]
        assert part.position_N.tolist() == [start + further for start in starts]
        assert part.row_N.tolist() == [0, 1, 2]


def test_positions_are_looked_up(ops):
    cos, sin = (torch.randn(50, 1, 24, device=DEVICE) for _ in range(2))
    position_X = here([0, 49, 7, 7, 13])
    found = ops.look_up(position_X, cos, sin)
    assert torch.equal(found[0], cos[position_X.long()]) and torch.equal(found[1], sin[position_X.long()])


def test_rows_are_fed_their_last_tokens_and_drafts(ops):
    last_token_S = here([0, 11, 22, 33, 44, 55, 66], torch.long)
    times = torch.zeros(NUM_TIMESTAMPS, dtype=torch.long, device=DEVICE)
    drafts_RK = here([[1, 2], [3, 4]], torch.long)
    tokens_N = ops.feed(here([5, 1], torch.long), last_token_S, drafts_RK, times)
    assert tokens_N.tolist() == [55, 1, 2, 11, 3, 4]
    assert ops.feed(here([5, 1], torch.long), last_token_S, drafts_RK[:, :0], times).tolist() == [55, 11]


CASES = {
    "all stand": ([5, 6, 7], [5, 6], 2, {}, 2, False),
    "the second falls": ([5, 6, 7], [5, 9], 2, {}, 1, False),
    "the first falls, the second would stand": ([5, 6, 7], [9, 6], 2, {}, 0, False),
    "padding is never accepted": ([5, 6, 7], [5, 6], 1, {}, 1, False),
    "an accepted draft ends it": ([8, 6, 7], [8, 6], 2, {}, 2, True),
    "the last token ends it": ([5, 8, 7], [5, 9], 2, {}, 1, True),
    "what would end it does not stand": ([5, 6, 8], [5, 9], 2, {}, 1, False),
    "no number": ([5, 6, 7], [5, 6], 2, {1: torch.nan}, 2, True),
    "infinite": ([5, 6, 7], [5, 9], 2, {1: torch.inf}, 1, True),
    "no number where nothing stands": ([5, 6, 7], [9, 6], 2, {2: torch.nan}, 0, False),
}
"""The target's tokens, drafts, depth, logits that are no numbers; how many stand, and whether the row ends."""


def test_drafts_are_accepted(ops):
    """All cases are rows of one step."""
    num_rows, each, vocab, stride = len(CASES), 3, 10, 16
    logits_NV = torch.randn(num_rows * each, stride, device=DEVICE)[:, :vocab]
    for number, (tokens, _, _, odd, _, _) in enumerate(CASES.values()):
        for place, value in odd.items():
            logits_NV[number * each + place, tokens[place]] = value
    chosen_N = here([t for case in CASES.values() for t in case[0]], torch.long)
    drafts_RK = here([case[1] for case in CASES.values()], torch.long)
    rows_R4 = here([[1 + n, 0, 0, case[2]] for n, case in enumerate(CASES.values())])
    starts = [10 * n for n in range(num_rows)]
    position_X = here([start + j for start in starts for j in range(each)])
    slots_R = here(list(range(1, num_rows + 1)), torch.long)
    stops_SM = here([[-1, -1, 8, -1]] * (num_rows + 1))
    last_token_S = torch.zeros(num_rows + 1, dtype=torch.long, device=DEVICE)
    resume_S2 = torch.zeros(num_rows + 1, 2, dtype=torch.int32, device=DEVICE)
    readback_X = torch.zeros(
        num_rows * each * 2 + num_rows * each + NUM_TIMESTAMPS, dtype=torch.long, device=DEVICE
    )
    last_R = ops.accept(
        rows_R4, position_X, slots_R, chosen_N, drafts_RK, logits_NV, stops_SM, last_token_S, resume_S2,
        readback_X, readback_X[-NUM_TIMESTAMPS :],
    )  # fmt: skip
    size = num_rows * each
    found = readback_X.tolist()
    assert found[:size] == chosen_N.tolist()
    assert found[2 * size + num_rows : 3 * size] == drafts_RK.flatten().tolist()
    for number, (name, case) in enumerate(CASES.items()):
        tokens, _, _, odd, accepted, ends = case
        assert found[2 * size + number] == accepted, name
        numbers = found[size + number * each : size + (number + 1) * each]
        assert numbers == [0 if place in odd else 1 for place in range(each)], name
        assert last_token_S[1 + number] == tokens[accepted], name
        after = ENDED if ends else starts[number] + 1 + accepted
        assert resume_S2[1 + number].tolist() == [after, accepted], name
        assert last_R[number] == number * each + accepted, name


def test_what_the_head_said_of_the_last_token_is_carried(ops):
    out_ND, carry_SD = torch.randn(6, 1500, device=DEVICE), torch.zeros(7, 1500, device=DEVICE)
    times = torch.zeros(NUM_TIMESTAMPS, dtype=torch.long, device=DEVICE)
    ops.carry(out_ND, here([4, 1], torch.long), here([2, 5], torch.long), carry_SD, times)
    assert torch.equal(carry_SD[2], out_ND[4]) and torch.equal(carry_SD[5], out_ND[1])
    assert not carry_SD[[0, 1, 3, 4, 6]].any()
