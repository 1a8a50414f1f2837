"""A step of decoding rows as one launch: drafts, the target's pass, the verdict, its commit and the head's next carry.

Nothing is read back on the way, so on a CUDA device all of it is one graph, and what comes back is one small tensor.
The next step may be launched before that is read: where its rows are, it finds on the device. Every row feeds as many
tokens as the one that drafts most; what a row has beyond its own depth is padding, computed and never accepted. Takes
rows that want the best tokens or are sampled, all alike where filters are torch's operations, with penalties and biases
or without; for others the engine goes by parts, with the same tokens.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from headlong.engine.even_layout import EvenLayout, Pass
from headlong.layers.context import Context
from headlong.models.decoder import DecoderModel
from headlong.ops.graphs import Graphs
from headlong.ops.rope.reference import LARGEST_TABLE, Angles, angles
from headlong.ops.triton_step import MARKS, TritonStep, round_up_positions
from headlong.sampling.processors import Alike
from headlong.sampling.sampler import Sampler
from headlong.speculate.mtp import MtpProposer
from headlong.state.mirror import MOST_STOPS, Mirror
from headlong.state.state import RowState, State
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
    asked: Alike
    """How tokens are chosen."""


class Outcome(NamedTuple):
    verdict: Verdict
    draft_seconds: float
    """Of the step's time, what drafting and priming took."""
    is_usual: bool = True
    """False for a step that was compiled or recorded on the way: its time says nothing of others."""
    seconds: float = 0.0
    """What it took on the device, where that is known."""


@dataclass(frozen=True)
class Launch:
    """A step under way."""

    plan: Plan
    """Of one that was launched before the one before it was read, starts are the furthest they can be."""
    held: tuple[RowState, ...]
    """Who the rows were."""
    reads: bool
    hidden_ND: Tensor | None
    """Where somebody will want it."""
    found_X: Tensor
    """On the host, once it is `ready`."""
    ready: torch.cuda.Event | None
    late: float
    """Seconds it took until the head had read what waited for it."""
    is_usual: bool
    goes_on: bool
    """Whether it was launched before the one before it was read."""


class WholeStep:
    """One model, with the head's drafts or none, over one state."""

    def __init__(
        self, model: DecoderModel, state: State, sampler: Sampler, drafter: MtpProposer | None, max_len: int
    ) -> None:
        self.model, self.state, self.sampler, self.drafter = model, state, sampler, drafter
        self._device = model.ops.device
        from headlong.ops import triton_turn  # Triton is not everywhere
        from headlong.ops.penalise.triton import count

        self._turn, self._count = triton_turn, count
        self._graphs = Graphs(self._device)
        self._readings = _Readings()
        self._layouts: dict[tuple[int, int], EvenLayout] = {}
        longest = round_up_positions(max_len + state.max_drafts)
        self._mirror = Mirror(state.slots.size, -(-longest // state.page_size), self._device)
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
            if not row.samples or row.known_tokens or row.request.params.asks_host:
                return False
        return self.sampler.alike(row.slot for row in plan.rows) is not None

    def may_follow(self, launch: Launch, plan: Plan) -> bool:
        """Whether this step can be launched before the other is read: the head must lack nothing that only then is
        known, and the device know by itself which rows have ended."""
        if any(len(row.request.stop_ids) > MOST_STOPS for row in plan.rows) or not self.takes(plan):
            return False
        return self.drafter is None or launch.reads or not self.drafter.reads(plan)

    def launch(self, plan: Plan, *, goes_on: bool = False) -> Launch:
        """Begins a step; one that `goes_on` begins where the step under way will have left its rows."""
        drafts, rows, drafter = plan.num_drafts, plan.rows, self.drafter
        began = time.perf_counter()
        reads = drafter is not None and drafter.catches_up(plan)
        late = time.perf_counter() - began
        layout = self._layout(len(rows), drafts)
        held = tuple(self.state.rows[row.request.id] for row in rows)
        self._mirror.update(zip(held, [row.request.stop_ids for row in rows], strict=True))
        asked = self.sampler.alike(row.slot for row in rows)
        assert asked is not None, "it was asked whether it takes such rows"
        if asked.penalised and not goes_on:  # the step under way counts by itself
            self.sampler.table.tally.update(row.slot for row in rows)
        longest = round_up_positions(max(row.start for row in rows) + 1 + drafts)
        shape = _Shape(longest, reads, asked)
        given_R4 = layout.given(rows, go_on=goes_on)
        found_X, hidden_ND = self._graphs((drafts, shape), partial(self._run, layout, shape), [given_R4])
        is_usual = self._graphs.is_usual
        found_X, ready = self._readings.bring(found_X)
        # What holds it on the device is written again by the next step.
        kept_ND = hidden_ND.clone() if self.state.head or (drafter is not None and not reads) else None
        return Launch(plan, held, reads, kept_ND, found_X, ready, late, is_usual, goes_on)

    def is_awaited(self, launch: Launch) -> bool:
        """Whether any of its rows is still there."""
        return bool(self._numbers(launch))

    def land(self, launch: Launch, *, followed: bool) -> tuple[Plan, Outcome]:
        """Waits for a step and settles it, for those of its rows that are still there. `followed`: whether the next one
        is under way already."""
        if launch.ready is not None:
            launch.ready.synchronize()
        found, numbers = launch.found_X.tolist(), self._numbers(launch)
        for own in launch.held:
            own.ahead = followed
        rows = [launch.plan.rows[n] for n in numbers]
        if launch.goes_on:
            held = [launch.held[n] for n in numbers]
            rows = [
                replace(row, start=own.length, num_replay=own.num_replay)
                for row, own in zip(rows, held, strict=True)
            ]
        plan = Plan(tuple(rows), max(row.num_drafts for row in rows))
        verdict = _verdict(launch.plan, numbers, found)
        self._keep(launch, plan, numbers, verdict)
        for row, tokens in zip(plan.rows, verdict.tokens, strict=True):
            if row.request.params.penalised:
                self.sampler.table.tally.advance(row.slot, len(tokens))
        begun, drafted, verified, read = found[-MARKS:]
        drafting = drafted - begun + read - verified if launch.reads else 0
        seconds = (read if launch.reads else verified) - begun
        return plan, Outcome(verdict, launch.late + drafting / 1e9, launch.is_usual, seconds / 1e9)

    def _numbers(self, launch: Launch) -> list[int]:
        rows = self.state.rows
        return [
            number
            for number, (row, held) in enumerate(zip(launch.plan.rows, launch.held, strict=True))
            if rows.get(row.request.id) is held
        ]

    def _run(self, layout: EvenLayout, shape: _Shape, given: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """What comes back (tokens, whether they are numbers, how many drafts stand, drafts, moments), and hidden
        states."""
        (given_R4,), turn, asked = given, self._turn, shape.asked
        model, state, mirror, drafts = self.model, self.state, self._mirror, layout.num_drafts
        num_rows, num_tokens = layout.num_rows, layout.num_rows * (1 + drafts)
        size = 2 * num_tokens + num_rows * (1 + drafts) + MARKS
        found_X = torch.empty(size, dtype=torch.long, device=self._device)
        times = found_X[-MARKS:]
        slots_R, pages_RP = turn.begin(
            given_R4, mirror.place_S2, mirror.pages_SP, layout.table_PR6, layout.position_X,
            -(-shape.longest // state.page_size), drafts, times,
        )  # fmt: skip
        rotation, passes = self._rotation(layout.position_X, shape.longest), layout.passes()
        target, *ahead = [self._context(part, rotation, pages_RP, shape.longest) for part in passes]
        after_N = None if asked.kind is None else passes[0].position_N.long() + 1
        drafts_RK = slots_R.new_empty(num_rows, 0)
        if drafts:
            drafts_RK = self._draft(slots_R, ahead, after_N, asked)
        tokens_N = turn.feed(slots_R, state.last_token_S, drafts_RK, times)
        hidden_ND = model.forward(tokens_N, target, state.layers)
        logits_NV = model.logits(hidden_ND)
        chosen_N = self.sampler.choose_alike(logits_NV, slots_R, after_N, drafts_RK, asked)
        chosen_N = self._chosen(chosen_N, drafts_RK)
        settled_R = turn.settle(
            given_R4, layout.position_X, slots_R, chosen_N, drafts_RK, logits_NV,
            mirror.stops_SM, state.last_token_S, mirror.place_S2, found_X, times,
        )  # fmt: skip
        if asked.penalised:
            self._count(settled_R, slots_R, chosen_N, self.sampler.table.tally.counts_SV)
        if shape.reads:
            # Past the accepted drafts this pairs with tokens that will not stand; those places are rewritten before
            # anything reads them.
            assert self.drafter is not None
            alone = Context(target.angles, target.attention)
            out_ND = self.drafter.head.forward(model.embed(chosen_N), hidden_ND, alone, state.layers)
            turn.carry(out_ND, settled_R, slots_R, state.carry_SD, times)
        return found_X, hidden_ND

    def _chosen(self, chosen_N: Tensor, drafts_RK: Tensor) -> Tensor:  # noqa: ARG002
        """The target's tokens; benchmarks change them, to have drafts stand as they wish."""
        return chosen_N

    def _layout(self, num_rows: int, num_drafts: int) -> EvenLayout:
        key = num_rows, num_drafts
        if key not in self._layouts:
            self._layouts[key] = EvenLayout(num_rows, num_drafts, self._device)
        return self._layouts[key]

    def _draft(self, slots_R: Tensor, ahead: list[Context], after_N: Tensor | None, asked: Alike) -> Tensor:
        """[R, K] from the carry on; rows that are sampled share the target's noise at each position, and those that are
        penalised or biased are so here."""
        assert self.drafter is not None
        head, vocabulary = self.drafter.head, self.drafter.vocabulary
        hidden_RD, drafts = self.state.carry_SD[slots_R], []
        before_RK = slots_R.new_empty(len(slots_R), 0)
        for place in range(1 + len(ahead)):
            if place:
                embedding_RD = self.model.embed(drafts[-1])
                hidden_RD = head.forward(embedding_RD, hidden_RD, ahead[place - 1], self.state.layers)
            if asked.kind is None and not asked.changes:
                drafts.append(vocabulary.best(hidden_RD))
                continue
            if place and asked.changes:
                before_RK = torch.stack(drafts, dim=1)
            whole_RV = vocabulary.whole(vocabulary.logits(hidden_RD))
            after_R = None if after_N is None else after_N.view(len(slots_R), -1)[:, place]
            drafts.append(self.sampler.choose_alike(whole_RV, slots_R, after_R, before_RK, asked))
        return torch.stack(drafts, dim=1)

    def _rotation(self, position_X: Tensor, longest: int) -> Angles:
        rotary, dtype = self.model.rotary, self.model.ops.activation_dtype
        if longest > LARGEST_TABLE:
            return angles(position_X, rotary, dtype, longest - 1)
        table = rotary.tables[dtype]
        cos, sin = self._turn.look_up(position_X, table.cos, table.sin)
        return replace(table, cos=cos, sin=sin)

    def _context(self, part: Pass, rotation: Angles, pages_RP: Tensor, longest: int) -> Context:
        each = len(part.row_N) // len(pages_RP)
        step = TritonStep(
            part.table_R6, part.row_N, part.position_N, pages_RP, self.state.page_size, each, longest
        )
        return Context(rotation.picked(part.tokens), step, step)

    def _keep(self, launch: Launch, plan: Plan, numbers: list[int], verdict: Verdict) -> None:
        hidden_ND, each = launch.hidden_ND, 1 + launch.plan.num_drafts
        if hidden_ND is not None and hidden_ND.shape[0] > plan.num_tokens:
            own = [
                n * each + j for n, row in zip(numbers, plan.rows, strict=True) for j in range(row.query_len)
            ]
            hidden_ND = hidden_ND[torch.tensor(own, device=self._device)]
        self.state.keep(plan, verdict.accepted, hidden_ND)
        if self.drafter is not None and not launch.reads and hidden_ND is not None:
            self.drafter.put_off(plan, hidden_ND, verdict)


class _Readings:
    """What steps found, on its way to the host. Two may be under way at once."""

    def __init__(self) -> None:
        self._places: dict[int, list[tuple[Tensor, torch.cuda.Event]]] = {}
        self._turn = 0

    def bring(self, found_X: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """The same on the host, and when it is there; the next but one is brought to the same place."""
        if found_X.device.type != "cuda":
            return found_X, None
        places = self._places.get(len(found_X))
        if places is None:
            places = self._places[len(found_X)] = [
                (torch.empty(found_X.shape, dtype=found_X.dtype, pin_memory=True), torch.cuda.Event())
                for _ in range(2)
            ]
        self._turn = 1 - self._turn
        here, ready = places[self._turn]
        here.copy_(found_X, non_blocking=True)
        ready.record()
        return here, ready


def _verdict(plan: Plan, numbers: list[int], found: list[int]) -> Verdict:
    """Of these rows of the plan."""
    num_rows, drafts, each = len(plan.rows), plan.num_drafts, 1 + plan.num_drafts
    size = num_rows * each
    accepted = tuple(found[2 * size + n] for n in numbers)
    emitted, rejected, poisoned = [], [], []
    for place, (n, count) in enumerate(zip(numbers, accepted, strict=True)):
        row, first = plan.rows[n], n * each
        drafted = 2 * size + num_rows + n * drafts
        emitted.append(tuple(found[first : first + count + 1]))
        rejected.append(tuple(found[drafted + count : drafted + row.num_drafts]))
        if not all(found[size + first : size + first + count + 1]):
            poisoned.append(place)
    return Verdict(
        tokens_L=None,
        accepted=accepted,
        tokens=tuple(emitted),
        rejected=tuple(rejected),
        logprobs=((),) * len(numbers),
        poisoned=tuple(poisoned),
    )
