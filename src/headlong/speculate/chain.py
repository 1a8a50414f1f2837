"""Several drafters as one: who comes first for a row, or who goes on where another stopped.

Knows drafts and depths, not how they are made. Every part sees every step, whether or not its drafts were asked for.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from headlong.layers.context import Context
from headlong.speculate.proposer import Proposer
from headlong.types import Batch, Draft, Plan, Verdict


class Continuing(Proposer, Protocol):
    """One that can draft after tokens that are drafts themselves."""

    def extend(self, plan: Plan, draft: Draft | None) -> Draft | None:
        """The draft, which says its counts, with more tokens after each row's own, to the plan's depths."""
        ...


class First:
    """Each row takes the drafts of the first part that has any for it."""

    device_drafter = None

    def __init__(self, *parts: Proposer) -> None:
        self.parts = parts
        self.max_drafts = max(part.max_drafts for part in parts)

    def propose(self, plan: Plan) -> Draft | None:
        offers: list[Draft] = []
        left = plan
        for part in self.parts:
            draft = _counted(left, part.propose(left))
            if draft is not None:
                offers.append(draft)
                left = _limited(
                    left,
                    [
                        0 if count else row.num_drafts
                        for count, row in zip(draft.counts or (), left.rows, strict=True)
                    ],
                )
        return _side_by_side(offers)

    def observe(
        self, plan: Plan, batch: Batch, context: Context, hidden_ND: Tensor, verdict: Verdict
    ) -> None:
        for part in self.parts:
            part.observe(plan, batch, context, hidden_ND, verdict)

    def flush_deferred(self, row_ids: Iterable[str]) -> None:
        row_ids = list(row_ids)
        for part in self.parts:
            part.flush_deferred(row_ids)

    def check_integrity(self) -> None:
        for part in self.parts:
            part.check_integrity()


class Then:
    """The first part drafts `first_drafts` tokens at most, and the second goes on after the last of them."""

    device_drafter = None

    def __init__(self, first: Proposer, second: Continuing, first_drafts: int) -> None:
        self.first = first
        self.second = second
        self.first_drafts = first_drafts
        self.max_drafts = max(first.max_drafts, second.max_drafts)

    def propose(self, plan: Plan) -> Draft | None:
        short = _limited(plan, [min(row.num_drafts, self.first_drafts) for row in plan.rows])
        return self.second.extend(plan, _counted(short, self.first.propose(short)))

    def observe(
        self, plan: Plan, batch: Batch, context: Context, hidden_ND: Tensor, verdict: Verdict
    ) -> None:
        self.first.observe(plan, batch, context, hidden_ND, verdict)
        self.second.observe(plan, batch, context, hidden_ND, verdict)

    def flush_deferred(self, row_ids: Iterable[str]) -> None:
        row_ids = list(row_ids)
        self.first.flush_deferred(row_ids)
        self.second.flush_deferred(row_ids)

    def check_integrity(self) -> None:
        self.first.check_integrity()
        self.second.check_integrity()


def _limited(plan: Plan, depths: Sequence[int]) -> Plan:
    """The same step with these depths."""
    rows = tuple(
        row if row.num_drafts == depth else replace(row, num_drafts=depth, query_len=row.num_certain + depth)
        for row, depth in zip(plan.rows, depths, strict=True)
    )
    return Plan(rows, max(depths, default=0), plan.draft_stop)


def _counted(plan: Plan, draft: Draft | None) -> Draft | None:
    """The draft with its counts told; None if it is empty."""
    counts = tuple(row.num_drafts for row in plan.fitted(draft).rows)
    return replace(draft, counts=counts) if draft is not None and any(counts) else None


def _side_by_side(offers: list[Draft]) -> Draft | None:
    """One draft of several that have no row in common."""
    if len(offers) < 2:
        return offers[0] if offers else None
    num_rows, width = len(offers[0].tokens_RK), max(draft.tokens_RK.shape[1] for draft in offers)
    tokens_RK = offers[0].tokens_RK.new_zeros(num_rows, width)
    with_q = [draft.q_RKV for draft in offers if draft.q_RKV is not None]
    q_RKV = with_q[0].new_zeros(num_rows, width, with_q[0].shape[2]) if with_q else None
    for draft in offers:
        at = torch.tensor([n for n, count in enumerate(draft.counts or ()) if count], device=tokens_RK.device)
        depth = draft.tokens_RK.shape[1]
        tokens_RK[at, :depth] = draft.tokens_RK[at]
        if q_RKV is not None and draft.q_RKV is not None:
            q_RKV[at, :depth] = draft.q_RKV[at]
    counts = tuple(sum(each) for each in zip(*(draft.counts or () for draft in offers), strict=True))
    return Draft(tokens_RK, q_RKV, counts)
