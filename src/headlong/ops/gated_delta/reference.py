"""The gated delta rule, token by token, with replay rollback. fp32 (float64 for float64 models).

    S ← exp(g) S;   S ← S + k (β (v − Sᵀk))ᵀ;   o = Sᵀq

Each slot keeps one committed S and the inputs of the last step's drafts. A step replays the accepted ones,
runs its certain tokens, stores S once, then runs its own drafts on a copy. Rejecting costs nothing, and the
order of operations is that of plain decoding, so the bits are too. Derivation: README.md beside this file.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DeltaState:
    """One layer's memory. S slots, K drafts at most, H value heads; keys already repeated to H heads."""

    committed_SHDE: Tensor
    """[slots, heads, key dim, value dim]"""
    draft_k_SKHD: Tensor
    draft_v_SKHE: Tensor
    draft_decay_SKH: Tensor
    """exp(g)"""
    draft_beta_SKH: Tensor


@dataclass(frozen=True)
class DeltaPlan:
    """How a step's flat tokens fall into the three phases. Rows are ordered by certain tokens, most first."""

    num_replay: int
    """The longest replay; 0 skips the phase."""
    replay_RK: Tensor
    """True where that stored draft is to be replayed."""
    certain: Tensor
    """Flat indices, time-major: every row's first certain token, then every row's second…"""
    active: tuple[int, ...]
    """Rows still running at each of those times."""
    num_drafts: int
    drafts_RK: Tensor
    """Flat indices of the drafts; padding repeats a valid index."""
    is_draft_RK: Tensor


def plan(
    query_lens: tuple[int, ...],
    num_drafts: tuple[int, ...],
    num_replay: tuple[int, ...],
    device: torch.device,
) -> DeltaPlan:
    certain_lens = [n - d for n, d in zip(query_lens, num_drafts, strict=True)]
    assert certain_lens == sorted(certain_lens, reverse=True), "rows must come longest first"
    firsts, flat = [], 0
    for query_len in query_lens:
        firsts.append(flat)
        flat += query_len
    active = [sum(n > t for n in certain_lens) for t in range(certain_lens[0])]
    depth, replay = max(num_drafts), max(num_replay)
    drafts = [
        [first + n + min(j, max(d - 1, 0)) - (d == 0) for j in range(depth)]
        for first, n, d in zip(firsts, certain_lens, num_drafts, strict=True)
    ]
    return DeltaPlan(
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
    slots_R: Tensor,
    plan: DeltaPlan,
) -> Tensor:
    """Outputs [N, H, E]; updates the slots. `decay` is exp(g)."""
    out_NHE = torch.empty_like(v_NHE)
    num_rows = slots_R.shape[0]
    memory = state.committed_SHDE[slots_R]

    if plan.num_replay:
        # A row with nothing to replay multiplies by one and adds zero: its bits stay.
        mask = plan.replay_RK[:, :, None]
        depth = plan.num_replay
        k = state.draft_k_SKHD[slots_R, :depth].masked_fill_(~mask[..., None], 0.0)
        v = state.draft_v_SKHE[slots_R, :depth].masked_fill_(~mask[..., None], 0.0)
        decay = state.draft_decay_SKH[slots_R, :depth].masked_fill_(~mask, 1.0)
        beta = state.draft_beta_SKH[slots_R, :depth].masked_fill_(~mask, 0.0)
        for j in range(depth):
            _update(memory, k[:, j], v[:, j], decay[:, j], beta[:, j])

    order = slice(None) if num_rows == 1 and not plan.num_drafts else plan.certain
    q, k, v, decay, beta = (x[order] for x in (q_NHD, k_NHD, v_NHE, decay_NH, beta_NH))
    outs, first = [], 0
    for count in plan.active:
        at = slice(first, first + count)
        _update(memory[:count], k[at], v[at], decay[at], beta[at])
        outs.append(_read(memory[:count], q[at]))
        first += count
    out_NHE[order] = torch.cat(outs)
    state.committed_SHDE[slots_R] = memory

    if plan.num_drafts:
        depth, index = plan.num_drafts, plan.drafts_RK
        q, k, v, decay, beta = (x[index] for x in (q_NHD, k_NHD, v_NHE, decay_NH, beta_NH))
        state.draft_k_SKHD[slots_R, :depth] = k
        state.draft_v_SKHE[slots_R, :depth] = v
        state.draft_decay_SKH[slots_R, :depth] = decay
        state.draft_beta_SKH[slots_R, :depth] = beta
        outs = []
        for j in range(depth):
            _update(memory, k[:, j], v[:, j], decay[:, j], beta[:, j])
            outs.append(_read(memory, q[:, j]))
        out = torch.stack(outs, dim=1)
        out_NHE[index[plan.is_draft_RK]] = out[plan.is_draft_RK]
    return out_NHE


def _update(memory_RHDE: Tensor, k_RHD: Tensor, v_RHE: Tensor, decay_RH: Tensor, beta_RH: Tensor) -> None:
    memory = memory_RHDE.flatten(0, 1)
    k = k_RHD.reshape(-1, 1, k_RHD.shape[-1])
    memory_RHDE.mul_(decay_RH[..., None, None])
    recalled = torch.bmm(k, memory)
    delta = (v_RHE.reshape(recalled.shape) - recalled).mul_(beta_RH.reshape(-1, 1, 1))
    memory.baddbmm_(k.transpose(1, 2), delta)


def _read(memory_RHDE: Tensor, q_RHD: Tensor) -> Tensor:
    out = torch.bmm(q_RHD.reshape(-1, 1, q_RHD.shape[-1]), memory_RHDE.flatten(0, 1))
    return out.view(*q_RHD.shape[:2], -1)
