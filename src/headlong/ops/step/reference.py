"""How a step that asks the host for nothing begins and ends, in plain torch: what step/triton.py does in kernels.

The host itself runs only `num_accepted`, on lists that it has read back. Rows whose start the host does not know (start
below 0) resume where the step before left them, and a row that has ended by then is computed at position 0 of slot 0,
which belongs to nobody.

R rows of K drafts, J = K + 1 tokens each, N in all; S slots; P pages of a row; X positions of all passes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headlong.ops.penalise.reference import count
from headlong.ops.step.ops import StepOps
from headlong.ops.triton_step import ENDED


def num_accepted(tokens: Sequence[int], drafts: Sequence[int]) -> int:
    """How many of a row's drafts, from the first on, are the target's own tokens."""
    count = 0
    for token, draft in zip(tokens, drafts, strict=False):
        if token != draft:
            break
        count += 1
    return count


def begin(
    rows_R4: Tensor, resume_S2: Tensor, pages_SP: Tensor, tables_PR6: Tensor, position_X: Tensor,
    num_pages: int, num_drafts: int, times: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Fills in where every row is, in the tables and positions of all passes: pass 0 is the target's, the others are
    the head's, each of one token a row at the next position. Returns the rows' slots [R] and their first pages.

    `rows_R4` has each row's slot, start, drafts to replay and drafts; `resume_S2` each slot's next start and drafts to
    replay."""
    num_rows, padded, each = len(rows_R4), tables_PR6.shape[1], 1 + num_drafts
    times[0] = 0
    slots_R, starts_R, replays_R, _ = rows_R4.to(resume_S2.device).unbind(1)
    known_R2 = torch.where(
        (starts_R < 0)[:, None], resume_S2[slots_R.long()], torch.stack((starts_R, replays_R), 1)
    )
    is_live_R = known_R2[:, 0] >= 0
    slots_R, known_R2 = slots_R * is_live_R, known_R2 * is_live_R[:, None]
    tables_PR6[0, :num_rows, 0], tables_PR6[0, :num_rows, 1] = slots_R, known_R2[:, 0]
    tables_PR6[0, :num_rows, 4] = known_R2[:, 1]
    offsets_J = torch.arange(each, device=position_X.device)
    position_X[: num_rows * each] = (known_R2[:, :1] + offsets_J).flatten().to(position_X.dtype)
    first_ahead = len(position_X) - padded * max(num_drafts - 1, 0)
    for index in range(num_drafts - 1):
        tables_PR6[1 + index, :num_rows, 1] = known_R2[:, 0] + index
        at = first_ahead + index * padded
        position_X[at : at + num_rows] = known_R2[:, 0] + index
    return slots_R.long(), pages_SP[slots_R.long(), :num_pages]


def look_up(position_X: Tensor, cos_table: Tensor, sin_table: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rows of two tables [positions, 1, D] for these positions."""
    at_X = position_X.long()
    return cos_table[at_X], sin_table[at_X]


def feed(slots_R: Tensor, last_token_S: Tensor, drafts_RK: Tensor, times: Tensor) -> Tensor:
    """Returns the tokens of all rows [N]: each row's last token and its drafts."""
    times[1] = 0
    return torch.cat((last_token_S[slots_R, None], drafts_RK), dim=1).flatten()


def accept(
    rows_R4: Tensor, position_X: Tensor, slots_R: Tensor, chosen_N: Tensor, drafts_RK: Tensor, logits_NV: Tensor,
    stops_SM: Tensor, last_token_S: Tensor, resume_S2: Tensor, readback_X: Tensor, times: Tensor,
) -> Tensor:  # fmt: skip
    """Accepts each row's drafts up to the first that is not the target's own token in `chosen_N`.

    Stores each row's last token, and where its next step starts (ENDED after a token of `stops_SM`, or after logits
    that are not finite). Stores in `readback_X` what the host reads: the target's tokens, whether their logits are
    finite, how many drafts were accepted, and the drafts. Returns the index [R], among all N tokens, of each row's last
    valid token."""
    (num_rows, num_drafts), total = drafts_RK.shape, len(chosen_N)
    each, times[2] = 1 + num_drafts, 0
    finite_N = logits_NV.gather(1, chosen_N[:, None])[:, 0].isfinite().long()
    tokens, drafts, finite = (
        chosen_N.view(-1, each).tolist(),
        drafts_RK.tolist(),
        finite_N.view(-1, each).tolist(),
    )
    accepted, last = [], []
    for row, (slot, depth) in enumerate(zip(slots_R.tolist(), rows_R4[:, 3].tolist(), strict=True)):
        count = num_accepted(tokens[row], drafts[row][:depth])
        emitted, stops = tokens[row][: count + 1], stops_SM[slot].tolist()
        ends = any(token in stops for token in emitted) or not all(finite[row][: count + 1])
        last_token_S[slot] = emitted[-1]
        resume_S2[slot, 0] = ENDED if ends else int(position_X[row * each]) + 1 + count
        resume_S2[slot, 1] = count
        accepted.append(count)
        last.append(row * each + count)
    accepted_R = torch.tensor(accepted, device=readback_X.device)
    parts = torch.cat((chosen_N, finite_N, accepted_R, drafts_RK.flatten()))
    assert len(parts) == 2 * total + num_rows * each
    readback_X[: len(parts)] = parts
    return torch.tensor(last, device=slots_R.device)


def carry(hidden_ND: Tensor, last_R: Tensor, slots_R: Tensor, carry_SD: Tensor, times: Tensor) -> None:
    """Stores the head's hidden state at each row's last valid token, from which its next draft starts."""
    times[3] = 0
    carry_SD[slots_R] = hidden_ND[last_R]


OPS = StepOps(begin, look_up, feed, accept, carry, count)
