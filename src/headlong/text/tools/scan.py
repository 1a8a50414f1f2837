"""Finds the calls in a text that comes in pieces, and passes on the text around them.

What all formats share: where a call may begin, what becomes of white space next to it, how calls are
numbered, and how text that only looked like a call is given back. Knows no format: that is the part
of `begin` and `read`, and of the markers.
"""

import re
from abc import ABC, abstractmethod

from headlong.text.events import (
    WHITE,
    Content,
    OutputEvent,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    begun_len,
    new_call_id,
)

MAX_SPACE = 256
"""The most white space between the tags that begin a call."""
MAX_NAME = 256


class CallScanner(ABC):
    """Finds the tool calls of one output. The events, with pieces joined, do not depend on how the text was cut.

    Until a call is certain (`accept`) its text is kept, and `reject` turns it back into content; what
    follows its first character is then searched again. White space directly before a call is dropped,
    and white space after one unless text follows. A name that no tool of the request has is reported
    like any other: the client knows better than we do what to tell the model.
    """

    markers: tuple[str, ...]
    """What may begin a call. No marker contains the beginning of another, itself included."""
    tails: tuple[str, ...] = ()
    """What belongs to a call that is over: closing tags, in this order, each of which may be missing."""
    joint = ""
    """A text that begins another call, but only right behind one."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0  # the first character of `text` that is not yet read
        self.final = False
        self._start: int | None = None  # where the call that is not yet certain begins in `text`
        self._carried: list[str] = []  # its text from earlier pieces
        self._space: list[str] = []  # white space that counts only if text follows
        self._after_call = False
        self._num_tails = 0  # of the call that is over: those that cannot come any more
        self._pieces: list[str] = []  # of one event that is still growing: content, or a call's arguments
        self._in_arguments = False
        self._events: list[OutputEvent] = []
        self._num_calls = 0
        self._state = self._in_text
        self._marker = re.compile("|".join(map(re.escape, self.markers)))

    @abstractmethod
    def begin(self) -> None:
        """A marker stands at `at`: a call may begin here."""

    @abstractmethod
    def read(self) -> bool:
        """Read on in the call, and say whether something is to be done at once: after `accept`, `reject`
        and `close` yes, when more text is needed no. When `final`, no more comes, and `reject` or `close`
        must follow."""

    def push(self, text: str) -> list[OutputEvent]:
        """Take the next piece of text; return what is settled by it."""
        if self._start is not None:
            self._carried.append(self.text[self._start : self.at])
            self._start = 0
        self.text = self.text[self.at :] + text
        self.at = 0
        return self._run()

    def finish(self) -> list[OutputEvent]:
        """The text is over: return what was held."""
        self.final = True
        events = self._run()
        if self._space and not self._after_call:
            self._grow("".join(self._space), in_arguments=False)
        self._flush()
        return events + self._take()

    def accept(self, name: str) -> None:
        """Called once it is certain that this is a call, with its name."""
        self._space.clear()
        self._carried.clear()
        self._start = None
        self._emit(ToolCallStart(self._num_calls, new_call_id(), name))

    def arguments(self, text: str) -> None:
        """Passes on more of the accepted call's arguments."""
        if text:
            self._grow(text, in_arguments=True)

    def close(self) -> None:
        """Ends the accepted call; what follows is read as text."""
        self._emit(ToolCallEnd(self._num_calls))
        self._num_calls += 1
        self._after_call = True
        self._num_tails = 0
        self._state = self._after_end

    def reject(self) -> None:
        """Gives up on the call: its text is content, in which another call may begin."""
        assert self._start is not None
        if self._carried:
            self.text = "".join(self._carried) + self.text[self._start :]
            self._carried.clear()
            self._start = 0
        self.at = self._start + 1
        self.put_text(self.text[self._start : self.at])
        self._start = None
        self._state = self._in_text

    def put_text(self, text: str) -> None:
        """Pass on text that is no call."""
        core = text.rstrip(WHITE)
        if core:
            self._grow("".join(self._space) + core, in_arguments=False)
            self._space.clear()
            self._after_call = False
        if len(core) < len(text):
            self._space.append(text[len(core) :])

    def step_into(self, call: str, *around: str) -> str | None:
        """Steps behind the tag of a call, and behind what may stand `around` several calls where that comes first.
        Returns the tag of the call; "" if more text is needed, None if there is none."""
        for tag in around:
            if self.text.startswith(tag, self.at):
                self.at += len(tag)
                if self.skip_space() > MAX_SPACE:
                    return None
        found = self.next_is(call)
        self.at += len(found or "")
        return found

    def skip_space(self) -> int:
        """Step over white space; return how much."""
        text, at = self.text, self.at
        while at < len(text) and text[at] in WHITE:
            at += 1
        self.at, skipped = at, at - self.at
        return skipped

    def up_to(self, stop: str) -> str | None:
        """The name that stands between `at` and `stop`, after stepping behind both; "" if more text is needed, None
        if there is no name."""
        end = self.text.find(stop, self.at, self.at + MAX_NAME + len(stop))
        if end < 0:
            return None if self.final or len(self.text) - self.at >= MAX_NAME + len(stop) else ""
        name = self.text[self.at : end].strip(WHITE)
        if "\n" in name or "<" in name:
            return None
        self.at = end + len(stop)
        return name or None

    def next_is(self, *tags: str) -> str | None:
        """The tag that stands at `at`; "" if one may be on its way; None if what is there is no tag."""
        for tag in tags:
            if self.text.startswith(tag, self.at):
                return tag
        rest = len(self.text) - self.at
        if not self.final and any(
            rest < len(tag) and self.text.endswith(tag[:rest], self.at) for tag in tags
        ):
            return ""
        return None

    def _run(self) -> list[OutputEvent]:
        while self._state():
            pass
        self._flush()
        return self._take()

    def _in_text(self) -> bool:
        found = self._marker.search(self.text, self.at)
        if found:
            self._start = found.start()
            self.put_text(self.text[self.at : self._start])
            self.at = self._start
            self._state = self.read
            self.begin()
            return True
        settled = len(self.text)
        if not self.final:
            settled -= begun_len(self.text[self.at :], self.markers)
        self.put_text(self.text[self.at : settled])
        self.at = settled
        return False

    def _after_end(self) -> bool:
        """Nothing but white space and the closing tags, which may be missing, belongs to the call."""
        start = self.at
        if self.skip_space():
            self._space.append(self.text[start : self.at])
        joint = (self.joint,) if self.joint else ()
        tag = self.next_is(*self.tails[self._num_tails :], *joint)
        if tag == "":
            return False
        if tag and tag in self.tails:
            self.at += len(tag)
            self._space.clear()
            self._num_tails = self.tails.index(tag) + 1
        elif tag:
            self._start = self.at
            self._state = self.read
            self.begin()
        else:
            self._state = self._in_text
        return True

    def _emit(self, event: OutputEvent) -> None:
        self._flush()
        self._events.append(event)

    def _grow(self, text: str, in_arguments: bool) -> None:
        if in_arguments != self._in_arguments:
            self._flush()
            self._in_arguments = in_arguments
        self._pieces.append(text)

    def _flush(self) -> None:
        if self._pieces:
            text = "".join(self._pieces)
            self._events.append(
                ToolCallArguments(self._num_calls, text) if self._in_arguments else Content(text)
            )
            self._pieces.clear()

    def _take(self) -> list[OutputEvent]:
        events, self._events = self._events, []
        return events
