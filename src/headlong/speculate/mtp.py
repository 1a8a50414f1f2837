"""Drafts with the model's own MTP head.

After each step the head reads the pairs (target hidden, next token) of everything the step fed, prompts
included, so it is primed in the same pass; what it says of the last settled pair is the carry. A draft of
depth K is the carry's token and K − 1 further passes over the head's own output.
"""

import torch
from torch import Tensor

from headlong.layers.context import Context
from headlong.models.decoder import DecoderModel
from headlong.models.mtp import MtpHead
from headlong.ops.rope.reference import angles
from headlong.sampling.entries import Entries, Entry
from headlong.sampling.sampler import Sampler
from headlong.state.pages import page_table
from headlong.state.state import State
from headlong.types import Batch, Draft, Plan, RowPlan, Rows, Verdict


class MtpProposer:
    """One head over the state it shares with its target."""

    def __init__(self, model: DecoderModel, head: MtpHead, state: State, sampler: Sampler) -> None:
        self.model = model
        self.head = head
        self.state = state
        self.sampler = sampler
        self.max_drafts = state.max_drafts

    def propose(self, plan: Plan) -> Draft | None:
        rows = plan.drafting
        if not rows:
            return None
        device = self.state.carry_SD.device
        slots = torch.tensor([row.slot for row in rows], device=device)
        hidden = self.state.carry_SD[slots]
        tokens_DK = torch.zeros(len(rows), plan.num_drafts, dtype=torch.long, device=device)
        q_steps: list[Tensor | None] = []
        passes = _Passes(self.model, self.state, rows, plan.num_drafts - 1)
        for depth in range(plan.num_drafts):
            if depth:
                embedding = self.model.embed(tokens_DK[:, depth - 1])
                hidden = self.head.forward(embedding, hidden, passes.context(depth - 1), self.state.layers)
            entries = [
                Entry(row.slot, row.start + 1 + depth, depth, row.num_generated + depth) for row in rows
            ]
            wanted = Entries(entries, self.sampler.table, tokens_DK)
            tokens_DK[:, depth], q = self.sampler.propose(self.model.logits(hidden), wanted)
            q_steps.append(q)
        return _spread(plan, tokens_DK, q_steps)

    def observe(
        self, plan: Plan, batch: Batch, context: Context, hidden_ND: Tensor, verdict: Verdict
    ) -> None:
        if not any(row.request.draft_tokens for row in plan.rows):
            return
        next_N = batch.next_tokens_N
        if len(batch.logits_index_L):
            # Past the accepted drafts this pairs with tokens that will not stand; those places are rewritten
            # before anything reads them.
            next_N = next_N.index_copy(0, batch.logits_index_L, verdict.tokens_L)
        out_ND = self.head.forward(self.model.embed(next_N), hidden_ND, context, self.state.layers)
        last, flat = [], 0
        for row in plan.rows:
            last.append(flat + row.num_certain - 1)
            flat += row.query_len
        settled = torch.tensor(last, device=out_ND.device) + verdict.accepted_R
        slots_R = torch.tensor(batch.rows.slots, device=out_ND.device)
        self.state.carry_SD[slots_R] = out_ND[settled]


class _Passes:
    """The contexts of the head's passes: one token per row, a position further each time."""

    def __init__(self, model: DecoderModel, state: State, rows: tuple[RowPlan, ...], count: int) -> None:
        self.ops = model.ops
        self.page_size = state.page_size
        self.starts = [row.start for row in rows]
        if not count:
            return
        # One spare column of page 0: a shallow row's unused passes may run past its own pages.
        self.pages_RP = page_table([row.pages for row in rows], state.carry_SD.device, spare=1)
        positions = torch.tensor([start + i for i in range(count) for start in self.starts])
        positions = positions.to(state.carry_SD.device)
        self.angles = angles(positions, model.rotary, model.ops.activation_dtype)

    def context(self, index: int) -> Context:
        """Pass `index` (from 0) pairs draft `index` with the hidden state at position start + index."""
        count = len(self.starts)
        starts = tuple(start + index for start in self.starts)
        attention = self.ops.plan_attention(Rows.of_tokens(starts), self.pages_RP, self.page_size)
        return Context(self.angles.part(index * count, (index + 1) * count), attention)


def _spread(plan: Plan, tokens_DK: Tensor, q_steps: list[Tensor | None]) -> Draft:
    """From drafting rows to all rows of the plan."""
    at = torch.tensor([i for i, row in enumerate(plan.rows) if row.num_drafts], device=tokens_DK.device)
    tokens_RK = tokens_DK.new_zeros(len(plan.rows), plan.num_drafts)
    tokens_RK[at] = tokens_DK
    if any(q is None for q in q_steps):
        return Draft(tokens_RK)
    q_DKV = torch.stack([q for q in q_steps if q is not None], dim=1)
    q_RKV = q_DKV.new_zeros(len(plan.rows), *q_DKV.shape[1:])
    q_RKV[at] = q_DKV
    return Draft(tokens_RK, q_RKV)
