"""Bytes off a socket -> server-sent events, however the bytes were cut. Knows the format, not what is sent in it.

Lines end in LF, CRLF or CR, as the format allows; comments are dropped, several `data` lines are one event.
"""

import re
from typing import NamedTuple

MAX_EVENT = 8 << 20
"""The most bytes of one event. A server that sends more without an end of line is not sending events."""

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Event(NamedTuple):
    name: str
    """The event's type; `message` where the server gave none."""
    data: str


class MalformedStream(Exception):
    """What came is no stream of events."""


class EventReader:
    """Feed it what arrives; it returns the events that are complete."""

    def __init__(self) -> None:
        self._tail = b""
        self._after_cr = False
        self._started = False
        self._name = ""
        self._data: list[str] = []
        self._size = 0

    def feed(self, received: bytes) -> list[Event]:
        if self._after_cr and received:
            # The LF of a CRLF that was cut in two: its CR has ended the line already.
            received = received[1:] if received[:1] == b"\n" else received
            self._after_cr = False
        self._after_cr = self._after_cr or received.endswith(b"\r")
        lines = _LINE_END.split(received)
        lines[0] = self._tail + lines[0]
        self._tail = lines.pop()
        if self._size + len(self._tail) > MAX_EVENT:
            raise MalformedStream(f"an event of more than {MAX_EVENT} bytes")
        return [event for line in lines if (event := self._line(line)) is not None]

    def finish(self) -> list[Event]:
        """What the end of the stream completes: servers leave out the last blank line."""
        last = [self._line(self._tail), self._line(b"")] if self._tail else [self._line(b"")]
        self._tail = b""
        return [event for event in last if event is not None]

    def _line(self, line: bytes) -> Event | None:
        if not self._started:
            self._started, line = True, line.removeprefix(_BYTE_ORDER_MARK)
        if not line:
            event = Event(self._name or "message", "\n".join(self._data)) if self._data else None
            self._name, self._data, self._size = "", [], 0
            return event
        field, _, value = line.partition(b":")
        if field in (b"data", b"event"):
            text = value.removeprefix(b" ").decode("utf-8", errors="replace")
            if field == b"data":
                self._data.append(text)
                self._size += len(value)
            else:
                self._name = text
        return None
