"""Drafts with the model's own MTP head.

The head must have read the pairs (target hidden, next token) of everything before a draft, prompts included; what it
says of the last committed pair is the carry. A draft of depth K is the carry's token and K − 1 further passes over the
head's own output. Rows that draft, and prompts, are read in the step that fed them, so no prompt is computed twice.
The pairs of a row that the engine lets pause wait until it drafts again or is flushed. Rows whose request never
drafts are not read at all.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headlong.layers.context import Context
from headlong.models.embeddings import Embeddings
from headlong.models.mtp import MtpHead
from headlong.ops.cuda_graphs import CudaGraphs
from headlong.ops.rope.reference import angles
from headlong.ops.upload import upload
from headlong.sampling.sampler import Sampler
from headlong.speculate.choosing import HostChoice
from headlong.speculate.deferred_pairs import DeferredPairs
from headlong.speculate.draft_loop import make_drafts, spread
from headlong.speculate.live_rows import LiveRows
from headlong.speculate.priming import WHOLE, WHOLE_ON_GPU, PairReader, Pairs
from headlong.speculate.vocabulary import DraftVocabulary
from headlong.state.pages import page_table
from headlong.state.state import State
from headlong.types import Batch, Draft, Plan, RowPlan, Rows, Verdict


class MtpProposer:
    """One head over the state it shares with its target."""

    def __init__(
        self,
        model: Embeddings,
        head: MtpHead,
        state: State,
        sampler: Sampler,
        draft_tokens_T: Tensor | None = None,
    ) -> None:
        """Drafts among the tokens `draft_tokens_T`, ascending; without them among all."""
        self.model = model
        self.head = head
        self.state = state
        self.sampler = sampler
        self.max_drafts = state.max_drafts
        self.vocabulary = DraftVocabulary(model, draft_tokens_T)
        self.reader = PairReader(model, head, state)
        self.waiting = DeferredPairs(state)
        self._graphs = CudaGraphs(model.ops.device) if model.capturable else None
        self._whole = WHOLE if state.carry_SD.device.type == "cpu" else WHOLE_ON_GPU
        self._resumed: set[str] = set()
        """Rows of this step that had paused."""

    def propose(self, plan: Plan) -> Draft | None:
        self._resumed.clear()
        numbers = [number for number, row in enumerate(plan.rows) if row.num_drafts]
        if not numbers:
            return None
        rows = [plan.rows[number] for number in numbers]
        self._resumed = {row.request.id for row in rows if self.waiting.holds(row.request.id)}
        self._resume(self._resumed)
        live = LiveRows(plan, rows)
        made = make_drafts(_Passes(self, rows), HostChoice(self.sampler, rows, self.vocabulary), live)
        return spread(plan, numbers, made, live.counts)

    @property
    def device_drafter(self) -> "MtpProposer":
        return self

    def forward(self, tokens_N: Tensor, hidden_ND: Tensor, context: Context, depth: int = 0) -> Tensor:
        """The head's output for each token, given the hidden state before it, at a depth of drafts."""
        return self.reader.forward(tokens_N, hidden_ND, context, depth)

    def finish(self, out_ND: Tensor, depth: int = 0) -> Tensor:
        """What the lm_head takes of the head's output at a depth of drafts."""
        return self.head.finish(out_ND, depth)

    def draft_pass(
        self, tokens_L: Tensor, hidden_LD: Tensor, context: Context, depth: int
    ) -> tuple[Tensor, Tensor]:
        """The head's output for a token of each row, at a depth of drafts, and its logits."""
        depth %= self.head.num_layers

        def run(tokens_L: Tensor, hidden_LD: Tensor, context: Context) -> tuple[Tensor, ...]:
            out_LD = self.forward(tokens_L, hidden_LD, context, depth)
            return out_LD, self.vocabulary.logits(self.head.finish(out_LD, depth))

        out_LD, logits_LT = self._replay(f"draft {depth}", run, tokens_L, hidden_LD, context)
        return out_LD, logits_LT

    def _read(self, next_N: Tensor, hidden_ND: Tensor, context: Context) -> Tensor:
        """The head's output for pairs."""

        def run(next_N: Tensor, hidden_ND: Tensor, context: Context) -> tuple[Tensor, ...]:
            return (self.forward(next_N, hidden_ND, context),)

        return self._replay("read", run, next_N, hidden_ND, context)[0]

    def _replay(
        self,
        what: str,
        run: Callable[[Tensor, Tensor, Context], tuple[Tensor, ...]],
        tokens: Tensor,
        hidden: Tensor,
        context: Context,
    ) -> Sequence[Tensor]:
        """Runs it as one CUDA graph where that can be."""
        if self._graphs is None:
            return run(tokens, hidden, context)
        given = (tokens, hidden, *context.tensors)
        return self._graphs((what, context.key), lambda at: run(at[0], at[1], context.over(at[2:])), given)

    def observe(
        self, plan: Plan, batch: Batch, context: Context, hidden_ND: Tensor, verdict: Verdict
    ) -> None:
        if self._goes_on(plan, hidden_ND, verdict):
            return
        now, later, flat = [], [], 0
        for number, row in enumerate(plan.rows):
            if row.request.draft_tokens:
                (later if self._pauses(row, verdict.accepted[number]) else now).append((number, flat))
            flat += row.query_len
        if later and (full := self.waiting.add(later, plan, hidden_ND, verdict)):
            self.flush_deferred(full)
        if not now:
            return
        self._catch_up(plan.rows[number] for number, _ in now)
        unprimed = any(self._unprimed(plan.rows[number]) for number, _ in now)
        if later or unprimed or len(hidden_ND) > self._whole:
            self.reader.read([self._pairs(plan, number, flat, hidden_ND, verdict) for number, flat in now])
        else:
            self._read_all(plan, batch, context, hidden_ND, verdict)

    def reads(self, plan: Plan) -> bool:
        """Whether the head reads what a step of decoding rows feeds at once, if that is one launch."""
        return plan.num_drafts > 0 or any(
            row.request.draft_tokens and not row.request.adaptive for row in plan.rows
        )

    def catches_up(self, plan: Plan) -> bool:
        """Whether the head reads in a step that is one launch; nothing is deferred then."""
        reads = self.reads(plan)
        if reads:
            self._resume({row.request.id for row in plan.rows if self.waiting.holds(row.request.id)})
        return reads

    def defer(self, plan: Plan, hidden_ND: Tensor, verdict: Verdict) -> None:
        """A step of one token a row that the head did not read: the pairs of rows that may draft wait."""
        if self._goes_on(plan, hidden_ND, verdict):
            return
        later = [(number, number) for number, row in enumerate(plan.rows) if row.request.draft_tokens]
        if later and (full := self.waiting.add(later, plan, hidden_ND, verdict)):
            self.flush_deferred(full)

    def _goes_on(self, plan: Plan, hidden_ND: Tensor, verdict: Verdict) -> bool:
        """Whether the step was as the one before, all of whose pairs wait: so do those of this one then."""
        full = None if plan.num_drafts else self.waiting.go_on(plan, hidden_ND, verdict)
        if full:
            self.flush_deferred(full)
        return full is not None

    @torch.inference_mode()
    def flush_deferred(self, row_ids: Iterable[str]) -> None:
        """Makes these rows' pages hold, or have deferred, all that those of rows that were read at every step do. A row
        whose pages others are to use must be flushed before it goes."""
        size = self.state.page_size
        pieces = [piece for own in self.waiting.unwritten(row_ids) for piece in own.on_pages(size)]
        if pieces and not self.state.deferred_kv.add(pieces):
            self.reader.write(pieces)

    def check_integrity(self) -> None:
        self.waiting.check()

    def _resume(self, row_ids: Collection[str]) -> None:
        """Reads all that waits for these rows, of which some does, and what their pages lack."""
        if row_ids:
            pages = self._pages(row_ids)
            self.reader.read(self.waiting.take(row_ids), self.state.deferred_kv.on(pages))
            self.state.deferred_kv.drop(pages)

    def _catch_up(self, rows: Iterable[RowPlan]) -> None:
        """Writes whatever these rows' pages lack before what they were just fed, for rows that had paused or begin on
        pages of others."""
        behind = [row.request.id for row in rows if row.known_tokens or self.waiting.holds(row.request.id)]
        pages = self._pages(behind)
        pieces = self.state.deferred_kv.on(pages)
        for own in self.waiting.take(behind):  # what the head says of them is not asked any more
            pieces += own.on_pages(self.state.page_size)
        if pieces:
            self.reader.write(pieces)
            self.state.deferred_kv.drop(pages)

    def _pages(self, row_ids: Iterable[str]) -> list[int]:
        """All pages that something may be deferred for; none where nothing is."""
        rows = [self.state.rows[row_id] for row_id in row_ids] if self.state.deferred_kv else []
        return [page for row in rows for page in row.pages]

    def _pauses(self, row: RowPlan, accepted: int) -> bool:
        """Whether the row's pair may wait. One that had paused and saw all its drafts fail will pause again."""
        if row.known_tokens or not row.request.adaptive:
            return False
        return not row.num_drafts or (not accepted and row.request.id in self._resumed)

    def _read_all(
        self, plan: Plan, batch: Batch, context: Context, hidden_ND: Tensor, verdict: Verdict
    ) -> None:
        """A small step that left nobody out: one pass over the very tokens and places of the target's."""
        next_N = batch.next_tokens_N
        if len(batch.logits_index_L):
            assert verdict.tokens_L is not None
            # Past the accepted drafts this pairs with tokens that will not stand; those places are rewritten
            # before anything reads them.
            next_N = next_N.index_copy(0, batch.logits_index_L, verdict.tokens_L)
        out_ND = self._read(next_N, hidden_ND, replace(context, delta_net=None))
        last, flat = [], 0
        for row, accepted in zip(plan.rows, verdict.accepted, strict=True):
            last.append(flat + row.num_certain - 1 + accepted)
            flat += row.query_len
        committed, slots_R = upload([last, batch.rows.slots], out_ND.device)
        self.state.carry_SD[slots_R] = out_ND[committed]

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
        return Pairs(held, start, hidden, torch.tensor(tokens, device=hidden.device))

    def _unprimed(self, row: RowPlan) -> list[tuple[int, Tensor]]:
        return self.state.rows[row.request.id].unprimed


class _Passes:
    """The head's passes: what it says of the carry, then one token for each row that still drafts, a position further
    each time."""

    def __init__(self, proposer: MtpProposer, rows: list[RowPlan]) -> None:
        self._proposer = proposer
        self._model, self._state = proposer.model, proposer.state
        device = self._state.carry_SD.device
        self._starts = [row.start for row in rows]
        self._hidden_LD = self._state.carry_SD[torch.tensor([row.slot for row in rows], device=device)]
        deepest = max(row.num_drafts for row in rows)
        if deepest > 1:
            self._pages_RP = page_table([row.pages for row in rows], device)
            positions = (
                torch.tensor([self._starts], device=device)
                + torch.arange(deepest - 1, device=device)[:, None]
            )
            last = max(self._starts) + deepest - 2
            dtype = self._model.ops.activation_dtype
            self._angles = angles(positions.flatten(), self._model.rotary, dtype, last)

    def first(self) -> Tensor:
        return self._proposer.vocabulary.logits(self._proposer.finish(self._hidden_LD))

    def after(self, drafts: Sequence[Tensor], live: list[int], stay: list[int] | None) -> Tensor:
        """Hidden states of the rows that go on."""
        if stay is not None:
            self._hidden_LD = self._hidden_LD[torch.tensor(stay, device=self._hidden_LD.device)]
        context = self._context(len(drafts) - 1, live)
        self._hidden_LD, logits_LT = self._proposer.draft_pass(
            drafts[-1], self._hidden_LD, context, len(drafts)
        )
        return logits_LT

    def _context(self, index: int, live: list[int]) -> Context:
        """Pass `index` (from 0) pairs draft `index` with the hidden state at position start + index."""
        first, count = index * len(self._starts), len(self._starts)
        at = (
            slice(len(live))
            if len(live) == live[-1] + 1
            else torch.tensor(live, device=self._pages_RP.device)
        )
        rotation = self._angles.part(first, first + count)
        if len(live) < count:
            rotation = rotation.picked(at)
        starts = Rows.of_tokens(tuple(self._starts[number] + index for number in live))
        ops, pages_LP = self._model.ops, self._pages_RP[at]
        return Context(rotation, ops.prepare_attention(starts, pages_LP, self._state.page_size))
