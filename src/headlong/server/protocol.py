"""The guard at the socket: bounds what a client may send before the application ever sees a request.

Sits between uvicorn's HTTP/1.1 protocol and the network. Too long a head is a 431, too long a target a 414, a head or
body that takes too long a 408, no HTTP at all a 400, one connection too many a 503, each in OpenAI's form and followed
by the end of the connection. Knows bytes and clocks; no route, no key.
"""

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from http import HTTPStatus
from typing import Any, ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headlong.server.settings import Settings

MAX_TARGET_BYTES = 8192
MAX_HEADERS = 256
SLICE_BYTES = 16384
"""The parser is fed this much at a time, so that a flood is noticed before it is stored."""
LINGER_SECONDS = 3.0
"""How long a client that is still sending may read its last answer. Closing at once would make its system drop it."""
MAX_LINGERING = 256
BODY_GRACE_SECONDS = 1.0
"""The application has its own clock for bodies and gives the better answer; ours is for bodies nobody reads."""
log = logging.getLogger(__name__)


CountFn = Callable[[int, str], None]


@dataclass(frozen=True)
class Limits:
    """The limits of one connection, and how many there may be. The defaults are those of the settings."""

    max_header_bytes: int = Settings.max_header_bytes
    max_connections: int = Settings.max_connections
    header_timeout: float = Settings.header_timeout
    body_timeout: float = Settings.body_timeout
    write_timeout: float = Settings.write_timeout

    @classmethod
    def of(cls, settings: Settings) -> "Limits":
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})


@dataclass(frozen=True)
class Refusal:
    """The last thing a connection is told."""

    status: int
    code: str
    message: str

    def encode(self) -> bytes:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": None, "code": self.code}
        body = json.dumps({"error": error}).encode()
        head = (
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        return head.encode() + body


INVALID = Refusal(400, "invalid_http", "this is not a valid HTTP/1.1 request")
LATE_HEAD = Refusal(408, "request_timeout", "the request's head did not arrive in time; send it at once")
LATE_BODY = Refusal(408, "request_timeout", "the request's body did not arrive in time; send it at once")
LONG_TARGET = Refusal(414, "target_too_long", f"the path and query exceed {MAX_TARGET_BYTES} bytes")
LARGE_HEAD = Refusal(
    431, "headers_too_large", "the request's head is too large; send fewer or shorter header fields"
)
FULL = Refusal(503, "too_many_connections", "the server has as many connections as it takes; try again later")


class _Stop(Exception):
    """Raised inside a parser's callback to end the parsing."""


class _Transport:
    """Passes everything on to the connection's transport, except how it closes."""

    def __init__(self, transport: asyncio.Transport, protocol: "GuardedProtocol") -> None:
        self._transport = transport
        self._protocol = protocol

    def close(self) -> None:
        self._protocol.close()

    def is_closing(self) -> bool:
        return self._protocol in self._protocol.lingering or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _uncounted(status: int, reason: str) -> None:
    """Counts nothing."""


def guarded(limits: Limits, count: CountFn = _uncounted) -> type["GuardedProtocol"]:
    """The protocol class of one server. `count` is told of every refusal: its status and its code."""
    own = {"limits": limits, "lingering": set(), "count": staticmethod(count)}
    return type("GuardedProtocol", (GuardedProtocol,), own)


class GuardedProtocol(HttpToolsProtocol):
    """One connection, which takes one request at a time. A client that sends another one before it was answered gets
    the answer to the first, and the connection is closed."""

    limits = Limits()
    count = staticmethod(_uncounted)
    lingering: ClassVar[set["GuardedProtocol"]] = set()
    """Connections that were answered for the last time while their client was still sending."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deaf = self._lost = False
        self._refusal = INVALID
        self._in_message = self._in_body = self._repeating = False
        self._loose_bytes = 0
        """Bytes fed since a message began or gave a piece of its body: those of a head that does not end, or of a
        trailer."""
        self._head_bytes = 0
        self._moved = False
        self._clock: asyncio.TimerHandle | None = None
        self._write_clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        full = len(self.connections) >= self.limits.max_connections
        super().connection_made(transport)
        # asyncio does this for sockets it made itself. Without it a chunk waits for the client's delayed
        # acknowledgement of the one before: 40 ms on every connection that is kept.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._raw = transport
        self.transport = _Transport(transport, self)  # type: ignore[assignment]
        if full:
            self.connections.discard(self)
            self._refuse(FULL)
        else:
            self._set_clock(self.limits.header_timeout, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._stop_clock()
        self._stop_write_clock()
        self.lingering.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            self._loose_bytes += len(data)
            if self._loose_bytes > self.limits.max_header_bytes and self not in self.lingering:
                self._raw.abort()
            return
        self._unset_keepalive_if_required()
        if not self._in_message and not self._is_answering and self._clock is None:
            self._set_clock(self.limits.header_timeout, self._head_is_late)
        for start in range(0, len(data), SLICE_BYTES):
            piece = data[start : start + SLICE_BYTES]
            self._moved = False
            self._feed(piece)
            if self._deaf:
                return
            self._loose_bytes += 0 if self._moved else len(piece)
            if self._loose_bytes > self.limits.max_header_bytes:
                self._refuse(LARGE_HEAD)
                return

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline(data[offer.args[0] :])
        except httptools.HttpParserError:
            if not self._deaf:
                self._refuse(self._refusal)

    def _decline(self, rest: bytes) -> None:
        """Answers in HTTP/1.1 who offers HTTP/2 or a websocket, as the standard has it. The parser takes all that
        follows for the other protocol, so a new one reads on, with the head as if nothing had been offered."""
        framing = (b"content-length", b"transfer-encoding")
        head = [b"%s: %s\r\n" % (name, value) for name, value in self.headers if name in framing]
        self.parser = httptools.HttpRequestParser(self)
        self._repeating = True
        self._feed(b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(head))
        self._feed(rest)

    def eof_received(self) -> None:
        """Does nothing: a client that stops sending counts as gone, so that what it asked for is freed at once."""

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_clock is None:
            self._write_clock = self.loop.call_later(self.limits.write_timeout, self._raw.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_clock()

    def on_message_begin(self) -> None:
        if self._repeating:
            return
        if self._is_answering:
            self._listen_no_more()
            raise _Stop
        self._restart_count()
        self._in_message = True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._repeating:
            return
        super().on_url(url)
        if len(self.url) > MAX_TARGET_BYTES:
            self._stop_with(LONG_TARGET)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._repeating:
            return
        self._count_head(len(name) + len(value) + 4)
        if self._in_body:
            return  # a trailer: the headers have been read and must not change any more
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._stop_with(LARGE_HEAD)

    def on_headers_complete(self) -> None:
        if self._repeating:
            self._repeating = False
            return
        super().on_headers_complete()
        self._in_body = True
        self._set_clock(self.limits.body_timeout + BODY_GRACE_SECONDS, self._body_is_late)

    def on_body(self, body: bytes) -> None:
        self._moved, self._loose_bytes = True, 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # its body is still to come
        self._restart_count()
        self._in_message = self._in_body = False
        self._stop_clock()
        super().on_message_complete()
        if not self._is_answering and self.timeout_keep_alive_task is None:
            # Answered before its body was through: uvicorn's timer was stopped by the rest of the body.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _restart_count(self) -> None:
        self._moved, self._loose_bytes, self._head_bytes = True, 0, 0

    def _count_head(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > self.limits.max_header_bytes:
            self._stop_with(LARGE_HEAD)

    def _stop_with(self, refusal: Refusal) -> None:
        self._refusal = refusal
        raise _Stop

    def _listen_no_more(self) -> None:
        """Lets the running answer end and drops whatever else comes; the connection ends with the answer."""
        self._deaf, self._loose_bytes = True, 0
        self.cycle.keep_alive = False

    def _head_is_late(self) -> None:
        self._clock = None
        if self._in_message or self._loose_bytes:
            self._refuse(LATE_HEAD)
        else:
            self._raw.close()

    def _body_is_late(self) -> None:
        self._clock = None
        self._refuse(LATE_BODY)

    def _refuse(self, refusal: Refusal) -> None:
        """Says why and ends the connection. An answer that has begun, or been given, is the last word instead."""
        if self._is_answering and not self._in_message:
            self._listen_no_more()
            return
        log.debug("connection refused", extra={"fields": {"status": refusal.status, "code": refusal.code}})
        self.count(refusal.status, refusal.code)
        self._deaf = True
        silent = self._in_body and self.cycle.response_started
        if self._is_answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not silent:
            self._raw.write(refusal.encode())
        self.close()

    def close(self) -> None:
        """Closes; where the client is still sending, only our half at first. In time for good, whoever reads."""
        self._unset_keepalive_if_required()
        if self._lost:
            return
        if (
            (self._in_message or self._deaf)
            and len(self.lingering) < MAX_LINGERING
            and self._raw.can_write_eof()
        ):
            self._deaf = True
            self.lingering.add(self)
            self.flow.resume_reading()
            with suppress(OSError):  # of a client that is gone, which we are about to be told
                self._raw.write_eof()
            self._set_clock(LINGER_SECONDS, self._raw.abort)
        else:
            self._raw.close()
            self._set_clock(self.limits.write_timeout, self._raw.abort)

    def _set_clock(self, seconds: float, late: Callable[[], None]) -> None:
        self._stop_clock()
        self._clock = self.loop.call_later(seconds, late)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _stop_write_clock(self) -> None:
        if self._write_clock is not None:
            self._write_clock.cancel()
            self._write_clock = None
