"""The target's verdict on a step's drafts, batched, on the device, with one read-back.

`coupled` (and greedy): the target's token never depends on the draft; a draft that is that token is accepted.
`ratio`: accept with min(1, p/q), else sample (p − q)+ (Leviathan et al. 2023, algorithm 1).
`block`: the same, but prefixes are judged as a whole (Sun et al. 2024, algorithm 2).
"""

from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from headlong.sampling import noise
from headlong.sampling.entries import Entries, Entry
from headlong.sampling.sampler import Sampler, needs_q
from headlong.types import Draft, Plan, RowPlan, Verdict

Judge = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class _Found(NamedTuple):
    """The verdict while it is on the device."""

    tokens_L: Tensor
    accepted_R: Tensor
    finite_L: Tensor


def verify(plan: Plan, draft: Draft | None, logits_LV: Tensor, sampler: Sampler) -> Verdict:
    device = logits_LV.device
    if not len(logits_LV):
        nothing = torch.zeros(0, dtype=torch.long, device=device)
        empty = tuple(() for _ in plan.rows)
        return Verdict(nothing, (0,) * len(plan.rows), empty, empty, empty)
    firsts = plan.first_logits
    if _is_plain(plan, sampler):
        return _agree(plan, draft, logits_LV, sampler.argmax(logits_LV), firsts)
    entries = _entries(plan, draft, sampler)
    tokens_L = sampler.choose(logits_LV, entries)
    accepted_R = _matches(plan, draft, tokens_L, torch.tensor(firsts, device=device))
    found = _Found(tokens_L, accepted_R, are_numbers(logits_LV, tokens_L))
    if draft is not None and draft.q_RKV is not None:
        for rule, judge in (("ratio", _judge_ratio), ("block", _judge_block)):
            rows = [n for n, row in enumerate(plan.rows) if row.num_drafts and _rule(row) == rule]
            if rows:
                _decide(judge, rows, plan, draft, logits_LV, entries, sampler, firsts, found)
    logprobs = sampler.logprobs(logits_LV, tokens_L, entries)
    drafts = [] if draft is None else [draft.tokens_RK.flatten()]
    read_back = iter(torch.cat((*found, *drafts)).tolist())
    flat = list(islice(read_back, len(tokens_L)))
    accepted = list(islice(read_back, len(plan.rows)))
    finite = list(islice(read_back, len(tokens_L)))
    drafted = list(read_back)
    spans = [
        range(first, first + (count + 1 if row.samples else 0))
        for first, count, row in zip(firsts, accepted, plan.rows, strict=True)
    ]
    poisoned = () if all(finite) else [n for n, span in enumerate(spans) if not all(finite[i] for i in span)]
    return Verdict(
        tokens_L=tokens_L,
        accepted=tuple(accepted),
        tokens=tuple(tuple(flat[i] for i in span) for span in spans),
        rejected=tuple(
            tuple(drafted[n * plan.num_drafts + count : n * plan.num_drafts + row.num_drafts])
            for n, (count, row) in enumerate(zip(accepted, plan.rows, strict=True))
        ),
        logprobs=tuple(tuple(logprobs[i] for i in span if i in logprobs) for span in spans),
        poisoned=tuple(poisoned),
    )


def _is_plain(plan: Plan, sampler: Sampler) -> bool:
    """Whether only the best tokens are asked for."""
    told = any(row.request.params.logprobs is not None for row in plan.rows)
    return not told and sampler.is_plain(row.slot for row in plan.rows)


def _agree(
    plan: Plan, draft: Draft | None, logits_LV: Tensor, tokens_L: Tensor, firsts: list[int]
) -> Verdict:
    """Greedy rows alone: a few comparisons, for which a tensor each would be too much."""
    finite_L = are_numbers(logits_LV, tokens_L)
    parts = (tokens_L, finite_L) if draft is None else (tokens_L, finite_L, draft.tokens_RK.flatten())
    read_back, count = torch.cat(parts).tolist(), len(tokens_L)
    tokens, finite, flat = read_back[:count], read_back[count : 2 * count], read_back[2 * count :]
    width = 0 if draft is None else draft.tokens_RK.shape[1]
    drafts = [flat[n * width : (n + 1) * width] for n in range(len(plan.rows))]
    accepted, emitted, rejected = [], [], []
    for row, first, drafted in zip(plan.rows, firsts, drafts, strict=True):
        count = 0
        while count < row.num_drafts and drafted[count] == tokens[first + count]:
            count += 1
        accepted.append(count)
        emitted.append(tuple(tokens[first : first + count + 1]) if row.samples else ())
        rejected.append(tuple(drafted[count : row.num_drafts]))
    poisoned = []
    if not all(finite):
        poisoned = [n for n, first in enumerate(firsts) if not all(finite[first : first + len(emitted[n])])]
    return Verdict(
        tokens_L=tokens_L,
        accepted=tuple(accepted),
        tokens=tuple(emitted),
        rejected=tuple(rejected),
        logprobs=((),) * len(plan.rows),
        poisoned=tuple(poisoned),
    )


def _entries(plan: Plan, draft: Draft | None, sampler: Sampler) -> Entries:
    rows = [Entry(row.slot, row.start + row.num_certain, 0, row.num_logits) for row in plan.rows]
    return Entries(rows, sampler.table, None if draft is None else draft.tokens_RK)


def are_numbers(logits_LV: Tensor, tokens_L: Tensor) -> Tensor:
    """1 where logits are numbers. NaN and +inf win every argmax, whatever the processing: the token that was chosen
    tells of its whole row, and no second pass over the vocabulary is needed."""
    return logits_LV.gather(1, tokens_L[:, None])[:, 0].isfinite().long()


def _matches(plan: Plan, draft: Draft | None, tokens_L: Tensor, firsts_R: Tensor) -> Tensor:
    """How many drafts of each row, from the first on, are the target's own tokens."""
    if draft is None:
        return torch.zeros_like(firsts_R)
    depths_R = torch.tensor([row.num_drafts for row in plan.rows], device=tokens_L.device)
    place_K = torch.arange(plan.num_drafts, device=tokens_L.device)
    at_RK = (firsts_R[:, None] + place_K).clamp(max=len(tokens_L) - 1)
    agrees = (tokens_L[at_RK] == draft.tokens_RK) & (place_K < depths_R[:, None])
    return agrees.long().cumprod(1).sum(1)


def _rule(row: RowPlan) -> str:
    return row.request.params.verify if needs_q(row.request.params) else "coupled"


def _decide(
    judge: Judge,
    rows: list[int],
    plan: Plan,
    draft: Draft,
    logits_LV: Tensor,
    entries: Entries,
    sampler: Sampler,
    firsts: list[int],
    found: _Found,
) -> None:
    """Replaces the verdict on these M rows by a judge's, in place. Shallow rows are padded to the deepest."""
    assert draft.q_RKV is not None
    device = logits_LV.device
    at_M = torch.tensor(rows, device=device)
    depth_M = torch.tensor([plan.rows[n].num_drafts for n in rows], device=device)
    first_M = torch.tensor([firsts[n] for n in rows], device=device)
    place_K = torch.arange(plan.num_drafts, device=device)
    real_MK = place_K < depth_M[:, None]
    place_J = torch.arange(plan.num_drafts + 1, device=device)
    index_MJ = first_M[:, None] + torch.minimum(place_J, depth_M[:, None])
    index = [firsts[n] + min(j, plan.rows[n].num_drafts) for n in rows for j in range(plan.num_drafts + 1)]
    p_MJV = sampler.probabilities(logits_LV, entries, index).view(*index_MJ.shape, -1)
    q_MJV = torch.zeros_like(p_MJV)
    q_MJV[:, :-1] = draft.q_RKV[at_M] * real_MK[..., None]
    units_MK = sampler.uniform(entries, index_MJ[:, :-1].flatten(), noise.ACCEPT).view(real_MK.shape)
    drafts_MK = draft.tokens_RK[at_M]
    count_M, rest_MV = judge(p_MJV, q_MJV, drafts_MK, units_MK, depth_M)
    found.tokens_L[index_MJ[:, :-1][real_MK]] = drafts_MK[real_MK]
    last_M = first_M + count_M
    found.tokens_L[last_M] = sampler.draw(rest_MV.log(), entries, last_M, noise.RESIDUAL)
    found.finite_L[last_M] *= rest_MV.sum(1).isfinite().long()  # q, too, may be no numbers
    found.accepted_R[at_M] = count_M


def _judge_ratio(p: Tensor, q: Tensor, drafts: Tensor, units: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
    """How many are accepted, and the law of the token after them, up to a factor. p and q are [M, K + 1, V];
    q is 0 from a row's depth on, where the rest is p itself."""
    p_draft, q_draft = (x[:, :-1].gather(2, drafts[..., None])[..., 0] for x in (p, q))
    agreed = (units * q_draft < p_draft).long().cumprod(1).sum(1)
    count = torch.minimum(agreed, depth)
    each = torch.arange(len(count), device=count.device)
    return count, (p[each, count] - q[each, count]).clamp(min=0.0)


def _judge_block(p: Tensor, q: Tensor, drafts: Tensor, units: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
    """The longest prefix that passes its own test; shorter ones need not pass theirs. Shapes as above."""
    p_draft, q_draft = (x[:, :-1].gather(2, drafts[..., None])[..., 0] for x in (p, q))
    ratio = p_draft / q_draft
    weight, count, rest = (
        torch.ones_like(p[:, 0, 0]),
        torch.zeros_like(depth),
        (p[:, 0] - q[:, 0]).clamp(min=0),
    )
    for i in range(1, p.shape[1]):
        weight = (weight * ratio[:, i - 1]).clamp(max=1.0)
        left = (weight[:, None] * p[:, i] - q[:, i]).clamp(min=0.0)
        mass = left.sum(1)
        # At a row's depth q is 0, the mass is the weight, and so is the chance. 0 / 0 is a prefix without a
        # rest: p is q there, and a longer one passes.
        passed = (units[:, i - 1] <= mass / (mass + 1.0 - weight)) & (depth >= i)
        count = torch.where(passed, i, count)
        rest = torch.where(passed[:, None], left, rest)
    return count, rest
