"""The asynchronous front end: the engine steps in a thread of its own, streams come out on the event loop."""

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
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
Deliver = Callable[[Chunk | BaseException], None]


class AsyncLLM:
    """Many streams over one engine. Start it with `await AsyncLLM.load(...)`, end it with `await close()`."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._loop = EngineLoop(service)
        self._ids = itertools.count()

    @classmethod
    async def load(
        cls, model: str | Path | None = None, *, progress: ProgressFn = silent, **options: Any
    ) -> "AsyncLLM":
        """Loads off the event loop; options are those of `EngineConfig`."""
        return cls(await asyncio.to_thread(Service.load, model, EngineConfig(**options), progress))

    async def stream(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None, **template: Any
    ) -> AsyncIterator[Chunk]:
        """Yields what each step adds. Leaving the loop early cancels the rest and frees its pages at once."""
        params = params or SamplingParams()
        if not isinstance(prompt, Sequence) or not prompt or isinstance(prompt[0], (str, int)):
            tokens = self.service.encode(prompt)  # type: ignore[arg-type]
        else:
            tokens = self.service.encode_chat(prompt, **template)  # type: ignore[arg-type]
        loop, chunks = asyncio.get_running_loop(), asyncio.Queue[Chunk | BaseException]()

        def deliver(item: Chunk | BaseException) -> None:
            # An event loop that has ended has nobody waiting; the engine serves the others.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(chunks.put_nowait, item)

        requests = self.service.requests(tokens, params, f"async-{next(self._ids)}")
        self._loop.submit(requests, deliver)
        unfinished = len(requests)
        try:
            while unfinished:
                item = await chunks.get()
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

    async def close(self) -> None:
        """Stops the thread; streams still open end with an error."""
        await asyncio.to_thread(self._loop.close)


class EngineLoop:
    """The thread that steps the engine. All contact with the engine goes through its inbox."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._engine = service.engine
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, tuple[Collector, Deliver]] = {}
        self._lock = threading.Lock()
        self._ended: str | None = None
        """Why nothing more is taken; set under the lock, after which the inbox only empties."""
        self._thread = threading.Thread(target=self._run, name="headlong-engine", daemon=True)
        self._thread.start()

    def submit(self, requests: list[Request], deliver: Deliver) -> None:
        with self._lock:
            if self._ended is not None:
                raise HeadlongError(self._ended)
            self._inbox.put(lambda: self._add(requests, deliver))

    def cancel(self, request_ids: list[str]) -> None:
        self._inbox.put(lambda: self._cancel(request_ids))

    def close(self) -> None:
        with self._lock:
            self._ended = self._ended or "the engine has been closed"
            self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        error: BaseException = HeadlongError("the engine was closed before this request ended")
        try:
            while self._read_inbox():
                if self._engine.has_work:
                    self._dispatch(self._engine.step())
        except Exception as failure:
            error = failure
            with self._lock:
                self._ended = f"the engine stopped after an error: {failure!r}"
            log.exception("the engine stopped")
        while not self._inbox.empty():
            command = self._inbox.get()
            if command is not None:
                command()
        for _, deliver in self._streams.values():
            deliver(error)

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

    def _add(self, requests: list[Request], deliver: Deliver) -> None:
        for number, request in enumerate(requests):
            try:
                self._engine.add(request)
            except HeadlongError as error:
                self._cancel([earlier.id for earlier in requests[:number]])
                deliver(error)
                return
            self._streams[request.id] = (self._service.collector(request), deliver)

    def _cancel(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._engine.cancel(request_id)
            self._streams.pop(request_id, None)

    def _dispatch(self, step: StepOutput) -> None:
        outputs = {output.request.id: output for output in step.rows}
        for request_id, (collector, deliver) in list(self._streams.items()):
            if request_id not in outputs:
                collector.wait(step)
                continue
            deliver(collector.take(step, outputs[request_id]))
            if collector.completion is not None:
                del self._streams[request_id]
