"""The gated delta rule, token by token, with replay rollback. fp32 (float64 for float64 models).

    S ← exp(g) S;   S ← S + k (β (v − Sᵀk))ᵀ;   o = Sᵀq

Each slot keeps one committed S and the inputs of the last step's drafts. A step replays the accepted ones,
runs its certain tokens, stores S once, then runs its own drafts on a copy. Rejecting costs nothing, and the
order of operations is that of plain decoding, so the bits are too. Derivation: README.md beside this file.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headlong.ops.batched_matmul import matmul
from headlong.types import Rows


@dataclass(frozen=True)
class DeltaState:
    """The memory of one layer: H value heads, keys of D columns, values of E columns; at most K drafts."""

    committed_SHDE: Tensor
    drafts_SKHX: Tensor
    """The k, v, exp(g) and β of each draft, side by side: X = D + E + 2."""


@dataclass(frozen=True)
class PreparedDelta:
    """How a step's flat tokens fall into the three phases. Rows are ordered by certain tokens, most first."""

    slots: Tensor | slice
    """The rows' slots; a slice where there is one row, which then works on its slot in place."""
    num_replay: int
    """The number of drafts in the longest replay; 0 skips the phase."""
    replay_RK: Tensor
    """The mask of stored drafts, True where one is to be replayed."""
    certain: Tensor
    """Flat indices of certain tokens, time-major: first every row's first one, then every row's second."""
    active: tuple[int, ...]
    """The number of rows that still have certain tokens at each of those times."""
    num_drafts: int
    drafts_RK: Tensor
    """Flat indices of the drafts; padding repeats a valid index."""
    is_draft_RK: Tensor


def prepare(rows: Rows, device: torch.device) -> PreparedDelta:
    slots, _, query_lens, num_drafts, num_replay = rows
    certain_lens = [n - d for n, d in zip(query_lens, num_drafts, strict=True)]
    assert certain_lens == sorted(certain_lens, reverse=True), "rows must come longest first"
    firsts, flat = [], 0
    for query_len in query_lens:
        firsts.append(flat)
        flat += query_len
    active = [sum(n > t for n in certain_lens) for t in range(certain_lens[0])]
    depth, replay = max(num_drafts), max(num_replay)
    drafts = [
        [first + n + min(j, d - 1) if d else first for j in range(depth)]
        for first, n, d in zip(firsts, certain_lens, num_drafts, strict=True)
    ]
    alone = slice(slots[0], slots[0] + 1) if len(slots) == 1 else None
    return PreparedDelta(
        slots=alone or torch.tensor(slots, device=device),
        num_replay=replay,
        replay_RK=torch.tensor([[j < n for j in range(replay)] for n in num_replay], device=device),
        certain=torch.tensor([firsts[r] + t for t, n in enumerate(active) for r in range(n)], device=device),
        active=tuple(active),
        num_drafts=depth,
        drafts_RK=torch.tensor(drafts, device=device, dtype=torch.long),
        is_draft_RK=torch.tensor([[j < d for j in range(depth)] for d in num_drafts], device=device),
    )


def gated_delta(
    q_NHD: Tensor,
    k_NHD: Tensor,
    v_NHE: Tensor,
    decay_NH: Tensor,
    beta_NH: Tensor,
    state: DeltaState,
    prepared: PreparedDelta,
) -> Tensor:
    """Returns the outputs [N, H, E], and updates the slots of the step. `decay` is exp(g)."""
    sizes = (k_NHD.shape[-1], v_NHE.shape[-1])
    inputs_NHX = torch.cat((k_NHD, v_NHE, decay_NH[..., None], beta_NH[..., None]), dim=-1)
    memory_RHDE = state.committed_SHDE[prepared.slots]  # a view for one row, a copy for several
    if prepared.num_replay:
        _replay(memory_RHDE, state, prepared, sizes)

    in_place = isinstance(prepared.slots, slice)
    out = _run_certain(memory_RHDE, q_NHD, inputs_NHX, prepared, sizes, in_place)
    if not in_place:
        state.committed_SHDE[prepared.slots] = memory_RHDE
    if not prepared.num_drafts:
        return out if in_place else torch.empty_like(out).index_copy_(0, prepared.certain, out)

    out_NHE = torch.empty_like(v_NHE).index_copy_(0, prepared.certain, out)
    drafts_RKHX = inputs_NHX[prepared.drafts_RK]
    state.drafts_SKHX[prepared.slots, : prepared.num_drafts] = drafts_RKHX
    memory_RHDE = memory_RHDE.clone() if in_place else memory_RHDE
    q_RKHD, outs = q_NHD[prepared.drafts_RK], []
    for j in range(prepared.num_drafts):
        _update(memory_RHDE, drafts_RKHX[:, j], sizes)
        outs.append(_read(memory_RHDE, q_RKHD[:, j]))
    out_NHE[prepared.drafts_RK[prepared.is_draft_RK]] = torch.stack(outs, dim=1)[prepared.is_draft_RK]
    return out_NHE


def _replay(memory_RHDE: Tensor, state: DeltaState, prepared: PreparedDelta, sizes: tuple[int, int]) -> None:
    drafts_RKHX = state.drafts_SKHX[prepared.slots, : prepared.num_replay]
    if not isinstance(prepared.slots, slice):
        # A row with less to replay decays by one and adds zero: its bits stay.
        neutral = drafts_RKHX.new_zeros(drafts_RKHX.shape[-1])
        neutral[-2] = 1.0
        drafts_RKHX = torch.where(prepared.replay_RK[:, :, None, None], drafts_RKHX, neutral)
    for j in range(prepared.num_replay):
        _update(memory_RHDE, drafts_RKHX[:, j], sizes)


def _run_certain(
    memory_RHDE: Tensor,
    q_NHD: Tensor,
    inputs_NHX: Tensor,
    prepared: PreparedDelta,
    sizes: tuple[int, int],
    in_order: bool,
) -> Tensor:
    """Returns outputs in the order of `prepared.certain`, which for a single row is the order of the tokens."""
    if not in_order:
        q_NHD, inputs_NHX = q_NHD[prepared.certain], inputs_NHX[prepared.certain]
    outs, first = [], 0
    for count in prepared.active:
        running = memory_RHDE[:count]
        _update(running, inputs_NHX[first : first + count], sizes)
        outs.append(_read(running, q_NHD[first : first + count]))
        first += count
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _update(memory_RHDE: Tensor, inputs_RHX: Tensor, sizes: tuple[int, int]) -> None:
    """Applies the delta rule to one token for each row, in place."""
    memory = memory_RHDE.flatten(0, 1)
    k, v, decay, beta = inputs_RHX.flatten(0, 1).unsqueeze(1).split_with_sizes((*sizes, 1, 1), dim=-1)
    memory.mul_(decay)
    delta = (v - matmul(k, memory)).mul_(beta)
    memory.addcmul_(k.transpose(1, 2), delta)


def _read(memory_RHDE: Tensor, q_RHD: Tensor) -> Tensor:
    out = matmul(q_RHD.flatten(0, 1).unsqueeze(1), memory_RHDE.flatten(0, 1))
    return out.view(*q_RHD.shape[:2], -1)
