"""One replica: an engine and what its front may ask of it. Errors travel as values. Knows no Ray."""

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from headlong import tracing
from headlong.cluster import fingerprint
from headlong.cluster.fleet import Item
from headlong.cluster.prefix_index import REPORTED_KEYS
from headlong.cluster.suspicion import Gain
from headlong.cluster.wire import Facts, Hello, OnTrial, Refused, Report, RoutingStats, Work
from headlong.completion import Chunk, Completion
from headlong.engine.local import LocalEngine
from headlong.errors import HeadlongError, RequestError
from headlong.types import Request

EXIT_HUNG = 70
POLL_SECONDS = 0.25
LAST_WORDS_SECONDS = 1.0
"""How long what was told of the end may travel, before the process ends."""
HEARD_SECONDS = 0.05
"""How long it may take until a front has heard that a trial begins, which may end this process."""
log = logging.getLogger(__name__)


class Replica:
    """What a front asks of one engine. Its methods are those of the deployment."""

    def __init__(self, engine: LocalEngine, name: str, version: str = "", placement: str = "") -> None:
        self._engine = engine
        identity = fingerprint.of_model(engine.service.folder)
        self.facts = Facts(
            replica=name,
            node=socket.gethostname(),
            model=identity,
            version=version,
            placement=placement,
            fingerprint=fingerprint.of_engine(engine.service, identity),
            eos_ids=engine.service.eos_ids,
            started=time.time(),
            description=engine.description,
        )
        self._trials = asyncio.Lock()
        """Held by the call that is on trial."""
        self._rest_until = 0.0
        """When the next trial may begin."""
        threading.Thread(target=self._end_if_hung, name="headlong-hung", daemon=True).start()

    async def stream(self, work: Work) -> AsyncGenerator[Item, None]:
        """Says who answers, then what comes of the requests, until all have ended."""
        told = {
            tracing.REQUEST_ID: tracing.request_id(work.requests[0].id) if work.requests else None,
            "headlong.replica": self.facts.replica,
        }
        with tracing.apart("replica", told, kind="server", parent=work.trace) as span:
            async with contextlib.aclosing(self._answers(work)) as items:
                async for item in items:
                    if isinstance(item, Chunk) and item.completion is not None:
                        span.annotate(_for_trace(item.completion))
                    yield item

    async def _answers(self, work: Work) -> AsyncGenerator[Item, None]:
        yield Hello(self.facts.replica, self.facts.fingerprint)
        if work.model != self.facts.model:
            yield Refused("other", "it serves another model")
            return
        if work.fingerprint and work.fingerprint != self.facts.fingerprint:
            yield Refused("other", "its build, its settings or its machine are others")
            return
        try:
            async with contextlib.aclosing(self._tried(work) if work.alone else self._chunks(work)) as items:
                async for item in items:
                    yield item
        except RequestError as error:
            yield Refused("request", str(error))
        except HeadlongError as error:
            yield Refused("failed", str(error))

    async def _tried(self, work: Work) -> AsyncGenerator[Item, None]:
        """What comes of a call that may be what ends replicas. One such call is tried at a time."""
        trial = Gain([one.id for one in work.requests], work.alone)
        async with contextlib.aclosing(self._chunks(work)) as chunks:
            async with self._on_trial():
                yield OnTrial()
                await asyncio.sleep(HEARD_SECONDS)
                async for chunk in chunks:
                    trial.take(chunk)
                    yield chunk
                    if trial.reached:
                        break
            async for chunk in chunks:
                yield chunk

    @contextlib.asynccontextmanager
    async def _on_trial(self) -> AsyncGenerator[None, None]:
        """Nobody else is tried as long as the block lasts, and as long again."""
        async with self._trials:
            await asyncio.sleep(max(0.0, self._rest_until - time.monotonic()))
            began = time.monotonic()
            try:
                yield
            finally:
                now = time.monotonic()
                self._rest_until = now + (now - began)

    async def _chunks(self, work: Work) -> AsyncGenerator[Chunk, None]:
        requests = await asyncio.to_thread(self._fitted, work.requests, work.alone)
        async with contextlib.aclosing(self._engine.stream(requests)) as chunks:
            async for chunk in chunks:
                yield chunk

    def report(self) -> Report:
        return Report(self.facts, self._engine.stats())

    def cancel(self, request_ids: Sequence[str]) -> None:
        self._engine.cancel(request_ids)

    def record_routing_stats(self) -> RoutingStats:
        """Called by Ray Serve, which hands it to the routers."""
        scheduler, state = self._engine.service.engine.scheduler, self._engine.service.engine.state
        return RoutingStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            queued_tokens=self._queued_tokens(),
            prefixes=[key.hex() for key in self._engine.prefix_keys(REPORTED_KEYS)],
            page_size=state.page_size,
            fingerprint=self.facts.fingerprint,
        )

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Ray Serve, whose autoscaler averages it."""
        return {"queued_tokens": float(self._queued_tokens())}

    def check_health(self) -> None:
        """Called by Ray Serve, which ends the replica and starts another one where this raises."""
        if self._engine.failure is not None:
            raise RuntimeError(self._engine.failure)

    def _queued_tokens(self) -> int:
        """Tokens that rows have to read and to generate at most."""
        scheduler = self._engine.service.engine.scheduler
        running, waiting = list(scheduler.running), list(scheduler.waiting)
        unread = sum(row.num_tokens for row in waiting)
        return unread + sum(max(0, row.num_left) for row in (*running, *waiting))

    def _fitted(self, requests: Sequence[Request], alone: int) -> list[Request]:
        """The requests with what this engine makes of their parameters. They are choices of one prompt."""
        first = self._engine.service.maker.fitted(requests[0])
        names = ("draft_tokens", "adaptive", "stop_ids", "constraint")
        fitted = {name: getattr(first, name) for name in names}
        return [replace(one, alone=alone, **fitted) for one in requests]

    def _end_if_hung(self) -> None:
        while not self._engine.hung:
            time.sleep(POLL_SECONDS)
        log.critical("the engine hangs; the process ends with status %d", EXIT_HUNG)
        time.sleep(LAST_WORDS_SECONDS)
        os._exit(EXIT_HUNG)  # waits for no thread


def _for_trace(done: Completion) -> dict[str, float | str | None]:
    """What a replica tells of the sequence that ended last, where a call has several."""
    return {
        "gen_ai.usage.output_tokens": len(done.token_ids),
        "headlong.cached_tokens": done.stats.cached_tokens,
        "headlong.queue_seconds": done.stats.queue_seconds,
        "headlong.prefill_seconds": done.stats.prefill_seconds,
        "headlong.decode_seconds": done.stats.decode_seconds,
        "headlong.finish_reason": done.finish_reason,
    }
