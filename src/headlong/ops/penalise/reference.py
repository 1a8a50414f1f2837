"""Penalties and biases of logits by what a device has counted, in plain torch.

R rows of K drafts, J = K + 1 lines of logits each, N in all; S slots, V tokens.
"""

import torch
from torch import Tensor

from headlong.ops.triton_step import SEEN_IN_PROMPT


def penalise(
    logits_NV: Tensor, slots_R: Tensor, changes_S5: Tensor, counts_SV: Tensor | None, bias_SV: Tensor | None,
    drafts_RK: Tensor,
) -> Tensor:  # fmt: skip
    """Returns new logits. The last logits of a row come after all its drafts, each of the others after one draft fewer.
    `changes_S5` are the penalties of repetition, presence and frequency, whether there are any, and whether there is a
    bias; slots without are left as they are, whatever is counted there. Without counts or biases, none of these slots
    has any."""
    num_rows, num_drafts = drafts_RK.shape
    each, out_NV = len(logits_NV) // num_rows, logits_NV.clone()
    for line, logits_V in enumerate(out_NV):
        row, slot = line // each, slots_R[line // each]
        repetition, presence, frequency, penalised, biased = changes_S5[slot].to(logits_V.dtype)
        if counts_SV is not None and bool(penalised):
            before = drafts_RK[row, : num_drafts - each + 1 + line % each]
            produced_V = counts_SV[slot] & (SEEN_IN_PROMPT - 1)
            produced_V = produced_V + torch.bincount(before, minlength=len(logits_V)).to(produced_V.dtype)
            seen_V = (counts_SV[slot] != 0) | (produced_V != 0)
            repeated_V = torch.where(logits_V > 0, logits_V / repetition, logits_V * repetition)
            changed_V = repeated_V - (produced_V > 0) * presence - produced_V * frequency
            logits_V.copy_(torch.where(seen_V, changed_V, logits_V))
        if bias_SV is not None and bool(biased):
            logits_V += bias_SV[slot]
    return out_NV


def count(last_R: Tensor, slots_R: Tensor, chosen_N: Tensor, counts_SV: Tensor) -> None:
    """Adds each row's tokens to the counts, up to its last valid token: `last_R` is the index of that among all tokens.
    Rows that have ended are at slot 0, whose tokens are not counted."""
    each = len(chosen_N) // len(slots_R)
    for row, (last, slot) in enumerate(zip(last_R.tolist(), slots_R.tolist(), strict=True)):
        if slot:
            own = chosen_N[row * each : last + 1]
            counts_SV[slot] += torch.bincount(own, minlength=counts_SV.shape[1]).to(counts_SV.dtype)
