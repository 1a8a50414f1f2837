# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
"""Penalties and biases of whole rows of logits on a GPU, and the counts they are reckoned by.

Bit for bit what sampling/processors.py does to the tokens that were seen: the same operations one after the other, none
of them fused. A row's drafts count as produced at the places after them, though nobody has counted them yet.

Legend. R rows of J = `each` logits, N in all; S slots; V logits. logits_ptr [N, V], stride_logits from one to the next;
slots_ptr [R]; changes_ptr [S, 5], stride_changes; counts_ptr, biases_ptr [S, V]; drafts_ptr [R, K], out_ptr [N, V].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.ops.triton_launch import LAUNCH_OPTIONS, launch_dependents_and_wait
from headlong.ops.triton_step import SEEN_IN_PROMPT

BLOCK = 1024
UNFUSED = {"enable_fp_fusion": False}
_PRODUCED = tl.constexpr(SEEN_IN_PROMPT - 1)


@triton.jit
def _penalised(x, change_ptr, counts_ptr, drafts_ptr, num_produced, index, mask):
    """Applies the penalties of a slot to logits, by its counts; the first `num_produced` of its drafts count as
    produced."""
    if tl.load(change_ptr + 3) != 0:
        known = tl.load(counts_ptr + index, mask=mask, other=0)
        count = known & _PRODUCED
        for before in range(num_produced):
            count += (index == tl.load(drafts_ptr + before)).to(tl.int32)
        repetition, presence = tl.load(change_ptr).to(tl.float32), tl.load(change_ptr + 1).to(tl.float32)
        frequency = tl.load(change_ptr + 2).to(tl.float32)
        less = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
        less = less - (count > 0).to(tl.float32) * presence - count.to(tl.float32) * frequency
        x = tl.where((known != 0) | (count > 0), less, x)
    return x


@triton.jit
def _biased(x, change_ptr, biases_ptr, index, mask):
    """Adds the biases of a slot to logits, if it has any."""
    if tl.load(change_ptr + 4) != 0:
        x += tl.load(biases_ptr + index, mask=mask, other=0.0)
    return x


@triton.jit
def _penalise_kernel(
    logits_ptr, stride_logits, slots_ptr, changes_ptr, stride_changes, counts_ptr, biases_ptr, drafts_ptr, out_ptr,
    size, each, num_drafts,
    COUNTS: tl.constexpr, BIASES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    launch_dependents_and_wait()
    line, index = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, num_produced, mask = line // each, num_drafts + 1 - each + line % each, index < size
    slot = tl.load(slots_ptr + row)
    change_ptr = changes_ptr + slot * stride_changes
    x = tl.load(logits_ptr + line.to(tl.int64) * stride_logits + index, mask=mask, other=0.0)
    if COUNTS:
        slot_counts_ptr, row_drafts_ptr = counts_ptr + slot * size, drafts_ptr + row * num_drafts
        x = _penalised(x, change_ptr, slot_counts_ptr, row_drafts_ptr, num_produced, index, mask)
    if BIASES:
        x = _biased(x, change_ptr, biases_ptr + slot * size, index, mask)
    tl.store(out_ptr + line.to(tl.int64) * size + index, x, mask=mask)


def penalise(
    logits_NV: Tensor, slots_R: Tensor, changes_S5: Tensor, counts_SV: Tensor | None, bias_SV: Tensor | None,
    drafts_RK: Tensor,
) -> Tensor:  # fmt: skip
    """Returns new logits, as `penalise` in penalise/reference.py does."""
    assert logits_NV.dtype == torch.float32 and logits_NV.stride(1) == 1 and drafts_RK.is_contiguous()
    (lines, size), (rows, num_drafts) = logits_NV.shape, drafts_RK.shape
    out_NV = torch.empty(lines, size, dtype=torch.float32, device=logits_NV.device)
    _penalise_kernel[(triton.cdiv(size, BLOCK), lines)](
        logits_NV, logits_NV.stride(0), slots_R, changes_S5, changes_S5.stride(0), counts_SV, bias_SV, drafts_RK,
        out_NV, size, lines // rows, num_drafts, COUNTS=counts_SV is not None, BIASES=bias_SV is not None,
        BLOCK=BLOCK, **(LAUNCH_OPTIONS | UNFUSED),
    )  # fmt: skip
    return out_NV


@triton.jit
def _count_kernel(last_ptr, slots_ptr, chosen_ptr, counts_ptr, size, each, BLOCK: tl.constexpr):
    launch_dependents_and_wait()
    row = tl.program_id(0)
    slot, place, first = tl.load(slots_ptr + row), tl.arange(0, BLOCK), row * each
    if slot > 0:
        stands = place <= tl.load(last_ptr + row) - first
        chosen = tl.load(chosen_ptr + first + place, mask=stands, other=0)
        tl.atomic_add(counts_ptr + slot * size + chosen, 1, mask=stands, sem="relaxed")


def count(last_R: Tensor, slots_R: Tensor, chosen_N: Tensor, counts_SV: Tensor) -> None:
    """Adds each row's tokens to the counts, as `count` in penalise/reference.py does."""
    rows, each = len(slots_R), len(chosen_N) // len(slots_R)
    _count_kernel[(rows,)](
        last_R, slots_R, chosen_N, counts_SV, counts_SV.shape[1], each,
        BLOCK=triton.next_power_of_2(each), **LAUNCH_OPTIONS,
    )  # fmt: skip
