"""A step of decoding rows as one launch: drafts, the target's pass, the verdict, its commit and the head's next carry.

Nothing is read back on the way, so on a CUDA device all of it is one graph, and what comes back is one small tensor.
Every row feeds as many tokens as the one that drafts most; what a row has beyond its own depth is padding, computed and
never accepted. Takes rows that all want the best tokens, or are all sampled by the same filters; for others the engine
goes by parts, with the same tokens.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from headlong.engine.even_layout import EvenLayout, Pass
from headlong.layers.context import Context
from headlong.models.decoder import DecoderModel
from headlong.ops.graphs import Graphs
from headlong.ops.rope.reference import LARGEST_TABLE, Angles, angles
from headlong.ops.triton_step import TritonStep, round_up_positions
from headlong.sampling.processors import FilterKind
from headlong.sampling.sampler import Sampler
from headlong.speculate.mtp import MtpProposer
from headlong.speculate.verify import are_numbers
from headlong.state.page_mirror import PageMirror
from headlong.state.state import State
from headlong.types import Plan, Verdict

MAX_TOKENS = 256
"""Of a step that is one launch."""
PADDED_TOKENS = 64
"""Up to which rows may be padded: so many tokens cost a pass about as much as one."""


class _Shape(NamedTuple):
    """What a recorded step depends on besides its rows and drafts."""

    longest: int
    """Positions that are reckoned with."""
    reads: bool
    """Whether the head reads the step."""
    sampled: FilterKind | None
    """How tokens are sampled; None for the best."""


class Outcome(NamedTuple):
    verdict: Verdict
    draft_seconds: float
    """Of the step's time, what drafting and priming took."""
    is_usual: bool = True
    """False for a step that was compiled or recorded on the way: its time says nothing of others."""


class WholeStep:
    """One model, with the head's drafts or none, over one state."""

    def __init__(
        self, model: DecoderModel, state: State, sampler: Sampler, drafter: MtpProposer | None, max_len: int
    ) -> None:
        self.model, self.state, self.sampler, self.drafter = model, state, sampler, drafter
        self._device = model.ops.device
        self._graphs = Graphs(self._device)
        self._layouts: dict[tuple[int, int], EvenLayout] = {}
        longest = round_up_positions(max_len + state.max_drafts)
        pages = -(-longest // state.page_size)
        self._mirror = PageMirror(state.slots.size, pages, self._device)
        self._clock = _Clock(self._device)
        # A table that grew would leave recorded steps behind with the old one.
        nowhere = torch.zeros(1, dtype=torch.long, device=self._device)
        angles(nowhere, model.rotary, model.ops.activation_dtype, min(longest, LARGEST_TABLE) - 1)

    def takes(self, plan: Plan) -> bool:
        """Whether the step can be taken so."""
        drafts, num_tokens = plan.num_drafts, len(plan.rows) * (1 + plan.num_drafts)
        if (drafts and self.drafter is None) or num_tokens > MAX_TOKENS:
            return False
        if num_tokens > PADDED_TOKENS and any(row.num_drafts < drafts for row in plan.rows):
            return False
        for row in plan.rows:
            if not row.samples or row.known_tokens or row.request.params.logprobs is not None:
                return False
        slots = [row.slot for row in plan.rows]
        return self.sampler.is_plain(slots) or self.sampler.alike(slots) is not None

    def __call__(self, plan: Plan) -> Outcome:
        drafts, rows, drafter = plan.num_drafts, plan.rows, self.drafter
        began = time.perf_counter()
        reads = drafter is not None and drafter.catches_up(plan)
        late = time.perf_counter() - began
        layout = self._layout(len(rows), drafts)
        self._mirror.update([self.state.rows[row.request.id] for row in rows])
        shape = _Shape(
            longest=round_up_positions(max(row.start for row in rows) + 1 + drafts),
            reads=reads,
            sampled=self.sampler.alike(row.slot for row in rows),
        )
        found_X, hidden_ND = self._graphs(
            (drafts, shape), partial(self._run, layout, shape), [layout.fill(rows)]
        )
        hidden_ND = hidden_ND.clone()
        verdict = self._verdict(plan, found_X)
        self._keep(plan, verdict, hidden_ND, reads=reads)
        return Outcome(verdict, late + (self._clock.drafting() if reads else 0.0), self._graphs.is_usual)

    def _run(self, layout: EvenLayout, shape: _Shape, given: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """What comes back (tokens, whether they are numbers, how many drafts stand, drafts), and hidden states."""
        (flat_X,) = given
        model, state, each = self.model, self.state, 1 + layout.num_drafts
        slots_R = layout.slots(flat_X).long()
        pages_RP = self._mirror.of(slots_R, -(-shape.longest // state.page_size))
        passes = layout.passes(flat_X)
        target, *ahead = [self._context(part, pages_RP, shape.longest) for part in passes]
        after_N = passes[0].position_N.long() + 1
        self._clock.mark(0)
        drafts_RK = slots_R.new_empty(len(slots_R), 0)
        if layout.num_drafts:
            drafts_RK = self._draft(slots_R, ahead, after_N.view(-1, each), shape.sampled)
        self._clock.mark(1)
        tokens_RJ = torch.cat([state.last_token_S[slots_R][:, None], drafts_RK], dim=1)
        hidden_ND = model.forward(tokens_RJ.flatten(), target, state.layers)
        logits_NV = model.logits(hidden_ND)
        if shape.sampled is None:
            chosen_N = self.sampler.best(logits_NV)
        else:
            slots_N = slots_R.repeat_interleave(each)
            chosen_N = self.sampler.choose_alike(logits_NV, slots_N, after_N, shape.sampled)
        accepted_R = self._settle(chosen_N.view(-1, each), drafts_RK, layout.depths(flat_X), slots_R)
        self._clock.mark(2)
        if shape.reads:
            # Past the accepted drafts this pairs with tokens that will not stand; those places are rewritten before
            # anything reads them.
            assert self.drafter is not None
            alone = Context(target.angles, target.attention)
            out_ND = self.drafter.head.forward(model.embed(chosen_N), hidden_ND, alone, state.layers)
            last_R = accepted_R + torch.arange(0, len(out_ND), each, device=self._device)
            state.carry_SD[slots_R] = out_ND[last_R]
        self._clock.mark(3)
        found_X = torch.cat([chosen_N, are_numbers(logits_NV, chosen_N), accepted_R, drafts_RK.flatten()])
        return found_X, hidden_ND

    def _settle(self, chosen_RJ: Tensor, drafts_RK: Tensor, depths_R: Tensor, slots_R: Tensor) -> Tensor:
        """How many drafts of each row stand; the token after them is its last."""
        within_RK = torch.arange(drafts_RK.shape[1], device=self._device) < depths_R[:, None]
        stands_RK = (chosen_RJ[:, :-1] == drafts_RK) & within_RK
        accepted_R = stands_RK.long().cumprod(1).sum(1)
        self.state.last_token_S[slots_R] = chosen_RJ.gather(1, accepted_R[:, None])[:, 0]
        return accepted_R

    def _layout(self, num_rows: int, num_drafts: int) -> EvenLayout:
        key = num_rows, num_drafts
        if key not in self._layouts:
            self._layouts[key] = EvenLayout(num_rows, num_drafts)
        return self._layouts[key]

    def _draft(
        self, slots_R: Tensor, ahead: list[Context], after_RJ: Tensor, kind: FilterKind | None
    ) -> Tensor:
        """[R, K] from the carry on; rows that are sampled share the target's noise at each position."""
        assert self.drafter is not None
        head, vocabulary = self.drafter.head, self.drafter.vocabulary
        hidden_RD, drafts = self.state.carry_SD[slots_R], []
        for place in range(1 + len(ahead)):
            if place:
                embedding_RD = self.model.embed(drafts[-1])
                hidden_RD = head.forward(embedding_RD, hidden_RD, ahead[place - 1], self.state.layers)
            if kind is None:
                drafts.append(vocabulary.best(hidden_RD))
            else:
                whole_RV = vocabulary.whole(vocabulary.logits(hidden_RD))
                drafts.append(self.sampler.choose_alike(whole_RV, slots_R, after_RJ[:, place], kind))
        return torch.stack(drafts, dim=1)

    def _context(self, part: Pass, pages_RP: Tensor, longest: int) -> Context:
        rotary, dtype = self.model.rotary, self.model.ops.activation_dtype
        rotation: Angles = angles(part.position_N, rotary, dtype, longest - 1)
        each = len(part.row_N) // len(pages_RP)
        step = TritonStep(*part, pages_RP, self.state.page_size, most_tokens=each, longest=longest)
        return Context(rotation, step, step)

    def _verdict(self, plan: Plan, found_X: Tensor) -> Verdict:
        """The one thing that is read back."""
        num_rows, drafts, each = len(plan.rows), plan.num_drafts, 1 + plan.num_drafts
        read, size = found_X.tolist(), num_rows * each
        tokens, numbers = read[:size], read[size : 2 * size]
        accepted = tuple(read[2 * size : 2 * size + num_rows])
        drafted = read[2 * size + num_rows :]
        emitted = tuple(tuple(tokens[n * each : n * each + accepted[n] + 1]) for n in range(num_rows))
        rejected = tuple(
            tuple(drafted[n * drafts + count : n * drafts + row.num_drafts])
            for n, (row, count) in enumerate(zip(plan.rows, accepted, strict=True))
        )
        poisoned: tuple[int, ...] = ()
        if not all(numbers):
            spans = [numbers[n * each : n * each + len(emitted[n])] for n in range(num_rows)]
            poisoned = tuple(n for n, span in enumerate(spans) if not all(span))
        own = [n * each + j for n, row in enumerate(plan.rows) for j in range(row.num_logits)]
        return Verdict(
            tokens_L=torch.tensor([tokens[i] for i in own]),
            accepted_R=torch.tensor(accepted),
            accepted=accepted,
            tokens=emitted,
            rejected=rejected,
            logprobs=((),) * num_rows,
            poisoned=poisoned,
        )

    def _keep(self, plan: Plan, verdict: Verdict, hidden_ND: Tensor, *, reads: bool) -> None:
        each = 1 + plan.num_drafts
        if hidden_ND.shape[0] > plan.num_tokens:
            own = [n * each + j for n, row in enumerate(plan.rows) for j in range(row.query_len)]
            hidden_ND = hidden_ND[torch.tensor(own, device=self._device)]
        self.state.keep(plan, verdict.accepted, hidden_ND)
        if self.drafter is not None and not reads:
            self.drafter.put_off(plan, hidden_ND, verdict)


class _Clock:
    """When the parts of the last step began and ended: on the device, where the host does not see it."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._events = [_event() for _ in range(4)] if self._on_device else []
        self._times = [0.0] * 4

    def mark(self, place: int) -> None:
        if self._on_device:
            self._events[place].record()
        else:
            self._times[place] = time.perf_counter()

    def drafting(self) -> float:
        """Seconds that drafts and the head's reading took; the step must have ended."""
        if self._on_device:
            start, drafted, verified, end = self._events
            return (start.elapsed_time(drafted) + verified.elapsed_time(end)) / 1e3
        start, drafted, verified, end = self._times
        return drafted - start + end - verified


def _event() -> torch.cuda.Event:
    """One that may be part of a recorded step."""
    return torch.cuda.Event(enable_timing=True, external=True)
