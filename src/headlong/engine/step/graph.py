"""A step of decoding rows as one launch: drafts, the target's pass, the verdict, its commit and the head's next carry.

Nothing is read back on the way, so on a CUDA device all of it is one graph, and what comes back is one small tensor.
The next step may be launched before that is read: where its rows are, it finds on the device. But not where rows want
log-probabilities, which are reckoned from the step's logits, nor where a grammar holds them: these take three launches.
Takes rows that want the best tokens or are sampled, all alike where filters are torch's operations, with penalties,
biases and minimum lengths or without; for others the engine goes by parts, with the same tokens.
"""

import time
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from headlong.engine.step.device import MAX_TOKENS, DeviceStep, Shape
from headlong.engine.step.grammar import ConstrainedStep
from headlong.engine.step.layout import EvenLayout
from headlong.engine.step.readback import Readback
from headlong.models.decoder import DecoderModel
from headlong.ops.cuda_graphs import CudaGraphs
from headlong.ops.triton_step import MARKS, round_up_positions
from headlong.sampling.entries import Entries, Entry
from headlong.sampling.sampler import Sampler
from headlong.speculate.mtp import MtpProposer
from headlong.state.row_table import MOST_STOPS
from headlong.state.state import RowState, State
from headlong.types import Plan, TokenLogprobs, Verdict

Logprobs = tuple[tuple[TokenLogprobs, ...], ...]
"""By row and token."""
PADDED_TOKENS = 64
"""Up to which rows may be padded: so many tokens cost a pass about as much as one."""


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
    logits_NV: Tensor | None
    """Where log-probabilities are asked for; until the next step."""
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
        self.state, self.sampler, self.drafter = state, sampler, drafter
        self._device = model.ops.device
        self.device_step = DeviceStep(model, state, sampler, drafter, max_len)
        self._constrained = ConstrainedStep(self.device_step, sampler.table.constraints, self._device)
        self._graphs = CudaGraphs(self._device)
        self._readings = Readback()
        self._layouts: dict[tuple[int, int], EvenLayout] = {}

    def takes(self, plan: Plan) -> bool:
        """Whether the step can be taken so."""
        drafts, num_tokens = plan.num_drafts, len(plan.rows) * (1 + plan.num_drafts)
        if (drafts and self.drafter is None) or num_tokens > MAX_TOKENS:
            return False
        if num_tokens > PADDED_TOKENS and any(row.num_drafts < drafts for row in plan.rows):
            return False
        for row in plan.rows:
            if not row.samples or row.known_tokens:
                return False
        return self.sampler.alike(row.slot for row in plan.rows) is not None

    def may_follow(self, launch: Launch, plan: Plan) -> bool:
        """Whether this step can be launched before the other is read: the head must lack nothing that only then is
        known, and the device know by itself which rows have ended."""
        if any(len(row.request.stop_ids) > MOST_STOPS for row in plan.rows) or not self.takes(plan):
            return False
        if any(row.request.params.asks_host for row in plan.rows):
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
        self.device_step.row_table.update(zip(held, [row.request.stop_ids for row in rows], strict=True))
        asked = self.sampler.alike(row.slot for row in rows)
        assert asked is not None, "it was asked whether it takes such rows"
        if asked.penalised and not goes_on:  # the step under way counts by itself
            self.sampler.table.tally.update(row.slot for row in rows)
        longest = round_up_positions(max(row.start for row in rows) + 1 + drafts)
        tells = any(row.request.params.logprobs is not None for row in rows)
        shape = Shape(longest, reads, asked, tells)
        given_R4 = layout.given(rows, go_on=goes_on)
        if asked.constrained:
            found_X, hidden_ND = self._constrained(layout, shape, given_R4, rows)
            is_usual = self._constrained.is_usual
        else:
            found_X, hidden_ND = self._graphs(
                (drafts, shape), lambda at: self.device_step.all(layout, shape, at[0]), [given_R4]
            )
            is_usual = self._graphs.is_usual
        found_X, ready = self._readings.bring(found_X)
        # What holds it on the device is written again by the next step.
        kept_ND = hidden_ND.clone() if self.state.head or (drafter is not None and not reads) else None
        logits_NV = self.device_step.kept(len(rows) * (1 + drafts)) if tells else None
        return Launch(plan, held, reads, kept_ND, logits_NV, found_X, ready, late, is_usual, goes_on)

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
        verdict = _verdict(launch.plan, numbers, found, self._logprobs(launch, numbers, found))
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

    def _logprobs(self, launch: Launch, numbers: list[int], found: list[int]) -> Logprobs:
        """Of the tokens that stand, for each of these rows that asked."""
        rows, each, told = launch.plan.rows, 1 + launch.plan.num_drafts, {}
        wanted = [n for n in numbers if rows[n].request.params.logprobs is not None]
        if wanted:
            assert launch.logits_NV is not None
            places = [n * each + place for n in wanted for place in range(each)]
            tokens_L = torch.tensor([found[place] for place in places], device=self._device)
            logits_LV = launch.logits_NV[torch.tensor(places, device=self._device)]
            entries = [Entry(rows[n].slot, 0, 0, each) for n in wanted]
            by_entry = self.sampler.logprobs(logits_LV, tokens_L, Entries(entries, self.sampler.table, None))
            told = {place: by_entry[entry] for entry, place in enumerate(places)}
        size = len(rows) * each
        return tuple(
            tuple(told[n * each + place] for place in range(1 + found[2 * size + n])) if n in wanted else ()
            for n in numbers
        )

    def _layout(self, num_rows: int, num_drafts: int) -> EvenLayout:
        key = num_rows, num_drafts
        if key not in self._layouts:
            self._layouts[key] = EvenLayout(num_rows, num_drafts, self._device)
        return self._layouts[key]

    def _keep(self, launch: Launch, plan: Plan, numbers: list[int], verdict: Verdict) -> None:
        hidden_ND, each = launch.hidden_ND, 1 + launch.plan.num_drafts
        if hidden_ND is not None and hidden_ND.shape[0] > plan.num_tokens:
            own = [
                n * each + j for n, row in zip(numbers, plan.rows, strict=True) for j in range(row.query_len)
            ]
            hidden_ND = hidden_ND[torch.tensor(own, device=self._device)]
        self.state.commit(plan, verdict.accepted, hidden_ND=hidden_ND)
        if self.drafter is not None and not launch.reads and hidden_ND is not None:
            self.drafter.put_off(plan, hidden_ND, verdict)


def _verdict(plan: Plan, numbers: list[int], found: list[int], logprobs: Logprobs) -> Verdict:
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
        logprobs=logprobs,
        poisoned=tuple(poisoned),
    )
