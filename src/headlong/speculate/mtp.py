"""Drafts with the model's own MTP head.

The head must have read the pairs (target hidden, next token) of everything before a draft, prompts included; what it
says of the last settled pair is the carry. A draft of depth K is the carry's token and K − 1 further passes over the
head's own output. Rows that draft, and prompts, are read in the step that fed them, so no prompt is computed twice.
The pairs of a row that the engine lets pause wait until it drafts again or is settled. Rows whose request never
drafts are not read at all.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from headlong.layers.context import Context
from headlong.models.decoder import DecoderModel
from headlong.models.mtp import MtpHead
from headlong.ops.rope.reference import angles
from headlong.sampling.entries import Entries, Entry
from headlong.sampling.sampler import Sampler
from headlong.speculate.priming import WHOLE, PairReader, Pairs
from headlong.state.pages import page_table
from headlong.state.state import RowState, State
from headlong.types import Batch, Draft, Plan, RowPlan, Rows, Verdict

MAX_WAITING = 64
"""Pairs that wait for each row; then they are read. Bounds the memory, and reading more at once saves nothing."""


@dataclass
class _Waiting:
    """The pairs a row owes the head, from position `start` on; their hidden states lie in the row's slot."""

    held: RowState
    """Whose they are. A row that was put back and came again holds another."""
    start: int
    tokens: list[int]


class MtpProposer:
    """One head over the state it shares with its target."""

    def __init__(self, model: DecoderModel, head: MtpHead, state: State, sampler: Sampler) -> None:
        self.model = model
        self.head = head
        self.state = state
        self.sampler = sampler
        self.max_drafts = state.max_drafts
        self.reader = PairReader(model, head, state)
        self._waiting: dict[str, _Waiting] = {}
        self._hidden_SWD: Tensor | None = None

    def propose(self, plan: Plan) -> Draft | None:
        numbers = sorted(
            (number for number, row in enumerate(plan.rows) if row.num_drafts),
            key=lambda number: -plan.rows[number].num_drafts,
        )
        if not numbers:
            return None
        # Deepest first: the rows that are still drafting are the first ones at any depth.
        rows = [plan.rows[number] for number in numbers]
        self.settle(row.request.id for row in rows)
        device = self.state.carry_SD.device
        hidden = self.state.carry_SD[torch.tensor([row.slot for row in rows], device=device)]
        tokens_DK = torch.zeros(len(rows), plan.num_drafts, dtype=torch.long, device=device)
        q_steps: list[Tensor | None] = []
        passes = _Passes(self.model, self.state, rows)
        for depth in range(plan.num_drafts):
            count = sum(row.num_drafts > depth for row in rows)
            if depth:
                embedding = self.model.embed(tokens_DK[:count, depth - 1])
                context = passes.context(depth - 1)
                hidden = self.head.forward(embedding, hidden[:count], context, self.state.layers)
            entries = [
                Entry(row.slot, row.start + 1 + depth, depth, row.num_generated + depth)
                for row in rows[:count]
            ]
            wanted = Entries(entries, self.sampler.table, tokens_DK[:count])
            tokens_DK[:count, depth], q = self.sampler.propose(self.model.logits(hidden), wanted)
            q_steps.append(q)
        return _spread(plan, numbers, tokens_DK, q_steps)

    def observe(
        self, plan: Plan, batch: Batch, context: Context, hidden_ND: Tensor, verdict: Verdict
    ) -> None:
        self._forget_the_gone()
        now, later, flat = [], [], 0
        for number, row in enumerate(plan.rows):
            if row.request.draft_tokens:
                pausing = row.request.adaptive and not row.num_drafts and not row.known_tokens
                (later if pausing else now).append((number, flat))
            flat += row.query_len
        if later:
            self._wait(later, plan, hidden_ND, verdict)
        if not now:
            return
        self.settle(plan.rows[number].request.id for number, _ in now)
        unprimed = any(self._unprimed(plan.rows[number]) for number, _ in now)
        if later or unprimed or len(hidden_ND) > WHOLE:
            self.reader.read([self._pairs(plan, number, flat, hidden_ND, verdict) for number, flat in now])
        else:
            self._read_all(plan, batch, context, hidden_ND, verdict)

    @torch.inference_mode()
    def settle(self, row_ids: Iterable[str]) -> None:
        """Reads what waits for these rows; afterwards the head knows all they have settled. A row whose pages others
        are to use must be settled before it goes."""
        pairs = []
        for row_id in row_ids:
            waiting = self._waiting.pop(row_id, None)
            if waiting is not None and self.state.rows.get(row_id) is waiting.held:
                assert self._hidden_SWD is not None
                hidden_ND = self._hidden_SWD[waiting.held.slot, : len(waiting.tokens)]
                pairs.append(Pairs(waiting.held, waiting.start, hidden_ND, waiting.tokens))
        if pairs:
            self.reader.read(pairs)

    def num_waiting(self, row_id: str) -> int:
        """Pairs that the head has yet to read for a row."""
        waiting = self._waiting.get(row_id)
        return 0 if waiting is None else len(waiting.tokens)

    def _read_all(
        self, plan: Plan, batch: Batch, context: Context, hidden_ND: Tensor, verdict: Verdict
    ) -> None:
        """A small step that left nobody out: one pass over the very tokens and places of the target's."""
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

    def _wait(self, rows: list[tuple[int, int]], plan: Plan, hidden_ND: Tensor, verdict: Verdict) -> None:
        """Copies these rows' hidden states, one each, to where they wait."""
        slots, places, full = [], [], []
        for number, _ in rows:
            row = plan.rows[number]
            held = self.state.rows[row.request.id]
            waiting = self._waiting.setdefault(row.request.id, _Waiting(held, row.start, []))
            slots.append(row.slot)
            places.append(len(waiting.tokens))
            waiting.tokens.append(verdict.tokens[number][0])
            if len(waiting.tokens) == MAX_WAITING:
                full.append(row.request.id)
        device = hidden_ND.device
        if self._hidden_SWD is None:
            num_slots, width = self.state.carry_SD.shape
            self._hidden_SWD = hidden_ND.new_empty(num_slots, MAX_WAITING, width)
        at = (torch.tensor(slots, device=device), torch.tensor(places, device=device))
        self._hidden_SWD[at] = hidden_ND[torch.tensor([flat for _, flat in rows], device=device)]
        if full:
            self.settle(full)

    def _pairs(self, plan: Plan, number: int, flat: int, hidden_ND: Tensor, verdict: Verdict) -> Pairs:
        """A row's pairs of this step that stand, after those of the past that waited for its first token."""
        row = plan.rows[number]
        held = self.state.rows[row.request.id]
        count = row.num_certain + verdict.accepted[number]
        # Of a chunk the host knows what follows each token, but for the last where that is sampled.
        tokens = [*row.known_tokens[1 : row.query_len + (not row.samples)], *verdict.tokens[number]]
        assert len(tokens) == count
        start, hidden = row.start, hidden_ND[flat : flat + count]
        if unprimed := self._unprimed(row):
            ((start, first_D),) = unprimed
            assert start == row.start - 1 and row.known_tokens, "the pair just before what is fed"
            hidden = torch.cat([first_D[None], hidden])
            tokens = [row.known_tokens[0], *tokens]
            held.unprimed = []
        return Pairs(held, start, hidden, tokens)

    def _unprimed(self, row: RowPlan) -> list[tuple[int, Tensor]]:
        return self.state.rows[row.request.id].unprimed

    def _forget_the_gone(self) -> None:
        gone = [
            row_id
            for row_id, waiting in self._waiting.items()
            if self.state.rows.get(row_id) is not waiting.held
        ]
        for row_id in gone:
            del self._waiting[row_id]


class _Passes:
    """The contexts of the head's passes: one token for each row that still drafts, a position further each time."""

    def __init__(self, model: DecoderModel, state: State, rows: list[RowPlan]) -> None:
        self.ops = model.ops
        self.page_size = state.page_size
        self.starts = [
            tuple(row.start + index for row in rows if row.num_drafts > index + 1)
            for index in range(rows[0].num_drafts - 1)
        ]
        if self.starts:
            device = state.carry_SD.device
            self.pages_RP = page_table([row.pages for row in rows], device)
            positions = torch.tensor([start for starts in self.starts for start in starts], device=device)
            self.angles = angles(positions, model.rotary, model.ops.activation_dtype)

    def context(self, index: int) -> Context:
        """Pass `index` (from 0) pairs draft `index` with the hidden state at position start + index."""
        starts = self.starts[index]
        first = sum(len(earlier) for earlier in self.starts[:index])
        pages_RP = self.pages_RP[: len(starts)]
        attention = self.ops.plan_attention(Rows.of_tokens(starts), pages_RP, self.page_size)
        return Context(self.angles.part(first, first + len(starts)), attention)


def _spread(plan: Plan, numbers: list[int], tokens_DK: Tensor, q_steps: list[Tensor | None]) -> Draft:
    """From drafting rows, deepest first, to all rows of the plan."""
    at = torch.tensor(numbers, device=tokens_DK.device)
    tokens_RK = tokens_DK.new_zeros(len(plan.rows), plan.num_drafts)
    tokens_RK[at] = tokens_DK
    first = next((q for q in q_steps if q is not None), None)
    if first is None:
        return Draft(tokens_RK)
    q_RKV = first.new_zeros(len(plan.rows), plan.num_drafts, first.shape[1])
    for depth, q in enumerate(q_steps):
        if q is not None:
            q_RKV[at[: len(q)], depth] = q
    return Draft(tokens_RK, q_RKV)
