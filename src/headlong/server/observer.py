"""Sees every request end: one log line, one entry of the history, its place in the histograms.

Never sees a prompt's text unless the settings ask for it in the log.
"""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.requests import Request

from headlong import tracing
from headlong.completion import Completion
from headlong.server.admission_limit import AdmissionLimit
from headlong.server.errors import CLIENT_GONE, ApiError
from headlong.server.generation import Job, Piece, Result
from headlong.server.logs import log_request
from headlong.server.model import Model
from headlong.server.request_metrics import RequestMetrics
from headlong.server.settings import Settings

HISTORY = 50


@dataclass
class Record:
    """What is recorded of one request, from admission to its end."""

    id: str
    endpoint: str
    caller: str
    model: str
    prompt_tokens: int
    status: int = 200
    finish_reason: str | None = None
    error: str | None = None
    prompts: list[str] = field(default_factory=list)
    """The prompts' texts, if the settings want them in the log."""
    num_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    last_chunk: dict[int, float] = field(default_factory=dict)
    gaps: list[tuple[float, int]] = field(default_factory=list)
    """For each chunk, the seconds since the same choice's last one, and the tokens in it."""

    def saw(self, piece: Piece) -> None:
        now = time.perf_counter()
        self.num_tokens += len(piece.chunk.token_ids)
        self.drafted += piece.chunk.num_drafted
        self.accepted += piece.chunk.num_accepted
        before = self.last_chunk.get(piece.index)
        if before is not None and piece.chunk.token_ids:
            self.gaps.append((now - before, len(piece.chunk.token_ids)))
        self.last_chunk[piece.index] = now

    def failed(self, error: ApiError) -> None:
        self.status, self.finish_reason, self.error = error.status, "error", error.reason

    def gone(self) -> None:
        self.status, self.finish_reason = CLIENT_GONE, "cancelled"


class Observer:
    """Records requests for the log, the history and the histograms. It is used on the event loop alone."""

    def __init__(self, settings: Settings, limit: AdmissionLimit, registry: CollectorRegistry) -> None:
        self.history: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self.num_requests = 0
        self._settings = settings
        self._limit = limit
        self._metrics = RequestMetrics(registry, settings.request_timeout)

    def begin(self, request: Request, job: Job, model: Model) -> Record:
        prompt_tokens = sum(map(len, job.prompts))
        record = Record(request.state.id, job.endpoint, request.state.caller.name, model.id, prompt_tokens)
        tokenizer = model.client.text.tokenizer
        if self._settings.log_prompts and tokenizer is not None:
            record.prompts = [tokenizer.decode(prompt, skip_special_tokens=False) for prompt in job.prompts]
        return record

    def finish(self, record: Record, result: Result) -> None:
        result.seconds = time.perf_counter() - result.started
        done = [choice.completion for choice in result.choices if choice.completion is not None]
        if record.finish_reason is None:
            record.finish_reason = done[0].finish_reason
        self.num_requests += 1
        self._limit.took(result.seconds)
        self._metrics.ended(record.model, record.finish_reason, record.gaps, result)
        facts = _facts(record, result, done)
        self.history.appendleft(facts)
        tracing.annotate(_for_trace(record, facts))
        log_request(**self._for_log(record, result, facts))

    def _for_log(self, record: Record, result: Result, facts: Mapping[str, Any]) -> dict[str, Any]:
        names = (
            "endpoint",
            "prompt_tokens",
            "completion_tokens",
            "ttft_ms",
            "seconds",
            "tokens_per_second",
            "drafted",
            "accepted",
            "finish_reason",
        )
        fields = {"request_id": record.id, "caller": record.caller, "model": record.model}
        fields |= {"status": record.status} | {name: facts[name] for name in names}
        if record.error is not None:
            fields["error"] = record.error
        if self._settings.log_prompts:
            fields["prompt"] = record.prompts
            fields["output"] = [choice.content for choice in result.choices]
        return fields


def _for_trace(record: Record, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a request for its span, under OpenTelemetry's names where it has one."""
    return {
        "gen_ai.request.model": record.model,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_tokens,
        "headlong.finish_reason": record.finish_reason,
        "headlong.ttft_ms": facts["ttft_ms"],
        "headlong.drafted": record.drafted,
        "headlong.accepted": record.accepted,
        "error.type": None if record.error is None else str(record.status),
    }


def _facts(record: Record, result: Result, done: list[Completion]) -> dict[str, Any]:
    """What the page's history and the log show of a request. One whose client left has its counts, not its rates."""
    stats = [completion.stats for completion in done]
    steps = sum(one.steps for one in stats)
    decode_seconds = max((one.decode_seconds for one in stats), default=0.0)
    decoded = sum(one.steps * one.tokens_per_step for one in stats)
    return {
        "id": record.id,
        "endpoint": record.endpoint,
        "finished_at": time.time(),
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.num_tokens,
        "ttft_ms": None if result.first_token is None else round(result.first_token * 1000, 2),
        "seconds": round(result.seconds, 4),
        "tokens_per_second": round(decoded / decode_seconds, 2) if decode_seconds else None,
        "tokens_per_step": round(decoded / steps, 3) if steps else None,
        "drafted": record.drafted,
        "accepted": record.accepted,
        "acceptance_per_position": [round(share, 3) for share in stats[0].acceptance_per_position]
        if stats
        else [],
        "mtp": record.drafted > 0,
        "mtp_reason": stats[0].mtp.reason if stats else None,
        "finish_reason": record.finish_reason,
    }
