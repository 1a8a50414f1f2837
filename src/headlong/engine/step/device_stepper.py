"""Steps of decoding rows that a device computes: what is told to it before, and what is made of its findings after.

The next step may be launched before those are read: where its rows are, it finds on the device. Takes rows that want
the best tokens or are sampled, all alike where filters are torch's operations, with penalties, biases and minimum
lengths or without; for others the host goes through the stages, with the same tokens.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headlong.engine.step.device import MAX_TOKENS, DeviceStages, EvenStep, Shape
from headlong.engine.step.layout import EvenLayout
from headlong.engine.step.readback import Readback
from headlong.engine.step.stepper import Landed
from headlong.ops.triton_step import NUM_TIMESTAMPS, round_up_positions
from headlong.sampling.entries import Entries, Entry
from headlong.sampling.processors import SamplingSignature
from headlong.speculate.verdict import Found, build_verdict, without
from headlong.state.state import RowState
from headlong.types import Plan, RowPlan, TokenLogprobs

PADDED_TOKENS = 64
"""The most tokens up to which rows may be padded: they cost a pass about as much as one."""


@dataclass(frozen=True)
class DeviceLaunch:
    """A step under way."""

    stepper: "DeviceStepper"
    plan: Plan
    """The step's plan. If it was launched before the one before it was read, starts are the furthest they can be."""
    held: tuple[RowState, ...]
    """The states of the rows when the step was launched."""
    reads: bool
    """Whether the head reads the step."""
    hidden_ND: Tensor | None
    """Hidden states, where somebody will want them."""
    logits_NV: Tensor | None
    """Logits, where log-probabilities are asked for; they stand until the next step."""
    found_X: Tensor
    """What is read back; on the host once it is `ready`."""
    ready: torch.cuda.Event | None
    late: float
    """Seconds it took until the head had read what was deferred."""
    is_usual: bool
    goes_on: bool
    """Whether it was launched before the one before it was read."""
    is_under_way: bool = True

    @property
    def gone(self) -> list[int]:
        """The rows that are not there any more, by number."""
        rows = self.stepper.stages.state.rows
        return [
            number
            for number, (row, held) in enumerate(zip(self.plan.rows, self.held, strict=True))
            if rows.get(row.request.id) is not held
        ]

    @property
    def is_awaited(self) -> bool:
        return len(self.gone) < len(self.plan.rows)

    def land(self, *, followed: bool = False) -> Landed:
        return self.stepper.land(self, followed=followed)


class DeviceStepper(ABC):
    """Decoding rows, padded to the depth of the one that drafts most; how the stages are launched is another's."""

    def __init__(self, stages: DeviceStages) -> None:
        self.stages = stages
        self._readback = Readback()
        self._layouts: dict[tuple[int, int], EvenLayout] = {}

    @property
    @abstractmethod
    def is_usual(self) -> bool:
        """Whether nothing of the last step was compiled or captured on the way."""
        ...

    @abstractmethod
    def suits(self, signature: SamplingSignature) -> bool:
        """Whether rows that ask for this can be run so."""
        ...

    @abstractmethod
    def run(self, step: EvenStep, rows: Sequence[RowPlan]) -> tuple[Tensor, Tensor]:
        """Launches the stages; gives what will be read back, and hidden states. What holds these is written again by
        the next step."""
        ...

    def takes(self, plan: Plan) -> bool:
        drafts, num_tokens = plan.num_drafts, len(plan.rows) * (1 + plan.num_drafts)
        if (drafts and self.stages.drafter is None) or num_tokens > MAX_TOKENS:
            return False
        if num_tokens > PADDED_TOKENS and any(row.num_drafts < drafts for row in plan.rows):
            return False
        for row in plan.rows:
            if not row.samples or row.known_tokens:
                return False
        signature = self.stages.sampler.signature(row.slot for row in plan.rows)
        return signature is not None and self.suits(signature)

    def launch(self, plan: Plan, *, goes_on: bool = False) -> DeviceLaunch:
        """Begins a step; one that `goes_on` begins where the step under way will have left its rows."""
        stages, drafts, rows = self.stages, plan.num_drafts, plan.rows
        drafter, table = stages.drafter, stages.sampler.table
        began = time.perf_counter()
        reads = drafter is not None and drafter.catches_up(plan)
        late = time.perf_counter() - began
        layout = self._layout(len(rows), drafts)
        held = tuple(stages.state.rows[row.request.id] for row in rows)
        stages.row_table.update(zip(held, [row.request.stop_ids for row in rows], strict=True))
        signature = stages.sampler.signature(row.slot for row in rows)
        assert signature is not None, "it was asked whether it takes such rows"
        if signature.penalised and not goes_on:  # the step under way counts by itself
            table.tally.update(row.slot for row in rows)
        longest = round_up_positions(max(row.start for row in rows) + 1 + drafts)
        tells = any(row.request.params.logprobs is not None for row in rows)
        step = EvenStep(layout, Shape(longest, reads, signature, tells), layout.given(rows, go_on=goes_on))
        found_X, hidden_ND = self.run(step, rows)
        found_X, ready = self._readback.bring(found_X)
        # What holds it on the device is written again by the next step.
        kept_ND = hidden_ND.clone() if stages.state.head or (drafter is not None and not reads) else None
        logits_NV = stages.kept(len(rows) * (1 + drafts)) if tells else None
        return DeviceLaunch(
            self, plan, held, reads, kept_ND, logits_NV, found_X, ready, late, self.is_usual, goes_on
        )

    def land(self, launch: DeviceLaunch, *, followed: bool) -> Landed:
        """Waits for a step and ends it, for those of its rows that are still there. `followed`: whether the next one is
        under way already."""
        if launch.ready is not None:
            launch.ready.synchronize()
        values, gone = launch.found_X.tolist(), launch.gone
        for own in launch.held:
            own.ahead = followed
        plan, each = launch.plan, 1 + launch.plan.num_drafts
        if launch.goes_on:
            rows = [
                replace(row, start=own.length, num_replay=own.num_replay)
                for row, own in zip(plan.rows, launch.held, strict=True)
            ]
            plan = Plan(tuple(rows), plan.num_drafts)
        found = Found.split(values, len(plan.rows) * each, len(plan.rows), plan.num_drafts)
        firsts = [number * each for number in range(len(plan.rows))]
        verdict = build_verdict(plan, found, firsts, logprobs=self._logprobs(launch, gone, found))
        plan, verdict = without(plan, verdict, gone)
        hidden_ND = self._hidden(launch, plan, gone)
        self.stages.state.commit(plan, verdict.accepted, hidden_ND=hidden_ND)
        if self.stages.drafter is not None and not launch.reads and hidden_ND is not None:
            self.stages.drafter.defer(plan, hidden_ND, verdict)
        for row, tokens in zip(plan.rows, verdict.tokens, strict=True):
            if row.request.params.penalised:
                self.stages.sampler.table.tally.advance(row.slot, len(tokens))
        begun, drafted, verified, read = values[-NUM_TIMESTAMPS:]
        drafting = drafted - begun + read - verified if launch.reads else 0
        seconds = (read if launch.reads else verified) - begun
        return Landed(plan, verdict, launch.late + drafting / 1e9, launch.is_usual, seconds / 1e9)

    def _logprobs(self, launch: DeviceLaunch, gone: Sequence[int], found: Found) -> dict[int, TokenLogprobs]:
        """Log-probabilities of the tokens of rows that asked, by place among all."""
        rows, each, sampler = launch.plan.rows, 1 + launch.plan.num_drafts, self.stages.sampler
        wanted = [
            n for n, row in enumerate(rows) if row.request.params.logprobs is not None and n not in gone
        ]
        if not wanted:
            return {}
        assert launch.logits_NV is not None
        places = [n * each + place for n in wanted for place in range(each)]
        device = self.stages.device
        tokens_L = torch.tensor([found.tokens[place] for place in places], device=device)
        logits_LV = launch.logits_NV[torch.tensor(places, device=device)]
        entries = [Entry(rows[n].slot, 0, 0, each) for n in wanted]
        by_entry = sampler.logprobs(logits_LV, tokens_L, Entries(entries, sampler.table, None))
        return {place: by_entry[entry] for entry, place in enumerate(places)}

    def _hidden(self, launch: DeviceLaunch, plan: Plan, gone: Sequence[int]) -> Tensor | None:
        """Hidden states of what the rows that are left were fed, without padding."""
        hidden_ND, each = launch.hidden_ND, 1 + launch.plan.num_drafts
        if hidden_ND is None or hidden_ND.shape[0] == plan.num_tokens:
            return hidden_ND
        numbers = [number for number in range(len(launch.plan.rows)) if number not in gone]
        own = [n * each + j for n, row in zip(numbers, plan.rows, strict=True) for j in range(row.query_len)]
        return hidden_ND[torch.tensor(own, device=self.stages.device)]

    def _layout(self, num_rows: int, num_drafts: int) -> EvenLayout:
        key = num_rows, num_drafts
        if key not in self._layouts:
            self._layouts[key] = EvenLayout(num_rows, num_drafts, self.stages.device)
        return self._layouts[key]
