"""Answers a request from a generation: all at once, or as a stream of events.

Owns what every answer needs: the time limit, noticing that the client left, freeing everything however it ends,
and one record of the request. A dialect brings an `Encoder`; nothing here knows a wire format.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headlong.errors import HeadlongError
from headlong.server.errors import CLIENT_GONE, ApiError, as_api_error
from headlong.server.generation import Generation, Job, Piece, Result
from headlong.server.observer import Observer
from headlong.server.writing import beside, written

log = logging.getLogger(__name__)
DONE = "data: [DONE]\n\n"
"""The event that ends OpenAI's older streams."""
SERVER_SENT = "text/event-stream"
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
PART = 1 << 18
"""How much of an answer is sent at once: bytes, or characters of a text."""
Value = TypeVar("Value")


class WholeEncoder(Protocol):
    """Writes answers in one piece in one dialect."""

    def whole(self, result: Result) -> dict[str, Any]: ...


class Encoder(WholeEncoder, Protocol):
    """Writes answers in one dialect. The streaming methods return whole events or lines, or nothing."""

    def start(self) -> str: ...
    def piece(self, piece: Piece) -> str: ...
    def end(self, result: Result) -> str: ...
    def error(self, error: ApiError) -> str: ...


class ClientGone(Exception):
    """Raised where the client has left, so that nobody is there to answer."""


def event(data: Any, name: str | None = None) -> str:
    """One server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {written(data)}\n\n"


class JsonText(Response):
    """JSON that was written before. A long one is handed over in parts: the event loop serves others in between."""

    media_type = "application/json"

    def __init__(self, text: str, status_code: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text.encode("utf-8", "replace"), status_code, dict(headers or {}))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self.body) <= PART:
            await super().__call__(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for start in range(0, len(self.body), PART):
            part, more = self.body[start : start + PART], start + PART < len(self.body)
            await send({"type": "http.response.body", "body": part, "more_body": more})
            await asyncio.sleep(0)


class JsonReply(JsonText):
    def __init__(self, data: Any, status_code: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(written(data), status_code, headers)


class Exchange:
    """A request that was admitted, until the last byte of its answer. `held` is let go at the end."""

    def __init__(
        self, request: Request, job: Job, generation: Generation, held: contextlib.AsyncExitStack
    ) -> None:
        server = request.app.state.server
        self._request = request
        self._generation = generation
        self.job = job
        self.held = held
        self._seconds: float = server.settings.request_timeout
        self._observer: Observer = server.observer
        self._record = self._observer.begin(request, job, generation.model)
        request.state.recorded = True

    @property
    def result(self) -> Result:
        """Everything that was generated so far."""
        return self._generation.result

    @property
    def num_tokens(self) -> int:
        """Tokens that were generated so far, for clients that left, too."""
        return self._record.num_tokens

    async def whole(self, encoder: WholeEncoder) -> Response:
        """The answer in one piece."""
        async with self.held:
            with self.recorded():
                await unless_gone(self._request.receive, self._run(None))
                return await beside(lambda: JsonReply(encoder.whole(self._generation.result)))

    def stream(self, encoder: Encoder, media_type: str = SERVER_SENT) -> Response:
        return _Stream(self, encoder, media_type)

    async def send_all(self, send: Send, encoder: Encoder) -> None:
        """Sends a stream to its end, which may be an error said in the stream's own way."""

        async def write(text: str) -> None:
            for start in range(0, len(text), PART):
                part = text[start : start + PART].encode("utf-8", "replace")
                await send({"type": "http.response.body", "body": part, "more_body": True})

        async def write_piece(piece: Piece) -> None:
            await write(
                await beside(lambda: encoder.piece(piece)) if self._is_long(piece) else encoder.piece(piece)
            )

        try:
            await write(await beside(encoder.start))
            await self._run(write_piece)
            await write(await beside(lambda: encoder.end(self._generation.result)))
        except Exception as error:
            told = _told(error)
            self._record.failed(told)
            self._request.state.error = told
            await write(await beside(lambda: encoder.error(told)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _is_long(self, piece: Piece) -> bool:
        """Whether a dialect may tell a whole block once more, with the log-probabilities of all its tokens."""
        return self.job.params.logprobs is not None and any(one.what == "closed" for one in piece.changes)

    async def _run(self, write: Callable[[Piece], Awaitable[None]] | None) -> None:
        try:
            async with (
                asyncio.timeout(self._seconds),
                contextlib.aclosing(self._generation.pieces()) as pieces,
            ):
                async for piece in pieces:
                    self._record.saw(piece)
                    if write is not None:
                        await write(piece)
        except TimeoutError:
            raise ApiError(
                504,
                f"the request took longer than {self._seconds:g} s; ask for fewer tokens, or raise request_timeout",
                type="timeout_error",
                code="request_timeout",
            ) from None

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Records the request once, however the block inside ends."""
        try:
            yield
        except (ClientGone, asyncio.CancelledError):
            self._record.gone()
            self._request.state.error = ApiError(CLIENT_GONE, "the client left", code="client_closed")
            raise
        except Exception as error:
            self._record.failed(_told(error))
            raise
        finally:
            self._observer.finish(self._record, self._generation.result)


class _Stream(Response):
    """A response whose body is made while it is sent."""

    def __init__(self, exchange: Exchange, encoder: Encoder, media_type: str) -> None:
        super().__init__(headers=STREAM_HEADERS, media_type=media_type)
        del self.headers["content-length"]
        self._exchange = exchange
        self._encoder = encoder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        exchange = self._exchange
        async with exchange.held:
            with contextlib.suppress(ClientGone), exchange.recorded():
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await unless_gone(receive, exchange.send_all(send, self._encoder))


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Value]) -> Value:
    """Does `work`, but stops it as soon as the client leaves."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for one in (task, watch):
            if not one.done():
                one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _told(error: Exception) -> ApiError:
    told = as_api_error(error)
    if told.status >= 500 and not isinstance(error, HeadlongError):
        log.error("a request failed", exc_info=error)
    return told
