"""The target's verdict on a step's drafts, batched, on the device, with one read-back.

`coupled` (and greedy): the target's token never depends on the draft; a draft that is that token is accepted.
`ratio`: accept with min(1, p/q), else sample (p − q)+ (Leviathan et al. 2023, algorithm 1).
`block`: the same, but prefixes are judged as a whole (Sun et al. 2024, algorithm 2).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from headlong.ops.step.reference import num_accepted
from headlong.sampling import noise
from headlong.sampling.entries import Entries, Entry
from headlong.sampling.sampler import Sampler, needs_q
from headlong.speculate.verdict import Found, build_verdict
from headlong.types import Draft, Plan, RowPlan, Verdict

Judge = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class _Chosen(NamedTuple):
    """What was decided while it is on the device."""

    tokens_L: Tensor
    finite_L: Tensor
    judged: dict[int, Tensor]
    """How many drafts a judge accepted, of those rows that do not go by equality: a tensor [1] by row of the plan."""


def verify(plan: Plan, draft: Draft | None, logits_LV: Tensor, sampler: Sampler) -> Verdict:
    firsts = plan.first_logits
    if not len(logits_LV):
        nothing = torch.zeros(0, dtype=torch.long, device=logits_LV.device)
        return build_verdict(plan, Found([], [], [0] * len(plan.rows), []), firsts, nothing)
    if _is_plain(plan, sampler):
        tokens_L = sampler.argmax(logits_LV)
        chosen = _Chosen(tokens_L, are_numbers(logits_LV, tokens_L), {})
        return build_verdict(plan, _read_back(plan, draft, chosen, firsts), firsts, tokens_L)
    entries = _entries(plan, draft, sampler)
    tokens_L = sampler.choose(logits_LV, entries)
    chosen = _Chosen(tokens_L, are_numbers(logits_LV, tokens_L), {})
    if draft is not None and draft.q_RKV is not None:
        for rule, judge in (("ratio", _judge_ratio), ("block", _judge_block)):
            rows = [n for n, row in enumerate(plan.rows) if row.num_drafts and _rule(row) == rule]
            if rows:
                _decide(judge, rows, plan, draft, logits_LV, entries, sampler, firsts, chosen)
    logprobs = sampler.logprobs(logits_LV, tokens_L, entries)
    return build_verdict(plan, _read_back(plan, draft, chosen, firsts), firsts, tokens_L, logprobs)


def _read_back(plan: Plan, draft: Draft | None, chosen: _Chosen, firsts: list[int]) -> Found:
    """Waits for the device, once. Drafts are compared here: they are few numbers, too few for a tensor each."""
    parts = [chosen.tokens_L, chosen.finite_L, *chosen.judged.values()]
    if draft is not None:
        parts.append(draft.tokens_RK.flatten())
    values, count = torch.cat(parts).tolist(), len(chosen.tokens_L)
    tokens, finite = values[:count], values[count : 2 * count]
    drafts = values[2 * count + len(chosen.judged) :]
    width = len(drafts) // len(plan.rows)
    accepted = []
    for number, (row, first) in enumerate(zip(plan.rows, firsts, strict=True)):
        own = drafts[number * width : number * width + row.num_drafts]
        accepted.append(num_accepted(tokens[first : first + len(own)], own) if own else 0)
    for number, count in zip(chosen.judged, values[2 * len(tokens) :], strict=False):
        accepted[number] = count
    return Found(tokens, finite, accepted, drafts)


def _is_plain(plan: Plan, sampler: Sampler) -> bool:
    """Whether only the best tokens are asked for."""
    told = any(row.request.params.logprobs is not None for row in plan.rows)
    return not told and sampler.is_plain(row.slot for row in plan.rows)


def _entries(plan: Plan, draft: Draft | None, sampler: Sampler) -> Entries:
    rows = [Entry(row.slot, row.start + row.num_certain, 0, row.num_logits) for row in plan.rows]
    return Entries(rows, sampler.table, None if draft is None else draft.tokens_RK)


def are_numbers(logits_LV: Tensor, tokens_L: Tensor) -> Tensor:
    """1 where logits are numbers. NaN and +inf win every argmax, whatever the processing: the token that was chosen
    tells of its whole row, and no second pass over the vocabulary is needed."""
    return logits_LV.gather(1, tokens_L[:, None])[:, 0].isfinite().long()


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
    chosen: _Chosen,
) -> None:
    """Replaces what was chosen for these M rows by what a judge says of them, in place. Shallow rows are padded to the
    deepest."""
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
    chosen.tokens_L[index_MJ[:, :-1][real_MK]] = drafts_MK[real_MK]
    last_M = first_M + count_M
    chosen.tokens_L[last_M] = sampler.draw(rest_MV.log(), entries, last_M, noise.RESIDUAL)
    chosen.finite_L[last_M] *= rest_MV.sum(1).isfinite().long()  # q, too, may be no numbers
    chosen.judged.update(zip(rows, count_M.split(1), strict=True))


def _judge_ratio(p: Tensor, q: Tensor, drafts: Tensor, units: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
    """How many are accepted, and the law of the token after them, up to a factor. p and q are [M, K + 1, V];
    q is 0 from a row's depth on, where the rest is p itself."""
    p_draft, q_draft = (x[:, :-1].gather(2, drafts[..., None])[..., 0] for x in (p, q))
    agreed = (units * q_draft < p_draft).long().cumprod(1).sum(1)
    count = torch.minimum(agreed, depth)
    each = torch.arange(len(count), device=count.device)
    return count, (p[each, count] - q[each, count]).clamp(min=0.0)


def _judge_block(p: Tensor, q: Tensor, drafts: Tensor, units: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
    """The longest prefix that passes its own test; shorter ones need not pass theirs. Shapes are those of
    `_judge_ratio`."""
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
