"""How a step that is one CUDA graph begins and ends on the device: row positions, tokens, acceptance, and the carry.

A row's start position and the number of drafts to replay come from the host. For a step that was launched before the
one before it was read back they come from `resume`, where that step left them. A row that has ended by then is computed
at position 0 of slot 0, which belongs to nobody, so that its own state stays as it is. Four timestamps are recorded: at
the step's begin, when drafts were made, when the verdict stood, and at the end.

Legend. R rows of K drafts, K + 1 tokens each, N tokens in all; S slots; V logits of a token; D hidden size.
  rows_ptr [R, 4]: slot, start, drafts to replay, drafts of each row, from the host; resume_ptr [S, 2]: the start of
  each slot's next step (ENDED for a row that has ended) and its drafts to replay; slots_ptr [R].
  tables_ptr [passes, padded_rows, 6]: a table of rows (triton_step.py) for the target's pass, then for each of the
  head's; positions_ptr: positions of the target's tokens, then, from `first_ahead` on, of the head's passes.
  slot_pages_ptr [S, stride_slot_pages]: page numbers; pages_ptr [R, num_pages]: those of the step's rows.
  last_tokens_ptr [S]: the last token of each slot; drafts_ptr [R, K]; tokens_ptr [N]: what the target is fed.
  chosen_ptr [N]: the target's own tokens; logits_ptr [N, V], stride_logits from one token to the next.
  stops_ptr [S, NUM_STOPS]: tokens that end a row; last_ptr [R]: the index, among N, of each row's last valid token.
  readback_ptr: what the host reads, namely chosen [N], whether logits are finite [N], accepted [R], drafts [R, K].
  carry_ptr [S, D]: the hidden state that a slot's next draft starts from; hidden_ptr [N, D]; times_ptr [4].
BLOCK_J is the power of two that holds K + 1.
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
from headlong.ops.triton_step import ENDED

PAGES_BLOCK, CARRY_BLOCK = 256, 1024
INTERPRETED, _ENDED = tl.constexpr(knobs.runtime.interpret), tl.constexpr(ENDED)


@triton.jit
def _record_time(times_ptr, index: tl.constexpr):
    """Stores the device's clock in nanoseconds. The interpreter has none and stores 0."""
    if INTERPRETED:
        tl.store(times_ptr + index, 0)
    else:
        tl.store(times_ptr + index, tl.extra.cuda.globaltimer())


@triton.jit
def _begin_kernel(
    rows_ptr, resume_ptr, slot_pages_ptr, tables_ptr, positions_ptr, pages_ptr, slots_ptr, times_ptr,
    num_pages, stride_slot_pages, padded_rows, first_ahead,
    K: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fills in one row of every pass's table, positions and pages."""
    launch_dependents_and_wait()
    row = tl.program_id(0)
    if row == 0:
        _record_time(times_ptr, 0)
    slot = tl.load(rows_ptr + 4 * row)
    start = tl.load(rows_ptr + 4 * row + 1)
    replay = tl.load(rows_ptr + 4 * row + 2)
    if start < 0:
        start = tl.load(resume_ptr + 2 * slot)
        replay = tl.load(resume_ptr + 2 * slot + 1)
    ended = start < 0
    slot, start, replay = tl.where(ended, 0, slot), tl.where(ended, 0, start), tl.where(ended, 0, replay)
    tl.store(slots_ptr + row, slot.to(tl.int64))
    tl.store(tables_ptr + 6 * row, slot)
    tl.store(tables_ptr + 6 * row + 1, start)
    tl.store(tables_ptr + 6 * row + 4, replay)
    offset = tl.arange(0, BLOCK_J)
    tl.store(positions_ptr + row * (K + 1) + offset, start + offset, mask=offset <= K)
    is_ahead = offset < K - 1  # one pass of the head each, which feeds one token a row at the next position
    tl.store(tables_ptr + 6 * ((offset + 1) * padded_rows + row) + 1, start + offset, mask=is_ahead)
    tl.store(positions_ptr + first_ahead + offset * padded_rows + row, start + offset, mask=is_ahead)
    for first in range(0, num_pages, BLOCK):
        page = first + tl.arange(0, BLOCK)
        mask = page < num_pages
        pages = tl.load(slot_pages_ptr + slot.to(tl.int64) * stride_slot_pages + page, mask=mask, other=0)
        tl.store(pages_ptr + row.to(tl.int64) * num_pages + page, pages, mask=mask)


def begin(
    rows_R4: Tensor, resume_S2: Tensor, pages_SP: Tensor, tables_PR6: Tensor, position_X: Tensor,
    num_pages: int, num_drafts: int, times: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Fills in where every row is, in each pass's table and positions; returns slots and the first pages of each."""
    num_rows, padded = len(rows_R4), tables_PR6.shape[1]
    pages_RP = pages_SP.new_empty(num_rows, num_pages)
    slots_R = torch.empty(num_rows, dtype=torch.long, device=rows_R4.device)
    first_ahead = len(position_X) - padded * max(num_drafts - 1, 0)
    _begin_kernel[(num_rows,)](
        rows_R4, resume_S2, pages_SP, tables_PR6, position_X, pages_RP, slots_R, times,
        num_pages, pages_SP.shape[1], padded, first_ahead,
        K=num_drafts, BLOCK_J=triton.next_power_of_2(num_drafts + 1), BLOCK=PAGES_BLOCK, **LAUNCH_OPTIONS,
    )  # fmt: skip
    return slots_R, pages_RP


@triton.jit
def _look_up_kernel(
    positions_ptr, cos_table_ptr, sin_table_ptr, cos_ptr, sin_ptr, D: tl.constexpr, BLOCK: tl.constexpr
):
    """The cosines and sines [D] of one token's position."""
    launch_dependents_and_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < D
    offsets = tl.load(positions_ptr + token).to(tl.int64) * D + column
    tl.store(cos_ptr + token * D + column, tl.load(cos_table_ptr + offsets, mask=mask), mask=mask)
    tl.store(sin_ptr + token * D + column, tl.load(sin_table_ptr + offsets, mask=mask), mask=mask)


def look_up(position_X: Tensor, cos_table: Tensor, sin_table: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rows of two tables [positions, 1, D] for these positions."""
    size = cos_table.shape[-1]
    cos, sin = (table.new_empty(len(position_X), 1, size) for table in (cos_table, sin_table))
    _look_up_kernel[(len(position_X),)](
        position_X, cos_table, sin_table, cos, sin, D=size, BLOCK=triton.next_power_of_2(size), **LAUNCH_OPTIONS,
    )  # fmt: skip
    return cos, sin


@triton.jit
def _feed_kernel(
    slots_ptr, last_tokens_ptr, drafts_ptr, tokens_ptr, times_ptr, K: tl.constexpr, BLOCK_J: tl.constexpr
):
    """The tokens of one row: its last one, then its drafts."""
    launch_dependents_and_wait()
    row = tl.program_id(0)
    if row == 0:
        _record_time(times_ptr, 1)
    offset = tl.arange(0, BLOCK_J)
    last = tl.load(last_tokens_ptr + tl.load(slots_ptr + row))
    drafts = tl.load(drafts_ptr + row * K + offset - 1, mask=(offset > 0) & (offset <= K), other=0)
    tl.store(tokens_ptr + row * (K + 1) + offset, tl.where(offset == 0, last, drafts), mask=offset <= K)


def feed(slots_R: Tensor, last_token_S: Tensor, drafts_RK: Tensor, times: Tensor) -> Tensor:
    """Returns the tokens of all rows [N]: each row's last token and its drafts."""
    num_rows, drafts = drafts_RK.shape
    tokens_N = last_token_S.new_empty(num_rows * (drafts + 1))
    _feed_kernel[(num_rows,)](
        slots_R, last_token_S, drafts_RK, tokens_N, times,
        K=drafts, BLOCK_J=triton.next_power_of_2(drafts + 1), **LAUNCH_OPTIONS,
    )  # fmt: skip
    return tokens_N


@triton.jit
def _accept_kernel(
    rows_ptr, positions_ptr, slots_ptr, chosen_ptr, drafts_ptr, logits_ptr, stride_logits, stops_ptr,
    last_tokens_ptr, resume_ptr, last_ptr, readback_ptr, num_rows, times_ptr,
    K: tl.constexpr, BLOCK_J: tl.constexpr, NUM_STOPS: tl.constexpr,
):  # fmt: skip
    """Accepts one row's drafts up to the first that is not the target's own token."""
    launch_dependents_and_wait()
    row = tl.program_id(0)
    if row == 0:
        _record_time(times_ptr, 2)
    slot, depth = tl.load(slots_ptr + row), tl.load(rows_ptr + 4 * row + 3)
    offset, first, num_tokens = tl.arange(0, BLOCK_J), row * (K + 1), num_rows * (K + 1)
    mask = offset <= K
    chosen = tl.load(chosen_ptr + first + offset, mask=mask, other=-1)
    drafts = tl.load(drafts_ptr + row * K + offset, mask=offset < K, other=-2)
    is_rejected = (chosen != drafts) | (offset >= depth)
    accepted = tl.min(tl.where(is_rejected, offset, BLOCK_J), 0)
    # NaN and +inf win every argmax, so the logit of the chosen token tells whether the row of logits is finite.
    logit = tl.load(logits_ptr + (first + offset).to(tl.int64) * stride_logits + chosen, mask=mask, other=0.0)
    is_finite = tl.abs(logit.to(tl.float32)) < float("inf")
    is_emitted = offset <= accepted
    stops = tl.load(stops_ptr + slot * NUM_STOPS + tl.arange(0, NUM_STOPS)).to(tl.int64)
    is_stop = tl.max((chosen[:, None] == stops[None, :]).to(tl.int32), 1) > 0
    ends = tl.max((is_emitted & (is_stop | (is_finite == 0))).to(tl.int32), 0) > 0
    tl.store(last_tokens_ptr + slot, tl.sum(tl.where(offset == accepted, chosen, 0), 0))
    start = tl.load(positions_ptr + first)
    tl.store(resume_ptr + 2 * slot, tl.where(ends, _ENDED, start + 1 + accepted))
    tl.store(resume_ptr + 2 * slot + 1, accepted)
    tl.store(last_ptr + row, (first + accepted).to(tl.int64))
    tl.store(readback_ptr + first + offset, chosen, mask=mask)
    tl.store(readback_ptr + num_tokens + first + offset, is_finite.to(tl.int64), mask=mask)
    tl.store(readback_ptr + 2 * num_tokens + row, accepted.to(tl.int64))
    tl.store(readback_ptr + 2 * num_tokens + num_rows + row * K + offset, drafts, mask=offset < K)


def accept(
    rows_R4: Tensor, position_X: Tensor, slots_R: Tensor, chosen_N: Tensor, drafts_RK: Tensor, logits_NV: Tensor,
    stops_SM: Tensor, last_token_S: Tensor, resume_S2: Tensor, readback_X: Tensor, times: Tensor,
) -> Tensor:  # fmt: skip
    """Accepts drafts and stores the verdict, as `reference.accept` describes it. Returns the index [R], among all N
    tokens, of each row's last valid token."""
    num_rows, drafts = drafts_RK.shape
    last_R = torch.empty_like(slots_R)
    _accept_kernel[(num_rows,)](
        rows_R4, position_X, slots_R, chosen_N, drafts_RK, logits_NV, logits_NV.stride(0), stops_SM,
        last_token_S, resume_S2, last_R, readback_X, num_rows, times,
        K=drafts, BLOCK_J=triton.next_power_of_2(drafts + 1), NUM_STOPS=stops_SM.shape[1], **LAUNCH_OPTIONS,
    )  # fmt: skip
    return last_R


@triton.jit
def _carry_kernel(
    hidden_ptr, last_ptr, slots_ptr, carry_ptr, times_ptr, D: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK columns of one row's carry."""
    launch_dependents_and_wait()
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if (row == 0) & (tl.program_id(1) == 0):
        _record_time(times_ptr, 3)
    mask = column < D
    hidden = tl.load(hidden_ptr + tl.load(last_ptr + row) * D + column, mask=mask)
    tl.store(carry_ptr + tl.load(slots_ptr + row) * D + column, hidden, mask=mask)


def carry(hidden_ND: Tensor, last_R: Tensor, slots_R: Tensor, carry_SD: Tensor, times: Tensor) -> None:
    """Stores the head's hidden state at each row's last valid token, from which its next draft starts."""
    size = hidden_ND.shape[1]
    _carry_kernel[(len(slots_R), triton.cdiv(size, CARRY_BLOCK))](
        hidden_ND, last_R, slots_R, carry_SD, times, D=size, BLOCK=CARRY_BLOCK, **LAUNCH_OPTIONS
    )


OPS = StepOps(begin, look_up, feed, accept, carry, count)
