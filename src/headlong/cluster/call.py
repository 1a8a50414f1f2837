"""The choices of one prompt on their way through a fleet, whatever becomes of the replicas on the way.

What streamed nothing is sent again. What streamed is resumed where it broke, on a replica like the one that began, with
what was delivered as part of the request. Where there is no replica, one is waited for, as long as the client waits and
one may come. Knows no Ray.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace

from headlong import tracing
from headlong.cluster.board import Board
from headlong.cluster.fleet import Fleet, Item, ReplicaLost
from headlong.cluster.suspicion import Deaths, Suspicion
from headlong.cluster.wire import Facts, Hello, OnTrial, Refused, Work
from headlong.completion import Chunk
from headlong.engine.resume import Delivered
from headlong.engine.row import FAULT
from headlong.errors import HarmfulError, HeadlongError, RequestError
from headlong.types import Request

UNLIKE_SECONDS = 10.0
"""For how long a call may meet replicas that are not like the one that began, though one like it is there."""
PAUSE_SECONDS = 0.1
"""How long to wait before a call is made again that nothing came of, times how often that was, but for the first."""
MAX_PAUSE_SECONDS = 2.0
KEPT_AVOIDED = 16
"""Replicas that a call avoids, since they failed on it: the last ones."""
TROUBLE_SECONDS = 0.5
"""How often a call that waits for a replica asks whether one can come at all."""
log = logging.getLogger(__name__)


class _Unlike(Exception):
    """A replica is not like the one that began."""


class Call:
    """Iterate `chunks` once."""

    def __init__(
        self, fleet: Fleet, board: Board, facts: Facts, requests: Sequence[Request], deaths: Deaths
    ) -> None:
        self._fleet, self._board, self._model = fleet, board, facts.model
        refusal = facts.description.drafting.refusal
        self._rows = {request.id: Delivered(request, refusal) for request in requests}
        self._fingerprint = ""
        """The fingerprint of the replica whose tokens were delivered; empty before."""
        self._replica = ""
        """Who has the call; empty where nobody answered yet."""
        self._avoid: tuple[str, ...] = ()
        self._again = False
        self._suspicion = Suspicion(deaths)
        self._in_vain = 0
        """Attempts since something came of one."""
        self._unlike_since: float | None = None
        """When the call began to meet only replicas that are not like the one that began."""
        self._cancelled: set[str] = set()

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Notes what is not to be sent anywhere any more; the replica that has it is told by others."""
        self._cancelled.update(self._rows.keys() & request_ids)

    async def chunks(self) -> AsyncGenerator[Chunk, None]:
        """What comes of the requests, as one engine would tell it."""
        while self._open():
            try:
                async with contextlib.aclosing(self._attempt()) as chunks:
                    async for chunk in chunks:
                        yield chunk
                if self._open():
                    raise ReplicaLost("its stream ended early")
            except ReplicaLost as error:
                self._lose(error)
                for chunk in self._give_up_lost():
                    yield chunk
                await asyncio.sleep(min(MAX_PAUSE_SECONDS, PAUSE_SECONDS * (self._in_vain - 1)))
            except _Unlike as error:
                for chunk in self._give_up_unlike(error):
                    yield chunk
                await asyncio.sleep(PAUSE_SECONDS)

    async def _attempt(self) -> AsyncGenerator[Chunk, None]:
        """Gives what is left to one replica."""
        self._replica, fingerprint = "", ""
        self._check_hope()
        with tracing.apart("call a replica", self._for_trace(), kind="client") as span:
            work = replace(self._work(), trace=span.carried())
            async with contextlib.aclosing(self._fleet.stream(work)) as items:
                hello = await self._first(items)
                assert isinstance(hello, Hello)
                self._replica, fingerprint = hello.replica, hello.fingerprint
                self._note_given()
                span.annotate({"headlong.replica": hello.replica})
                with self._board.call(hello.replica):
                    async for item in items:
                        if isinstance(item, OnTrial):
                            rows = [row.request.id for row in self._open()]
                            self._suspicion.try_alone(rows, work.alone, _now())
                            log.warning("%s on trial at replica %s", ", ".join(rows), hello.replica)
                        elif isinstance(item, Refused):
                            self._refuse(item)
                        elif isinstance(item, Chunk) and not (row := self._rows[item.request_id]).ended:
                            self._suspicion.take(item, _now())
                            self._in_vain = 0
                            if item.token_ids:
                                self._fingerprint, self._unlike_since = fingerprint, None
                            yield row.take(item)

    async def _first(self, items: AsyncGenerator[Item, None]) -> Item:
        """Whoever answers. Nobody is there for as long as replicas begin; but one must be able to come."""
        task = asyncio.ensure_future(anext(items, None))
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=TROUBLE_SECONDS)
                if not task.done():
                    self._check_hope()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        item = task.result()
        if item is None:
            raise ReplicaLost("it said nothing")
        return item

    def _check_hope(self) -> None:
        if self._board.trouble is not None:
            raise HeadlongError(f"no replica serves: {self._board.trouble}")

    def _for_trace(self) -> dict[str, tracing.Attribute]:
        return {
            tracing.REQUEST_ID: tracing.request_id(next(iter(self._rows))),
            "headlong.resumed": sum(row.begun for row in self._open()),
        }

    def _work(self) -> Work:
        requests = tuple(replace(row.rest(), again=self._again) for row in self._open())
        first = requests[0]
        left = sum(request.params.max_tokens - len(request.resumed) for request in requests)
        return Work(
            tokens=(*first.prompt, *first.resumed),
            weight=len(first.prompt) + left,
            avoid=self._avoid,
            requests=requests,
            model=self._model,
            fingerprint=self._fingerprint,
            alone=self._suspicion.alone,
        )

    def _note_given(self) -> None:
        rows = self._open()
        begun = sum(row.begun for row in rows)
        self._board.gave(self._replica, "requests", len(rows))
        if self._again:
            self._board.gave(self._replica, "taken_over", begun)
            self._board.gave(self._replica, "repeated", len(rows) - begun)

    def _refuse(self, refused: Refused) -> None:
        if refused.kind == "request":
            raise RequestError(refused.why)
        if refused.kind == "failed":
            raise ReplicaLost(refused.why)
        raise _Unlike(refused.why)

    def _lose(self, error: ReplicaLost) -> None:
        self._in_vain += 1
        if not self._replica:  # it reached none, so it ended none
            if self._in_vain == 1:
                log.warning("%s waits for a replica: %s", ", ".join(self._rows), error)
            return
        log.warning("replica %s was lost to %s: %s", self._replica, ", ".join(self._rows), error)
        self._board.lost(self._replica, str(error))
        self._leave()
        self._suspicion.lose(self._replica, [row.request.id for row in self._open()], _now())
        if self._suspicion.guilty:
            raise HarmfulError(
                f"{self._suspicion.losses} replicas were lost to this request, the last of them while it ran alone: "
                f"{error}"
            ) from error

    def _leave(self) -> None:
        self._again = True
        if self._replica and self._replica not in self._avoid:
            self._avoid = (*self._avoid, self._replica)[-KEPT_AVOIDED:]

    def _give_up_lost(self) -> Iterator[Chunk]:
        """Ends what cannot go on without the replica that was lost."""
        for row in self._open():
            params = row.request.params
            if row.request.id in self._cancelled:
                yield row.end("cancelled")
            elif row.begun and not params.free:
                yield row.end(
                    "error",
                    f"{FAULT}: its replica was lost, and text drafted with verify {params.verify!r} cannot be resumed "
                    "by another; send it again, or with verify 'coupled'",
                )

    def _give_up_unlike(self, error: _Unlike) -> Iterator[Chunk]:
        """Ends what nobody is there for who could go on with it."""
        self._leave()
        now = _now()
        self._unlike_since = self._unlike_since or now
        if now - self._unlike_since < UNLIKE_SECONDS and self._board.has(self._model, self._fingerprint):
            return
        begun = [row for row in self._open() if row.begun]
        for row in begun:
            yield row.end(
                "error",
                f"{FAULT}: its replica was lost, and no other can go on with it ({error}); send it again",
            )
        if not begun:
            raise HeadlongError(f"no replica can take this request ({error}); send it again")
        self._fingerprint, self._unlike_since = "", None  # the others streamed nothing: any replica will do

    def _open(self) -> list[Delivered]:
        return [row for row in self._rows.values() if not row.ended]


def _now() -> float:
    return asyncio.get_running_loop().time()
