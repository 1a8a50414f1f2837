"""The engine: rows in, steps out. `step` is the table of contents of everything Headlong does."""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from headlong.engine.accounting import MemoryPlan
from headlong.engine.faults import Faults
from headlong.engine.requests import check
from headlong.engine.row import Row
from headlong.engine.runner import Runner
from headlong.engine.scheduler import Scheduler
from headlong.engine.step.ahead import Ahead
from headlong.engine.step.steppers import Steppers
from headlong.errors import HeadlongError, RequestError
from headlong.models.decoder import DecoderModel
from headlong.sampling.sampler import Sampler
from headlong.speculate.depth import Depths
from headlong.speculate.proposer import Proposer
from headlong.state.state import State
from headlong.text.tokenizer import Tokenizer
from headlong.types import Request, StepOutput, StepTimes

USUAL_DRAFTS = 3


class Drafting(NamedTuple):
    """How deep requests may draft where they do not say."""

    max_drafts: int
    """The most drafts that a request may ask for; 0 where nobody drafts."""
    drafts: int
    adaptive: bool
    """Whether the engine chooses anew every step."""
    conditions: Mapping[str, Any]
    """What the costs of drafting depend on."""


@dataclass(frozen=True)
class Parts:
    """What an engine is made of, by assemble.py."""

    model: DecoderModel
    tokenizer: Tokenizer | None
    memory: MemoryPlan
    state: State
    sampler: Sampler
    steppers: Steppers
    scheduler: Scheduler
    drafting: Drafting
    threads: AbstractContextManager[object]
    """Where torch computes what is large, it needs its own."""
    check_every_step: bool


class Engine:
    """One model, one state, many rows. Not thread-safe: one caller steps it."""

    def __init__(self, parts: Parts) -> None:
        self.model, self.tokenizer, self.memory = parts.model, parts.tokenizer, parts.memory
        self.state, self.sampler, self.steppers = parts.state, parts.sampler, parts.steppers
        self.max_drafts, self.drafts, self.adaptive, self.conditions = parts.drafting
        self.max_len = parts.memory.max_len
        self.scheduler = parts.scheduler
        self.depths: Depths = parts.scheduler.depths
        self.ahead = Ahead(parts.scheduler, parts.steppers)
        self.faults = Faults(parts.scheduler)
        self._threads, self._check_every_step = parts.threads, parts.check_every_step

    @property
    def runner(self) -> Runner:
        """The target over its state."""
        return self.steppers.host.runner

    @property
    def proposer(self) -> Proposer:
        """Who drafts."""
        return self.steppers.host.proposer

    @torch.inference_mode()
    def step(self) -> StepOutput:
        """One step, whatever goes wrong in it: rows that a fault concerns are read again or end with an error."""
        with self._threads:
            step = self.faults.guarded(self._step)
        if self._check_every_step:
            self.check_integrity()
        return step

    def _step(self, *, go_ahead: bool = True) -> StepOutput:
        """Plan, draft, forward, verify, commit, output: every row with room advances by at least a token or a chunk.

        A step that was launched ahead is landed instead of planned. Whoever runs it, the stages between plan and output
        are those of step/stages.py, and their tokens are the same."""
        started = planned = time.perf_counter()
        launch = self.ahead.take()
        if launch is None:
            plan = self.scheduler.plan()
            if not plan.rows:
                return StepOutput(num_waiting=len(self.scheduler.waiting))
            planned = time.perf_counter()
            launch = self.steppers.choose(plan).launch(plan)  # draft, forward, verify
        if go_ahead:
            self.ahead.offer(launch)  # the device need not wait for the host
        landed = launch.land(followed=self.ahead.launch is not None)  # commit
        plan, verdict = self.faults.sort_out(landed.plan, landed.verdict)
        rows = self.scheduler.finish(plan, verdict)  # output
        if landed.is_usual and not landed.verdict.poisoned:  # poisoned rows took their time and gave nothing
            # Planning is left out: now and then it takes long, whatever the step is that it plans. A step that was
            # launched ahead went on while nobody waited for it.
            seconds = max(time.perf_counter() - planned, landed.seconds)
            self.depths.observe(
                plan, verdict, StepTimes(landed.draft_seconds, seconds - landed.draft_seconds)
            )
            if self.scheduler.pace is not None:
                self.scheduler.pace.observe(plan, seconds)
        return StepOutput(
            rows=rows,
            num_prompt_tokens=sum(row.query_len for row in plan.rows if row.known_tokens),
            num_rows=len(plan.rows),
            num_waiting=len(self.scheduler.waiting),
            seconds=time.perf_counter() - started,
            preempted=tuple(self.scheduler.preempted),
        )

    @torch.inference_mode()
    def _land_ahead(self) -> None:
        """Ends a step that was launched ahead: rows are about to be changed from outside."""
        if self.ahead.launch is not None:
            self.faults.untold = self.faults.guarded(lambda: self._step(go_ahead=False)).rows

    def add(self, request: Request) -> None:
        """Queues a request; one that could never run is refused here."""
        if self.failure is not None:
            raise HeadlongError(self.failure)
        self.check(request)
        if self.scheduler.find(request.id) is not None:
            raise RequestError(f"request id {request.id!r} is in use")
        self.scheduler.add(Row(request, self.tokenizer, self.max_len))

    def cancel(self, request_id: str) -> StepOutput:
        """Ends a row at once and frees all it held; an unknown or finished one is no error."""
        self._land_ahead()
        # Whoever cancels a row does not expect to hear of it any more, even if it has just come to its end.
        self.faults.untold = tuple(told for told in self.faults.untold if told.request.id != request_id)
        row = self.scheduler.find(request_id)
        if row is None:
            return StepOutput()
        self.faults.take_out(row)
        return StepOutput(rows=(row.cancel(),))

    @property
    def failure(self) -> str | None:
        """Why nothing more is taken; None while the engine is well."""
        return self.faults.failure

    def restart(self) -> None:
        """Lets an engine that failed try again. It has no rows then; those it had have ended."""
        self.faults.restart()

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting or self.faults.untold)

    def check_integrity(self) -> None:
        """Asserts that nothing leaked; everything must be free when no row runs."""
        self.state.check_integrity()
        assert set(self.state.rows) == {row.id for row in self.scheduler.running}
        self.proposer.check_integrity()

    @property
    def usual_drafts(self) -> int:
        """What drafting amounts to where nobody says: for people, since the engine may choose anew every step."""
        return min(USUAL_DRAFTS, self.drafts) if self.adaptive else self.drafts

    def check(self, request: Request) -> None:
        """Refuses what could never run, naming the field. Reads nothing that changes: any thread may ask."""
        check(request, self.model.config.vocab_size, self.max_len)
