"""The asynchronous front end: the engine steps in a thread of its own, streams come out on the event loop."""

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headlong.completion import Chunk, Completion
from headlong.config import EngineConfig
from headlong.engine.collect import Collector
from headlong.engine.service import Message, Prompt, Service
from headlong.errors import HeadlongError
from headlong.params import SamplingParams
from headlong.progress import ProgressFn, silent
from headlong.types import Request, StepOutput

log = logging.getLogger(__name__)
Item = Chunk | BaseException
OnStep = Callable[[StepOutput], None]
MAX_RESTARTS = 3
RESTART_SECONDS = 600.0
"""An engine that failed begins anew so often within this time; after that it stays down and says so."""


@dataclass(frozen=True)
class Usage:
    """How full an engine is at this moment."""

    running: int
    waiting: int
    pages_used: int
    pages_total: int
    slots_used: int
    slots_total: int


class AsyncLLM:
    """Many streams over one engine. Start it with `await AsyncLLM.load(...)`, end it with `await close()`.

    `on_step` sees every step, in the engine's thread.
    """

    def __init__(self, service: Service, on_step: OnStep | None = None) -> None:
        self.service = service
        self._loop = EngineLoop(service, on_step)
        self._ids = itertools.count()

    @classmethod
    async def load(
        cls,
        model: str | Path | None = None,
        *,
        progress: ProgressFn = silent,
        on_step: OnStep | None = None,
        **options: Any,
    ) -> "AsyncLLM":
        """Loads off the event loop; options are those of `EngineConfig`."""
        return cls(await asyncio.to_thread(Service.load, model, EngineConfig(**options), progress), on_step)

    async def stream(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None, **template: Any
    ) -> AsyncGenerator[Chunk, None]:
        """Yields what each step adds. Leaving the loop early cancels the rest and frees its pages at once."""
        requests = await asyncio.to_thread(self._requests, prompt, params or SamplingParams(), template)
        async with contextlib.aclosing(self.run(requests)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def run(self, requests: list[Request]) -> AsyncGenerator[Chunk, None]:
        """`stream` for requests that were made already, by `service.requests`."""
        outlet = _Outlet(asyncio.get_running_loop(), asyncio.Queue())
        self._loop.submit(requests, outlet)
        unfinished = len(requests)
        try:
            while unfinished:
                item = await outlet.items.get()
                if isinstance(item, BaseException):
                    raise item
                unfinished -= item.finish_reason is not None
                yield item
        finally:
            if unfinished:
                self._loop.cancel([request.id for request in requests])

    async def generate(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None, **template: Any
    ) -> Completion:
        """The whole completion; with `n > 1` the further ones are in `.choices`."""
        done: dict[int, Completion] = {}
        async for chunk in self.stream(prompt, params, **template):
            if chunk.completion is not None:
                done[chunk.index] = chunk.completion
        return Completion.joined([done[index] for index in sorted(done)])

    def _requests(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams, template: dict[str, Any]
    ) -> list[Request]:
        """Encoding a long prompt or compiling a grammar takes a while: not for the event loop."""
        if not isinstance(prompt, Sequence) or not prompt or isinstance(prompt[0], (str, int)):
            tokens = self.service.encode(prompt)  # type: ignore[arg-type]
        else:
            tokens = self.service.encode_chat(prompt, **template)  # type: ignore[arg-type]
        return self.service.requests(tokens, params, f"async-{next(self._ids)}")

    @property
    def failure(self) -> str | None:
        """Why the engine takes nothing more; None while it is well."""
        return self._loop.ended

    @property
    def usage(self) -> Usage:
        scheduler, state = self.service.engine.scheduler, self.service.engine.state
        return Usage(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages_used=state.pages.num_used,
            pages_total=state.pages.size,
            slots_used=state.slots.num_used,
            slots_total=state.slots.size,
        )

    async def close(self) -> None:
        """Stops the thread; streams still open end with an error."""
        await asyncio.to_thread(self._loop.close)


@dataclass(frozen=True, eq=False)
class _Outlet:
    """Where a stream's items go: a queue of the event loop that waits for them."""

    loop: asyncio.AbstractEventLoop
    items: asyncio.Queue[Item]


class EngineLoop:
    """The thread that steps the engine. All contact with the engine goes through its inbox."""

    def __init__(self, service: Service, on_step: OnStep | None = None) -> None:
        self._service = service
        self._engine = service.engine
        self._on_step = on_step
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, tuple[Collector, _Outlet]] = {}
        self._lock = threading.Lock()
        self._restarts: deque[float] = deque(maxlen=MAX_RESTARTS)
        """When the engine began anew, the last few times."""
        self.ended: str | None = None
        """Why nothing more is taken; set under the lock, after which the inbox only empties."""
        self._thread = threading.Thread(target=self._run, name="headlong-engine", daemon=True)
        self._thread.start()

    def submit(self, requests: list[Request], outlet: _Outlet) -> None:
        with self._lock:
            if self.ended is not None:
                raise HeadlongError(self.ended)
            self._inbox.put(lambda: self._add(requests, outlet))

    def cancel(self, request_ids: list[str]) -> None:
        self._inbox.put(lambda: self._cancel(request_ids))

    def close(self) -> None:
        with self._lock:
            self.ended = self.ended or "the engine has been closed"
            self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        error = None
        while error is None:
            try:
                if not self._read_inbox():
                    break
                if self._engine.has_work:
                    self._advance()
            except Exception as failure:
                log.exception("the engine stopped")
                # Whoever is told, and asks at once how the engine is, must hear what came of it.
                error = None if self._restart(failure) else failure
                self._end_streams(failure)
        while not self._inbox.empty():
            command = self._inbox.get()
            if command is not None:
                command()
        self._end_streams(error or HeadlongError("the engine was closed before this request ended"))

    def _advance(self) -> None:
        step = self._engine.step()
        if self._engine.failure is not None:
            raise HeadlongError(self._engine.failure)
        self._dispatch(step)

    def _restart(self, error: Exception) -> bool:
        """Whether the engine could begin anew: not if it had to too often, nor if its state is beyond repair."""
        now = time.monotonic()
        told = str(error) if isinstance(error, HeadlongError) else repr(error)
        if len(self._restarts) == MAX_RESTARTS and now - self._restarts[0] < RESTART_SECONDS:
            told += f"; {MAX_RESTARTS} restarts within {RESTART_SECONDS / 60:.0f} minutes did not help"
        else:
            try:
                self._engine.restart()
                self._restarts.append(now)
                log.warning("the engine begins anew after an error: %s", told)
                return True
            except Exception as failure:
                log.exception("the engine cannot begin anew")
                told += f"; it could not begin anew: {failure!r}"
        with self._lock:
            self.ended = self.ended or f"the engine stopped after an error: {told}"
        return False

    def _end_streams(self, error: Exception) -> None:
        _deliver([(outlet, error) for outlet in {outlet for _, outlet in self._streams.values()}])
        self._streams.clear()

    def _read_inbox(self) -> bool:
        """Does what was asked for since the last step; waits while there is nothing to do. False: stop."""
        while True:
            try:
                command = self._inbox.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _add(self, requests: list[Request], outlet: _Outlet) -> None:
        for number, request in enumerate(requests):
            try:
                self._engine.add(request)
            except HeadlongError as error:
                self._cancel([earlier.id for earlier in requests[:number]])
                _deliver([(outlet, error)])
                return
            self._streams[request.id] = (self._service.collector(request), outlet)

    def _cancel(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._engine.cancel(request_id)
            self._streams.pop(request_id, None)

    def _dispatch(self, step: StepOutput) -> None:
        if self._on_step is not None:
            self._on_step(step)
        outputs = {output.request.id: output for output in step.rows}
        items: list[tuple[_Outlet, Item]] = []
        for request_id, (collector, outlet) in list(self._streams.items()):
            if request_id not in outputs:
                collector.wait(step)
                continue
            items.append((outlet, collector.take(step, outputs[request_id])))
            if collector.completion is not None:
                del self._streams[request_id]
        _deliver(items)


def _deliver(items: list[tuple[_Outlet, Item]]) -> None:
    """Hands a step's items over with one wake-up for each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Outlet, Item]]] = {}
    for outlet, item in items:
        by_loop.setdefault(outlet.loop, []).append((outlet, item))
    for loop, group in by_loop.items():
        # An event loop that has ended has nobody waiting; the engine serves the others.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_put_all, group)


def _put_all(group: list[tuple[_Outlet, Item]]) -> None:
    for outlet, item in group:
        outlet.items.put_nowait(item)
