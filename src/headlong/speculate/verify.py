"""The target's verdict on a step's drafts, batched, on the device, with one read-back.

`coupled` (and greedy): the target's token never depends on the draft; a draft that is that token is accepted.
`ratio`: accept with min(1, p/q), else sample (p − q)+ (Leviathan et al. 2023, algorithm 1).
`block`: the same, but prefixes are judged as a whole (Sun et al. 2024, algorithm 2).
"""

import torch
from torch import Tensor

from headlong.sampling import noise
from headlong.sampling.entries import Entries, Entry
from headlong.sampling.sampler import Sampler, needs_q
from headlong.types import Draft, Plan, Verdict


def verify(plan: Plan, draft: Draft | None, logits_LV: Tensor, sampler: Sampler) -> Verdict:
    device = logits_LV.device
    if not len(logits_LV):
        nothing = torch.zeros(len(plan.rows), dtype=torch.long, device=device)
        empty = tuple(() for _ in plan.rows)
        return Verdict(nothing[:0], nothing, (0,) * len(plan.rows), empty, empty)
    entries = _entries(plan, draft, sampler)
    tokens_L = sampler.choose(logits_LV, entries)
    firsts = _firsts(plan)
    accepted_R = _matches(plan, draft, tokens_L, torch.tensor(firsts, device=device))
    for number, row in enumerate(plan.rows):
        if row.num_drafts and needs_q(row.request.params):
            assert draft is not None and draft.q_RKV is not None
            index = torch.arange(firsts[number], firsts[number] + row.num_logits, device=device)
            p = sampler.probabilities(logits_LV, entries, index)
            drafts, q = draft.tokens_RK[number, : row.num_drafts], draft.q_RKV[number, : row.num_drafts]
            units = sampler.uniform(entries, index[:-1], noise.ACCEPT)
            judge = _judge_block if row.request.params.verify == "block" else _judge_ratio
            count, rest = judge(p, q, drafts, units)
            tokens_L[index[:-1]] = drafts
            at = index[count : count + 1]
            tokens_L[at] = sampler.draw(rest.log()[None], entries, at, noise.RESIDUAL)
            accepted_R[number] = count
    logprobs = sampler.logprobs(logits_LV, tokens_L, entries)
    read_back = torch.cat((accepted_R, tokens_L)).tolist()
    accepted, flat = read_back[: len(plan.rows)], read_back[len(plan.rows) :]
    spans = [
        range(first, first + (count + 1 if row.samples else 0))
        for first, count, row in zip(firsts, accepted, plan.rows, strict=True)
    ]
    return Verdict(
        tokens_L=tokens_L,
        accepted_R=accepted_R,
        accepted=tuple(accepted),
        tokens=tuple(tuple(flat[i] for i in span) for span in spans),
        logprobs=tuple(tuple(logprobs[i] for i in span if i in logprobs) for span in spans),
    )


def _entries(plan: Plan, draft: Draft | None, sampler: Sampler) -> Entries:
    entries, rows = [], []
    for number, row in enumerate(plan.rows):
        for offset in range(row.num_logits):
            position = row.start + row.num_certain + offset
            entries.append(Entry(row.slot, position, offset, row.num_generated + offset))
            rows.append(number)
    prefix = None if draft is None else draft.tokens_RK[torch.tensor(rows, device=draft.tokens_RK.device)]
    return Entries.of(entries, sampler.table, prefix)


def _firsts(plan: Plan) -> list[int]:
    """Index of each row's first logits."""
    firsts, total = [], 0
    for row in plan.rows:
        firsts.append(total)
        total += row.num_logits
    return firsts


def _matches(plan: Plan, draft: Draft | None, tokens_L: Tensor, firsts_R: Tensor) -> Tensor:
    """How many drafts of each row, from the first on, are the target's own tokens."""
    if draft is None:
        return torch.zeros_like(firsts_R)
    depths_R = torch.tensor([row.num_drafts for row in plan.rows], device=tokens_L.device)
    place_K = torch.arange(plan.num_drafts, device=tokens_L.device)
    at_RK = (firsts_R[:, None] + place_K).clamp(max=len(tokens_L) - 1)
    agrees = (tokens_L[at_RK] == draft.tokens_RK) & (place_K < depths_R[:, None])
    return agrees.long().cumprod(1).sum(1)


def _judge_ratio(p: Tensor, q: Tensor, drafts: Tensor, units: Tensor) -> tuple[int, Tensor]:
    """How many are accepted, and the distribution of the token after them. p is [k+1, V], q is [k, V]."""
    depth = len(drafts)
    p_draft, q_draft = p[:depth].gather(1, drafts[:, None])[:, 0], q.gather(1, drafts[:, None])[:, 0]
    count = int((units * q_draft < p_draft).long().cumprod(0).sum())
    return count, p[depth] if count == depth else (p[count] - q[count]).clamp(min=0.0)


def _judge_block(p: Tensor, q: Tensor, drafts: Tensor, units: Tensor) -> tuple[int, Tensor]:
    """The longest prefix that passes its own test; shorter ones need not pass theirs."""
    depth = len(drafts)
    ratios = (p[:depth].gather(1, drafts[:, None]) / q.gather(1, drafts[:, None]))[:, 0].tolist()
    weight, count, rest = 1.0, 0, (p[0] - q[0]).clamp(min=0.0)
    for i, (ratio, unit) in enumerate(zip(ratios, units.tolist(), strict=True), start=1):
        weight = min(weight * ratio, 1.0)
        if i == depth:
            chance, left = weight, p[depth]
        else:
            left = (weight * p[i] - q[i]).clamp(min=0.0)
            mass = float(left.sum())
            chance = mass / (mass + 1.0 - weight) if mass > 0 else 0.0
        if unit <= chance:
            count, rest = i, left
    return count, rest
