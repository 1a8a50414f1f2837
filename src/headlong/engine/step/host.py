"""A step that the host goes through stage by stage: it takes every plan, prompts and any drafter among them."""

import time
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from headlong.engine.prompt_reading import read_prompts
from headlong.engine.runner import Runner
from headlong.engine.step.stages import run
from headlong.engine.step.stepper import Landed
from headlong.layers.context import Context
from headlong.sampling.sampler import Sampler
from headlong.speculate.proposer import Proposer
from headlong.speculate.verify import verify
from headlong.types import Batch, Draft, Plan, Verdict


class Drafted(NamedTuple):
    """The drafts, and the plan with those that were really made."""

    plan: Plan
    draft: Draft | None


class Computed(NamedTuple):
    """The target's pass."""

    batch: Batch
    context: Context
    hidden_ND: Tensor
    logits_LV: Tensor


@dataclass(frozen=True)
class HostLaunch:
    """A step that was computed when it was launched."""

    plan: Plan
    landed: Landed
    is_under_way: bool = False
    is_awaited: bool = True

    def land(self, *, followed: bool = False) -> Landed:  # noqa: ARG002
        return self.landed


class HostStepper:
    """A model with its drafter; the stages are its own methods."""

    def __init__(self, runner: Runner, proposer: Proposer, sampler: Sampler) -> None:
        self.runner, self.proposer, self.sampler = runner, proposer, sampler
        self._draft_seconds = 0.0

    def takes(self, plan: Plan) -> bool:  # noqa: ARG002
        return True

    def launch(self, plan: Plan) -> HostLaunch:
        drafted, _, verdict = run(self, plan)
        landed = Landed(drafted.plan, verdict, self._draft_seconds, self.runner.is_usual)
        return HostLaunch(plan, landed)

    def draft(self, plan: Plan) -> Drafted:
        started = time.perf_counter()
        draft = self._foreseen(plan, self.proposer.propose(plan))
        plan = plan.fitted(draft)
        self._draft_seconds = time.perf_counter() - started
        return Drafted(plan, draft)

    def _foreseen(self, plan: Plan, draft: Draft | None) -> Draft | None:
        """The drafts that can be verified without waiting long for what a grammar allows after them."""
        constraints = self.sampler.table.constraints
        if draft is None or not any(row.slot in constraints for row in plan.rows):
            return draft
        counts = list(draft.counts or (row.num_drafts for row in plan.rows))
        for number, row in enumerate(plan.rows):
            if counts[number] and (constraint := constraints.get(row.slot)) is not None:
                counts[number] = constraint.foresee(draft.tokens_RK[number, : counts[number]].tolist())
        width = max(counts)
        if not width:
            return None
        q_RKV = None if draft.q_RKV is None else draft.q_RKV[:, :width]
        return Draft(draft.tokens_RK[:, :width], q_RKV, tuple(counts))

    def forward(self, plan: Plan, draft: Drafted) -> Computed:  # noqa: ARG002
        batch = self.runner.batch(*draft)
        context = self.runner.context(batch)
        return Computed(batch, context, *self.runner.forward(batch, context))

    def verify(self, plan: Plan, draft: Drafted, computed: Computed) -> Verdict:  # noqa: ARG002
        verdict = verify(*draft, computed.logits_LV, self.sampler)
        read = read_prompts(draft.plan, computed.hidden_ND, self.runner.model)
        return replace(verdict, read=read) if read else verdict

    def commit(self, plan: Plan, draft: Drafted, computed: Computed, verdict: Verdict) -> None:  # noqa: ARG002
        batch, context, hidden_ND, _ = computed
        self.runner.state.commit(draft.plan, verdict.accepted, verdict.tokens_L, hidden_ND)
        committed = time.perf_counter()
        self.proposer.observe(draft.plan, batch, context, hidden_ND, verdict)
        self._draft_seconds += time.perf_counter() - committed
