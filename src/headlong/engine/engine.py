"""The engine: rows in, steps out. `step` is the table of contents of everything Headlong does."""

import math
import time

import torch

from headlong.config import EngineConfig
from headlong.engine.build import Built
from headlong.engine.row import Row
from headlong.engine.runner import Runner
from headlong.engine.scheduler import Scheduler
from headlong.errors import RequestError
from headlong.params import SamplingParams
from headlong.sampling.sampler import Sampler
from headlong.sampling.table import SamplingTable
from headlong.speculate.mtp import MtpProposer
from headlong.speculate.proposer import NoDrafts, Proposer
from headlong.speculate.verify import verify
from headlong.state.specs import Capacity
from headlong.state.state import State
from headlong.text.tokenizer import Tokenizer
from headlong.types import Request, StepOutput


class Engine:
    """One model, one state, many rows. Not thread-safe: one caller steps it."""

    def __init__(self, built: Built, config: EngineConfig, tokenizer: Tokenizer | None = None) -> None:
        model, head = built.model, built.head
        self.model = model
        self.tokenizer = tokenizer
        self.max_len, num_pages = config.resolve_context(model.config.max_position)
        self.max_drafts = config.max_draft_tokens if head is not None else 0
        self.drafts = min(config.drafts, self.max_drafts)
        specs = model.state_specs | (head.state_specs if head is not None else {})
        capacity = Capacity(
            num_pages=num_pages,
            page_size=config.page_size,
            num_slots=config.max_rows,
            max_drafts=self.max_drafts,
            kv_dtype=built.ops.dtype,
            dtype=built.ops.activation_dtype,
            device=built.ops.device,
        )
        self.state = State(specs, model.config.hidden_size, capacity)
        table = SamplingTable(config.max_rows, model.config.vocab_size, built.ops.device)
        self.sampler = Sampler(table)
        self.scheduler = Scheduler(self.state, table, config.chunk_tokens)
        self.runner = Runner(model, self.state)
        self.proposer: Proposer = NoDrafts()
        if head is not None:
            self.proposer = MtpProposer(model, head, self.state, self.sampler)

    @torch.inference_mode()
    def step(self) -> StepOutput:
        """One pass: draft, verify, commit. Every row with room advances by at least a token or a chunk."""
        started = time.perf_counter()
        plan = self.scheduler.plan()
        if not plan.rows:
            return StepOutput(num_waiting=len(self.scheduler.waiting))
        draft = self.proposer.propose(plan)
        batch = self.runner.batch(plan, draft)
        context = self.runner.context(batch)
        hidden, logits = self.runner.forward(batch, context)
        verdict = verify(plan, draft, logits, self.sampler)
        self.state.commit(plan, verdict)
        self.proposer.observe(plan, batch, context, hidden, verdict)
        return StepOutput(
            rows=self.scheduler.finish(plan, verdict),
            num_prompt_tokens=sum(row.query_len for row in plan.rows if row.known_tokens),
            num_rows=len(plan.rows),
            num_waiting=len(self.scheduler.waiting),
            seconds=time.perf_counter() - started,
            preempted=tuple(self.scheduler.preempted),
        )

    def add(self, request: Request) -> None:
        """Queues a request; one that could never run is refused here."""
        self.check(request)
        if self.scheduler.find(request.id) is not None:
            raise RequestError(f"request id {request.id!r} is in use")
        self.scheduler.add(Row(request, self.tokenizer, self.max_len))

    def cancel(self, request_id: str) -> StepOutput:
        """Ends a row at once and frees all it held; an unknown or finished one is no error."""
        row = self.scheduler.find(request_id)
        if row is None:
            return StepOutput()
        self.scheduler.remove(row)
        return StepOutput(rows=(row.cancel(),))

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def check_integrity(self) -> None:
        """Asserts that nothing leaked; everything must be free when no row runs."""
        self.state.check_integrity()
        assert set(self.state.rows) == {row.id for row in self.scheduler.running}

    def resolve_drafts(self, params: SamplingParams) -> int:
        """How deep this request drafts: its own wish, else the engine's; 0 without a head."""
        if params.draft_tokens is None:
            return self.drafts
        if self.max_drafts and params.draft_tokens > self.max_drafts:
            raise RequestError(
                f"draft_tokens {params.draft_tokens} is above this engine's maximum of {self.max_drafts}; "
                "start it with a larger max_draft_tokens"
            )
        return min(params.draft_tokens, self.max_drafts)

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
