"""The engine: rows in, steps out. `step` is the table of contents of everything Headlong does."""

import math
import time
from collections.abc import Collection
from contextlib import nullcontext

import torch

from headlong.config import EngineConfig
from headlong.engine.accounting import plan_memory, refusing_oom
from headlong.engine.build import Built
from headlong.engine.draft_vocab import draft_tokens
from headlong.engine.faults import Faults
from headlong.engine.proposers import head_place, make_proposer, resolve_proposer
from headlong.engine.row import Row
from headlong.engine.runner import Runner
from headlong.engine.scheduler import Scheduler
from headlong.engine.step.graph import Launch, Outcome, WholeStep
from headlong.errors import HeadlongError, RequestError
from headlong.ops.native import threads_for_native
from headlong.params import SamplingParams
from headlong.sampling.sampler import Sampler, needs_q
from headlong.sampling.table import SamplingTable
from headlong.speculate.depth import AdaptiveDepths, Depths, FixedDepths
from headlong.speculate.mtp import MtpProposer
from headlong.speculate.profile import conditions
from headlong.speculate.profile import load as load_profile
from headlong.speculate.verify import verify
from headlong.state.specs import Capacity, PrefixCapacity
from headlong.state.state import State
from headlong.text.tokenizer import Tokenizer
from headlong.types import Plan, Request, StepOutput, StepTimes

USUAL_DRAFTS = 3


class Engine:
    """One model, one state, many rows. Not thread-safe: one caller steps it."""

    def __init__(
        self,
        built: Built,
        config: EngineConfig,
        tokenizer: Tokenizer | None = None,
        drafter: Built | None = None,
        ends: Collection[int] = (),
    ) -> None:
        """`drafter` is the model that the proposer `draft` drafts with; `ends` are the tokens that end a text."""
        model, drafting = built.model, resolve_proposer(config, built, drafter)
        head = built.head if "mtp" in drafting.parts else None
        self.model = model
        self.tokenizer = tokenizer
        self.max_drafts = config.max_draft_tokens if drafting.parts else 0
        self.memory = plan_memory(config, built, head, drafter, self.max_drafts)
        self.max_len = self.memory.max_len
        self.drafts = min(config.drafts, self.max_drafts)
        self.adaptive = config.draft_tokens == "auto"
        specs = model.state_specs | (head.state_specs if head is not None else {})
        capacity = Capacity(
            num_pages=self.memory.num_pages,
            page_size=config.page_size,
            num_slots=config.max_rows,
            max_drafts=self.max_drafts,
            kv_dtype=built.ops.dtype,
            dtype=built.ops.activation_dtype,
            device=built.ops.device,
            head=head_place(built, head),
        )
        prefix = PrefixCapacity(
            device_bytes=self.memory.checkpoint_bytes,
            host_bytes=config.prefix_host_bytes,
            head=head is not None,
        )
        kept = prefix if config.prefix_cache else None
        with refusing_oom(self.memory):
            self.state = State(specs, model.config.hidden_size, capacity, kept)
        table = SamplingTable(config.max_rows, model.config.vocab_size, built.ops.device)
        self.sampler = Sampler(table, built.ops.argmax, built.ops.draw, built.ops.sample, built.ops.penalise)
        self.runner = Runner(model, self.state)
        chosen = None
        if head is not None:
            chosen = draft_tokens(config.draft_vocab, model.config.vocab_size, tokenizer, ends)
        with refusing_oom(self.memory):
            self.proposer = make_proposer(drafting, config, built, drafter, self.state, self.sampler, chosen)
        self.whole = self._whole_step()
        self._ahead: Launch | None = None
        """A step that was launched before the last one was read."""
        drafted_by = f"{config.proposer} {config.drafter} {config.draft_quantization} {config.draft_dtype}"
        drafted_by += "" if chosen is None else f" {len(chosen)}"
        drafted_by += "" if config.draft_device is None else f" on {config.draft_device}"
        self.conditions = conditions(model.config, built.ops.dtype, built.ops.device, drafted_by)
        """What the costs of drafting depend on."""
        self.depths: Depths = FixedDepths()
        if self.max_drafts:
            profile = load_profile(self.conditions)
            self.depths = AdaptiveDepths(self.max_drafts, profile, whole=self.whole is not None)
        self.scheduler = Scheduler(
            self.state, table, self.depths, config.chunk_tokens, self.proposer.flush_deferred
        )
        self.faults = Faults(self.scheduler)
        self._check_every_step = config.check_every_step
        whole = model.program is not None and (head is None or head.is_one_call)
        self._threads = threads_for_native if whole else nullcontext()
        """Where torch computes what is large, it needs its own."""

    def _whole_step(self) -> WholeStep | None:
        """Where steps can be one launch: Triton's kernels, and the model's own head as the drafter or none."""
        drafter = self.proposer if isinstance(self.proposer, MtpProposer) else None
        if self.model.asks_host or (drafter is None and self.max_drafts):
            return None
        return WholeStep(self.model, self.state, self.sampler, drafter, self.max_len)

    @torch.inference_mode()
    def step(self) -> StepOutput:
        """One pass, whatever goes wrong in it: rows that a fault concerns are read again or end with an error."""
        with self._threads:
            step = self.faults.guarded(self._pass)
        if self._check_every_step:
            self.check_integrity()
        return step

    def _pass(self, *, further: bool = True) -> StepOutput:
        """Draft, verify, commit. Every row with room advances by at least a token or a chunk. Where the step after this
        one can be told, and `further` ones are wanted, it is launched before this one is read."""
        started = time.perf_counter()
        launch, self._ahead = self._ahead, None
        if launch is not None and self.whole is not None and self.whole.is_awaited(launch):
            self.scheduler.begin()
            planned = started
            plan, outcome = self._land(self.whole, launch, further=further)
        else:
            plan = self.scheduler.plan()
            if not plan.rows:
                return StepOutput(num_waiting=len(self.scheduler.waiting))
            planned = time.perf_counter()
            if self.whole is not None and self.whole.takes(plan):
                plan, outcome = self._land(self.whole, self.whole.launch(plan), further=further)
            else:
                plan, outcome = self._by_parts(plan)
        verdict, draft_seconds, is_usual = outcome.verdict, outcome.draft_seconds, outcome.is_usual
        is_usual = is_usual and not verdict.poisoned
        plan, verdict = self.faults.sort_out(plan, verdict)
        rows = self.scheduler.finish(plan, verdict)
        if is_usual:  # poisoned rows took their time and gave nothing
            # Planning is left out: now and then it takes long, whatever the step is that it plans. A step that was
            # launched ahead went on while nobody waited for it.
            seconds = max(time.perf_counter() - planned, outcome.seconds)
            self.depths.observe(plan, verdict, StepTimes(draft_seconds, seconds - draft_seconds))
        return StepOutput(
            rows=rows,
            num_prompt_tokens=sum(row.query_len for row in plan.rows if row.known_tokens),
            num_rows=len(plan.rows),
            num_waiting=len(self.scheduler.waiting),
            seconds=time.perf_counter() - started,
            preempted=tuple(self.scheduler.preempted),
        )

    def _land(self, whole: WholeStep, launch: Launch, *, further: bool) -> tuple[Plan, Outcome]:
        """What the target says of a step that is one launch, which is settled then; with the rows that are left of it.
        What follows is launched first: the device then has no cause to wait for the host."""
        ahead = self.scheduler.plan_ahead(launch.plan) if further else None
        if ahead is not None and whole.may_follow(launch, ahead):
            self._ahead = whole.launch(ahead, goes_on=True)
        return whole.land(launch, followed=self._ahead is not None)

    @torch.inference_mode()
    def _catch_up(self) -> None:
        """Settles a step that was launched ahead: rows are about to be changed from outside."""
        if self._ahead is not None:
            self.faults.untold = self.faults.guarded(lambda: self._pass(further=False)).rows

    def _by_parts(self, plan: Plan) -> tuple[Plan, Outcome]:
        """The same, part by part. The plan comes back with the drafts that were really made."""
        started = time.perf_counter()
        draft = self.proposer.propose(plan)
        plan = plan.fitted(draft)
        drafted = time.perf_counter()
        batch = self.runner.batch(plan, draft)
        context = self.runner.context(batch)
        hidden, logits = self.runner.forward(batch, context)
        verdict = verify(plan, draft, logits, self.sampler)
        self.state.commit(plan, verdict.accepted, verdict.tokens_L, hidden)
        verified = time.perf_counter()
        self.proposer.observe(plan, batch, context, hidden, verdict)
        draft_seconds = drafted - started + time.perf_counter() - verified
        return plan, Outcome(verdict, draft_seconds, self.runner.is_usual)

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
        self._catch_up()
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

    def resolve_drafts(self, params: SamplingParams) -> tuple[int, bool]:
        """How deep this request drafts at most, its own wish or the engine's, 0 where nobody drafts; and whether less
        will do where that pays."""
        if params.draft_tokens is None:
            # What `ratio` and `block` emit depends on the depth: it must not hang on how fast steps are.
            adaptive = self.adaptive and not needs_q(params)
            return (self.drafts if adaptive else self.usual_drafts), adaptive
        if self.max_drafts and params.draft_tokens > self.max_drafts:
            raise RequestError(
                f"draft_tokens {params.draft_tokens} is above this engine's maximum of {self.max_drafts}; "
                "start it with a larger max_draft_tokens"
            )
        return min(params.draft_tokens, self.max_drafts), False

    def check(self, request: Request) -> None:
        """Refuses what could never run, naming the field. Reads nothing that changes: any thread may ask."""
        vocab, params = self.model.config.vocab_size, request.params
        if not request.prompt:
            raise RequestError("prompt is empty: it needs at least one token")
        if len(request.prompt) >= self.max_len:
            raise RequestError(
                f"prompt has {len(request.prompt)} tokens; this engine's context is {self.max_len}, "
                "of which at least one must be left for the output"
            )
        if params.grammar is not None and request.constraint is None:
            raise RequestError(
                "grammar was not compiled; make the request with the service that has the tokenizer"
            )
        named = {
            "prompt": request.prompt,
            "bad_token_ids": params.bad_token_ids,
            "stop_token_ids": params.stop_token_ids,
            "logit_bias": tuple(params.logit_bias),
        }
        for name, tokens in named.items():
            for token in tokens:
                if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
                    raise RequestError(f"{name}: {token!r} is not a token id; the vocabulary has {vocab}")
        banned = {*params.bad_token_ids, *(t for t, bias in params.logit_bias.items() if bias == -math.inf)}
        if len(banned | (request.stop_ids if params.min_tokens else set())) >= vocab:
            raise RequestError(
                "bad_token_ids, logit_bias and min_tokens together leave no token to choose from"
            )
