"""The thread that steps an engine: requests go in through its inbox, chunks come out on event loops.

Decides nothing about tokens. An engine that fails begins anew here, a bounded number of times.
"""

import asyncio
import contextlib
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from headlong.completion import Chunk
from headlong.engine.collect import Collector
from headlong.engine.service import Service
from headlong.engine.watchdog import Watchdog
from headlong.errors import HeadlongError
from headlong.types import Request, RowOutput, StepOutput

log = logging.getLogger(__name__)
Item = Chunk | BaseException
OnStep = Callable[[StepOutput], None]
Command = Callable[[], Iterator[None] | None]
"""What the engine's thread is asked to do; where that may take long, piece by piece."""
PIECES_SECONDS = 0.01
"""How long running rows wait, before a step, for what else is asked for: a request may have thousands of prompts."""
MAX_RESTARTS = 3
RESTART_SECONDS = 600.0
"""An engine that failed begins anew so often within this time; after that it stays down and says so."""
JOIN_SECONDS = 0.5
CLOSED = "the engine has been closed"
DRAINING = "the engine is shutting down; it finishes what it has and takes nothing new"


@dataclass(frozen=True, eq=False)
class Outlet:
    """Where a stream's items go: a queue of the event loop that waits for them."""

    loop: asyncio.AbstractEventLoop
    items: asyncio.Queue[Item]


class EngineLoop:
    """The thread that steps the engine. All contact with the engine goes through its inbox."""

    def __init__(
        self, service: Service, on_step: OnStep | None = None, step_timeout: float | None = None
    ) -> None:
        self._service = service
        self._engine = service.engine
        self._on_step = on_step
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._begun: deque[Iterator[None]] = deque()
        """What was asked for and is done piece by piece, in order."""
        self._streams: dict[str, tuple[Collector, Outlet]] = {}
        self._lock = threading.Lock()
        self._restarts: deque[float] = deque(maxlen=MAX_RESTARTS)
        """When the engine began anew, the last few times."""
        self.ended: str | None = None
        """Why nothing more is taken; set under the lock, after which the inbox only empties."""
        self._expected: set[Outlet] = set()
        """Outlets of requests that are in the inbox."""
        self.hung = False
        """Whether a step does not end. The thread may go on one day, but nobody listens to it any more."""
        self._watchdog = None if step_timeout is None else Watchdog(step_timeout, self._give_up)
        self._draining = False
        """Whether the thread ends as soon as the engine has nothing left to do."""
        self._thread = threading.Thread(target=self._run, name="headlong-engine", daemon=True)
        """Started with the first request: until then whoever loaded the engine may step it."""

    def submit(self, requests: Sequence[Request], outlet: Outlet) -> None:
        """Queues the requests; what comes of them goes to the outlet."""
        with self._lock:
            if self.ended is not None:
                raise HeadlongError(self.ended)
            self._expected.add(outlet)
            self._inbox.put(lambda: self._take_in(requests, outlet))
            if self._thread.ident is None:
                self._thread.start()

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Ends requests and tells their outlets."""
        self._inbox.put(lambda: self._cancel(request_ids))

    def abandon(self, request_ids: Sequence[str]) -> None:
        """Ends requests whose outlets nobody reads any more."""
        self._inbox.put(lambda: self._abandon(request_ids))

    def drain(self) -> None:
        """Takes nothing new and returns when all that was submitted has ended."""
        with self._lock:
            self.ended = self.ended or DRAINING
            self._inbox.put(self._begin_to_drain)
        self._join()

    def close(self) -> None:
        """Ends the thread after its present step; outlets of what is left get an error."""
        with self._lock:
            self.ended = self.ended or CLOSED
            self._inbox.put(None)
        self._join()

    def _join(self) -> None:
        while self._thread.ident is not None and self._thread.is_alive() and not self.hung:
            self._thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        if self._watchdog is None:
            self._serve()
            return
        self._watchdog.watch_this_thread()
        try:
            self._serve()
        finally:
            self._watchdog.close()

    def _serve(self) -> None:
        error = None
        while error is None and not self.hung:
            try:
                if not self._read_inbox():
                    break
                self._do_pieces(PIECES_SECONDS)
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
                self._begin(command)
        self._do_pieces(math.inf)
        self._end_streams(error or HeadlongError("the engine was closed before this request ended"))

    def _advance(self) -> None:
        with self._watched():
            step = self._engine.step()
        if self.hung:
            return
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

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        if self._watchdog is None:
            yield
            return
        self._watchdog.begin()
        try:
            yield
        finally:
            self._watchdog.end()

    def _give_up(self, why: str) -> None:
        """The engine's thread hangs: tells everybody who waits for it, from another one."""
        error = HeadlongError(f"the engine hangs: {why}; the server has to be started again")
        with self._lock:
            self.ended = self.ended or str(error)
            self.hung = True
            outlets = {outlet for _, outlet in list(self._streams.values())} | self._expected
        _deliver([(outlet, error) for outlet in outlets])

    def _end_streams(self, error: Exception) -> None:
        _deliver([(outlet, error) for outlet in {outlet for _, outlet in self._streams.values()}])
        self._streams.clear()

    def _read_inbox(self) -> bool:
        """Does what was asked for since the last step; waits while there is nothing to do. False: stop."""
        while True:
            has_work = self._engine.has_work or bool(self._begun)
            if self._draining and not has_work:
                return False
            try:
                command = self._inbox.get(block=not has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            self._begin(command)

    def _begin(self, command: Command) -> None:
        pieces = command()
        if pieces is not None:
            self._begun.append(pieces)

    def _do_pieces(self, seconds: float) -> None:
        """Goes on with what was begun, for about so long."""
        until = time.monotonic() + seconds
        while self._begun and time.monotonic() < until:
            with self._watched():  # to cancel a row may mean to wait for the device
                if next(self._begun[0], self) is self:
                    self._begun.popleft()

    def _begin_to_drain(self) -> None:
        self._draining = True

    def _take_in(self, requests: Sequence[Request], outlet: Outlet) -> Iterator[None]:
        yield from self._add(requests, outlet)
        with self._lock:
            self._expected.discard(outlet)

    def _add(self, requests: Sequence[Request], outlet: Outlet) -> Iterator[None]:
        for number, request in enumerate(requests):
            try:
                self._engine.add(request)
            except HeadlongError as error:
                yield from self._abandon([earlier.id for earlier in requests[:number]])
                _deliver([(outlet, error)])
                return
            self._streams[request.id] = (self._service.collector(request), outlet)
            yield

    def _abandon(self, request_ids: Sequence[str]) -> Iterator[None]:
        for request_id in request_ids:
            self._engine.cancel(request_id)
            self._streams.pop(request_id, None)
            yield

    def _cancel(self, request_ids: Sequence[str]) -> Iterator[None]:
        items: list[tuple[Outlet, Item]] = []
        for request_id in request_ids:
            step = self._engine.cancel(request_id)
            if request_id in self._streams:
                collector, outlet = self._streams.pop(request_id)
                # The engine tells nothing of a row that came to its end while this was on the way.
                ended = RowOutput(collector.request, (), "", 0, 0, (), finish_reason="cancelled")
                items.append((outlet, collector.take(step, *step.rows or (ended,))))
            yield
        _deliver(items)

    def _dispatch(self, step: StepOutput) -> None:
        if self._on_step is not None:
            self._on_step(step)
        outputs = {output.request.id: output for output in step.rows}
        items: list[tuple[Outlet, Item]] = []
        for request_id, (collector, outlet) in list(self._streams.items()):
            if request_id not in outputs:
                collector.wait(step)
                continue
            items.append((outlet, collector.take(step, outputs[request_id])))
            if collector.completion is not None:
                del self._streams[request_id]
        _deliver(items)


def _deliver(items: list[tuple[Outlet, Item]]) -> None:
    """Hands a step's items over with one wake-up for each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Outlet, Item]]] = {}
    for outlet, item in items:
        by_loop.setdefault(outlet.loop, []).append((outlet, item))
    for loop, group in by_loop.items():
        # An event loop that has ended has nobody waiting; the engine serves the others.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_put_all, group)


def _put_all(group: list[tuple[Outlet, Item]]) -> None:
    for outlet, item in group:
        outlet.items.put_nowait(item)
