"""One replica: an engine in a process of its own, which Ray Serve starts, watches and ends.

Errors travel as values. What the front gave up is cancelled, whoever noticed first.
"""

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ray import serve

from headlong.cluster import fingerprint
from headlong.cluster.wire import Facts, Hello, Refused, Report, RoutingStats, Work
from headlong.completion import Chunk
from headlong.config import EngineConfig
from headlong.engine.local import LocalEngine, LocalEngines
from headlong.errors import HeadlongError, RequestError
from headlong.progress import silent
from headlong.types import Request

MAX_PREFIXES = 2048
"""The most pages that a replica tells routers of."""
EXIT_HUNG = 70
POLL_SECONDS = 0.25
LAST_WORDS_SECONDS = 1.0
"""How long what was told of the end may travel, before the process ends."""
log = logging.getLogger(__name__)


class Replica:
    """The deployment's class. Ray Serve makes one in each replica's process."""

    def __init__(self, model: str | None, options: Mapping[str, Any]) -> None:
        self._engine: LocalEngine = LocalEngines().load(
            model, EngineConfig(**options, map_files=False), silent
        )
        service = self._engine.service
        identity = fingerprint.of_model(service.folder)
        self._facts = Facts(
            replica=serve.get_replica_context().replica_id.unique_id,
            node=socket.gethostname(),
            model=identity,
            fingerprint=fingerprint.of_engine(service, identity),
            eos_ids=service.eos_ids,
            description=self._engine.description,
        )
        threading.Thread(target=self._end_if_hung, name="headlong-hung", daemon=True).start()

    async def stream(self, work: Work) -> AsyncGenerator[Hello | Chunk | Refused, None]:
        """Says who answers, then what comes of the requests, until all have ended."""
        yield Hello(self._facts.replica, self._facts.fingerprint)
        if work.model != self._facts.model:
            yield Refused("other", "it serves another model")
            return
        if work.fingerprint and work.fingerprint != self._facts.fingerprint:
            yield Refused("other", "its build, its settings or its machine are others")
            return
        try:
            requests = await asyncio.to_thread(self._fitted, work.requests)
            async with contextlib.aclosing(self._engine.stream(requests)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except RequestError as error:
            yield Refused("request", str(error))
        except HeadlongError as error:
            yield Refused("failed", str(error))

    async def report(self) -> Report:
        return Report(self._facts, self._engine.stats())

    async def cancel(self, request_ids: Sequence[str]) -> None:
        self._engine.cancel(request_ids)

    def record_routing_stats(self) -> RoutingStats:
        """Called by Ray Serve, which hands it to the routers."""
        scheduler, state = self._engine.service.engine.scheduler, self._engine.service.engine.state
        running, waiting = list(scheduler.running), list(scheduler.waiting)
        unread = (row.num_tokens for row in waiting)
        return RoutingStats(
            running=len(running),
            waiting=len(waiting),
            queued_tokens=sum(unread) + sum(max(0, row.num_left) for row in (*running, *waiting)),
            prefixes=state.prefix.recent_keys(MAX_PREFIXES) if state.caching else [],
            page_size=state.page_size,
            fingerprint=self._facts.fingerprint,
        )

    def check_health(self) -> None:
        """Called by Ray Serve, which ends the replica and starts another one where this raises."""
        if self._engine.failure is not None:
            raise RuntimeError(self._engine.failure)

    def _fitted(self, requests: Sequence[Request]) -> list[Request]:
        """The requests with what this engine makes of their parameters. They are choices of one prompt."""
        first = self._engine.service.maker.fitted(requests[0])
        names = ("draft_tokens", "adaptive", "stop_ids", "constraint")
        return [replace(one, **{name: getattr(first, name) for name in names}) for one in requests]

    def _end_if_hung(self) -> None:
        while not self._engine.hung:
            time.sleep(POLL_SECONDS)
        log.critical("the engine hangs; the process ends with status %d", EXIT_HUNG)
        time.sleep(LAST_WORDS_SECONDS)
        os._exit(EXIT_HUNG)  # waits for no thread
