"""How a step begins and ends where its rows are: what they are fed, which drafts stand, where the next step goes on.

The host runs `num_accepted` on lists it has read back. The rest is what a device does for itself, in plain torch: rows
whose place the host does not tell (start below 0) go on where the step before left them, and a row that has ended by
then is computed at place 0, where nobody looks.

R rows of K drafts, J = K + 1 tokens each, N in all; S slots; P pages of a row; X positions of all passes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headlong.ops.penalise.reference import count
from headlong.ops.step.ops import StepOps


def num_accepted(tokens: Sequence[int], drafts: Sequence[int]) -> int:
    """How many of a row's drafts, from the first on, are the target's own tokens."""
    count = 0
    for token, draft in zip(tokens, drafts, strict=False):
        if token != draft:
            break
        count += 1
    return count


def begin(
    given_R4: Tensor, place_S2: Tensor, pages_SP: Tensor, table_PR6: Tensor, position_X: Tensor,
    num_pages: int, num_drafts: int, times: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Fills in where every row is, in the target's table and positions (pass 0) and the head's (a token a row, a
    position further each time); gives the rows' slots [R] and their first pages. `given_R4`: slot, start, drafts to
    replay, drafts."""
    num_rows, padded, each = len(given_R4), table_PR6.shape[1], 1 + num_drafts
    times[0] = 0
    slots_R, starts_R, replays_R, _ = given_R4.to(place_S2.device).unbind(1)
    known_R2 = torch.where(
        (starts_R < 0)[:, None], place_S2[slots_R.long()], torch.stack((starts_R, replays_R), 1)
    )
    goes_on_R = known_R2[:, 0] >= 0
    slots_R, known_R2 = slots_R * goes_on_R, known_R2 * goes_on_R[:, None]
    table_PR6[0, :num_rows, 0], table_PR6[0, :num_rows, 1] = slots_R, known_R2[:, 0]
    table_PR6[0, :num_rows, 4] = known_R2[:, 1]
    further_J = torch.arange(each, device=position_X.device)
    position_X[: num_rows * each] = (known_R2[:, :1] + further_J).flatten().to(position_X.dtype)
    first_ahead = len(position_X) - padded * max(num_drafts - 1, 0)
    for index in range(num_drafts - 1):
        table_PR6[1 + index, :num_rows, 1] = known_R2[:, 0] + index
        at = first_ahead + index * padded
        position_X[at : at + num_rows] = known_R2[:, 0] + index
    return slots_R.long(), pages_SP[slots_R.long(), :num_pages]


def look_up(position_X: Tensor, cos_table: Tensor, sin_table: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of two tables [positions, 1, D]."""
    at_X = position_X.long()
    return cos_table[at_X], sin_table[at_X]


def feed(slots_R: Tensor, last_token_S: Tensor, drafts_RK: Tensor, times: Tensor) -> Tensor:
    """The tokens of all rows [N]: each one's last and its drafts."""
    times[1] = 0
    return torch.cat((last_token_S[slots_R, None], drafts_RK), dim=1).flatten()


def accept(
    given_R4: Tensor, position_X: Tensor, slots_R: Tensor, chosen_N: Tensor, drafts_RK: Tensor, logits_NV: Tensor,
    stops_SM: Tensor, last_token_S: Tensor, place_S2: Tensor, found_X: Tensor, times: Tensor,
) -> Tensor:  # fmt: skip
    """Leaves each row's last token and place where the next step finds them, and in `found_X` what the host reads: the
    target's tokens, whether their logits are numbers, how many drafts stand, drafts. Gives the last token that stands
    of each row, among all. A row ends, for the next step, at a token of `stops_SM` or at logits that are no numbers."""
    (num_rows, num_drafts), total = drafts_RK.shape, len(chosen_N)
    each, times[2] = 1 + num_drafts, 0
    finite_N = logits_NV.gather(1, chosen_N[:, None])[:, 0].isfinite().long()
    tokens, drafts, finite = (
        chosen_N.view(-1, each).tolist(),
        drafts_RK.tolist(),
        finite_N.view(-1, each).tolist(),
    )
    accepted, last = [], []
    for row, (slot, depth) in enumerate(zip(slots_R.tolist(), given_R4[:, 3].tolist(), strict=True)):
        count = num_accepted(tokens[row], drafts[row][:depth])
        emitted, stops = tokens[row][: count + 1], stops_SM[slot].tolist()
        ends = any(token in stops for token in emitted) or not all(finite[row][: count + 1])
        last_token_S[slot] = emitted[-1]
        place_S2[slot, 0] = -1 if ends else int(position_X[row * each]) + 1 + count
        place_S2[slot, 1] = count
        accepted.append(count)
        last.append(row * each + count)
    accepted_R = torch.tensor(accepted, device=found_X.device)
    parts = torch.cat((chosen_N, finite_N, accepted_R, drafts_RK.flatten()))
    assert len(parts) == 2 * total + num_rows * each
    found_X[: len(parts)] = parts
    return torch.tensor(last, device=slots_R.device)


def carry(out_ND: Tensor, last_R: Tensor, slots_R: Tensor, carry_SD: Tensor, times: Tensor) -> None:
    """What the head said of each row's last token is where its next draft starts."""
    times[3] = 0
    carry_SD[slots_R] = out_ND[last_R]


OPS = StepOps(begin, look_up, feed, accept, carry, count)
