"""How a step that is one launch begins and ends on the device: where its rows are, what they are fed, what stands.

A row's place (where its next token goes, and how many drafts are to be replayed) is told by the host, or, for a step
that was launched before the one before it was read, found where that one left it. A row that has ended by then is
computed at place 0, where nobody looks: what it left behind stays as it is. Four moments are written down: the step's
begin, when drafts were made, when the verdict stood, and the end.

R rows of K drafts, J = K + 1 tokens each, N in all; S slots.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from headlong.ops.penalise.triton import count
from headlong.ops.step.ops import StepOps
from headlong.ops.triton_launch import LAUNCH_OPTIONS, launch_dependents_and_wait

PAGES_AT_ONCE, CARRIED_AT_ONCE = 256, 1024
INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def mark(times, place: tl.constexpr):
    """Writes down what the device's clock says, in nanoseconds; the interpreter has none."""
    if INTERPRETED:
        tl.store(times + place, 0)
    else:
        tl.store(times + place, tl.extra.cuda.globaltimer())


@triton.jit
def _begin(
    given_R4, place_S2, pages_SP, table_PR6, position_X, pages_RP, slots_R, times,
    num_pages, most_pages, padded_rows, first_ahead,
    K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    launch_dependents_and_wait()
    row = tl.program_id(0)
    if row == 0:
        mark(times, 0)
    slot = tl.load(given_R4 + 4 * row)
    start = tl.load(given_R4 + 4 * row + 1)
    replay = tl.load(given_R4 + 4 * row + 2)
    if start < 0:
        start = tl.load(place_S2 + 2 * slot)
        replay = tl.load(place_S2 + 2 * slot + 1)
    ended = start < 0
    slot, start, replay = tl.where(ended, 0, slot), tl.where(ended, 0, start), tl.where(ended, 0, replay)
    tl.store(slots_R + row, slot.to(tl.int64))
    tl.store(table_PR6 + 6 * row, slot)
    tl.store(table_PR6 + 6 * row + 1, start)
    tl.store(table_PR6 + 6 * row + 4, replay)
    place = tl.arange(0, WIDTH)
    tl.store(position_X + row * (K + 1) + place, start + place, mask=place <= K)
    ahead = place < K - 1  # the head's passes, a token a row and a position further each time
    tl.store(table_PR6 + 6 * ((place + 1) * padded_rows + row) + 1, start + place, mask=ahead)
    tl.store(position_X + first_ahead + place * padded_rows + row, start + place, mask=ahead)
    for first in range(0, num_pages, BLOCK):
        page = first + tl.arange(0, BLOCK)
        inside = page < num_pages
        pages = tl.load(pages_SP + slot.to(tl.int64) * most_pages + page, mask=inside, other=0)
        tl.store(pages_RP + row.to(tl.int64) * num_pages + page, pages, mask=inside)


def begin(
    given_R4: Tensor, place_S2: Tensor, pages_SP: Tensor, table_PR6: Tensor, position_X: Tensor,
    num_pages: int, num_drafts: int, times: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Fills in where every row is, in each pass's table and positions; gives slots and the first pages of each."""
    num_rows, padded = len(given_R4), table_PR6.shape[1]
    pages_RP = pages_SP.new_empty(num_rows, num_pages)
    slots_R = torch.empty(num_rows, dtype=torch.long, device=given_R4.device)
    first_ahead = len(position_X) - padded * max(num_drafts - 1, 0)
    _begin[(num_rows,)](
        given_R4, place_S2, pages_SP, table_PR6, position_X, pages_RP, slots_R, times,
        num_pages, pages_SP.shape[1], padded, first_ahead,
        K=num_drafts, WIDTH=triton.next_power_of_2(num_drafts + 1), BLOCK=PAGES_AT_ONCE, **LAUNCH_OPTIONS,
    )  # fmt: skip
    return slots_R, pages_RP


@triton.jit
def _look_up(position_X, cos_table, sin_table, cos, sin, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    launch_dependents_and_wait()
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < SIZE
    at = tl.load(position_X + token).to(tl.int64) * SIZE + place
    tl.store(cos + token * SIZE + place, tl.load(cos_table + at, mask=inside), mask=inside)
    tl.store(sin + token * SIZE + place, tl.load(sin_table + at, mask=inside), mask=inside)


def look_up(position_X: Tensor, cos_table: Tensor, sin_table: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of two tables [positions, 1, D]."""
    size = cos_table.shape[-1]
    cos, sin = (table.new_empty(len(position_X), 1, size) for table in (cos_table, sin_table))
    _look_up[(len(position_X),)](
        position_X,
        cos_table,
        sin_table,
        cos,
        sin,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        **LAUNCH_OPTIONS,
    )
    return cos, sin


@triton.jit
def _feed(slots_R, last_token_S, drafts_RK, tokens_N, times, K: tl.constexpr, WIDTH: tl.constexpr):
    launch_dependents_and_wait()
    row = tl.program_id(0)
    if row == 0:
        mark(times, 1)
    place = tl.arange(0, WIDTH)
    last = tl.load(last_token_S + tl.load(slots_R + row))
    drafts = tl.load(drafts_RK + row * K + place - 1, mask=(place > 0) & (place <= K), other=0)
    tl.store(tokens_N + row * (K + 1) + place, tl.where(place == 0, last, drafts), mask=place <= K)


def feed(slots_R: Tensor, last_token_S: Tensor, drafts_RK: Tensor, times: Tensor) -> Tensor:
    """The tokens of all rows: each one's last and its drafts."""
    num_rows, drafts = drafts_RK.shape
    tokens_N = last_token_S.new_empty(num_rows * (drafts + 1))
    _feed[(num_rows,)](
        slots_R, last_token_S, drafts_RK, tokens_N, times,
        K=drafts, WIDTH=triton.next_power_of_2(drafts + 1), **LAUNCH_OPTIONS,
    )  # fmt: skip
    return tokens_N


@triton.jit
def _accept(
    given_R4, position_X, slots_R, chosen_N, drafts_RK, logits_NV, vocab, stops_SM,
    last_token_S, place_S2, last_R, found, num_rows, times,
    K: tl.constexpr, WIDTH: tl.constexpr, STOPS: tl.constexpr,
):  # fmt: skip
    launch_dependents_and_wait()
    row = tl.program_id(0)
    if row == 0:
        mark(times, 2)
    slot, depth = tl.load(slots_R + row), tl.load(given_R4 + 4 * row + 3)
    place, first, total = tl.arange(0, WIDTH), row * (K + 1), num_rows * (K + 1)
    here = place <= K
    chosen = tl.load(chosen_N + first + place, mask=here, other=-1)
    drafts = tl.load(drafts_RK + row * K + place, mask=place < K, other=-2)
    falls = (chosen != drafts) | (place >= depth)
    accepted = tl.min(tl.where(falls, place, WIDTH), 0)
    # NaN and +inf win every argmax: the token that was chosen tells of its whole row of logits.
    logit = tl.load(logits_NV + (first + place).to(tl.int64) * vocab + chosen, mask=here, other=0.0)
    is_number = tl.abs(logit.to(tl.float32)) < float("inf")
    emitted = place <= accepted
    stops = tl.load(stops_SM + slot * STOPS + tl.arange(0, STOPS)).to(tl.int64)
    is_stop = tl.max((chosen[:, None] == stops[None, :]).to(tl.int32), 1) > 0
    ends = tl.max((emitted & (is_stop | (is_number == 0))).to(tl.int32), 0) > 0
    tl.store(last_token_S + slot, tl.sum(tl.where(place == accepted, chosen, 0), 0))
    start = tl.load(position_X + first)
    tl.store(place_S2 + 2 * slot, tl.where(ends, -1, start + 1 + accepted))
    tl.store(place_S2 + 2 * slot + 1, accepted)
    tl.store(last_R + row, (first + accepted).to(tl.int64))
    tl.store(found + first + place, chosen, mask=here)
    tl.store(found + total + first + place, is_number.to(tl.int64), mask=here)
    tl.store(found + 2 * total + row, accepted.to(tl.int64))
    tl.store(found + 2 * total + num_rows + row * K + place, drafts, mask=place < K)


def accept(
    given_R4: Tensor, position_X: Tensor, slots_R: Tensor, chosen_N: Tensor, drafts_RK: Tensor, logits_NV: Tensor,
    stops_SM: Tensor, last_token_S: Tensor, place_S2: Tensor, found_X: Tensor, times: Tensor,
) -> Tensor:  # fmt: skip
    """Leaves each row's last token and place where the next step finds them, and in `found_X` what the host reads: the
    target's tokens, whether their logits are numbers, how many drafts stand, drafts. Gives the last token that stands
    of each row, among all."""
    num_rows, drafts = drafts_RK.shape
    last_R = torch.empty_like(slots_R)
    _accept[(num_rows,)](
        given_R4, position_X, slots_R, chosen_N, drafts_RK, logits_NV, logits_NV.stride(0), stops_SM,
        last_token_S, place_S2, last_R, found_X, num_rows, times,
        K=drafts, WIDTH=triton.next_power_of_2(drafts + 1), STOPS=stops_SM.shape[1], **LAUNCH_OPTIONS,
    )  # fmt: skip
    return last_R


@triton.jit
def _carry(out_ND, last_R, slots_R, carry_SD, times, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    launch_dependents_and_wait()
    row, place = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if (row == 0) & (tl.program_id(1) == 0):
        mark(times, 3)
    inside = place < SIZE
    out = tl.load(out_ND + tl.load(last_R + row) * SIZE + place, mask=inside)
    tl.store(carry_SD + tl.load(slots_R + row) * SIZE + place, out, mask=inside)


def carry(out_ND: Tensor, last_R: Tensor, slots_R: Tensor, carry_SD: Tensor, times: Tensor) -> None:
    """What the head said of each row's last token is where its next draft starts."""
    size = out_ND.shape[1]
    _carry[(len(slots_R), triton.cdiv(size, CARRIED_AT_ONCE))](
        out_ND, last_R, slots_R, carry_SD, times, SIZE=size, BLOCK=CARRIED_AT_ONCE, **LAUNCH_OPTIONS
    )


OPS = StepOps(begin, look_up, feed, accept, carry, count)
