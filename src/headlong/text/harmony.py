"""What an output of gpt-oss means: messages, each with a channel that says whether it is thought, said or called.

A message is `<|start|>assistant`, which the prompt has already for the first, a header, `<|message|>` and a body up to
`<|end|>`, `<|call|>` or `<|return|>`. What is written to the channel `analysis` is reasoning, what is written to a
function is a call, and all else is the answer. The bodies of two messages of one kind have an empty line between them.
A header that makes no sense is text like any other. Pure text: no tokens, no HTTP.
"""

import re
from collections.abc import Callable

from headlong.text.events import (
    WHITE,
    Content,
    OutputEvent,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    begun_len,
    new_call_id,
)
from headlong.text.tools.harmony import ANALYSIS, CHANNEL, END, FUNCTIONS, MESSAGE, START
from headlong.text.tools.json_stream import JsonObjectReader
from headlong.text.tools.scan import MAX_SPACE

MAX_HEADER = 512
_OPENING = f"{START}assistant"
_CLOSINGS = (END, "<|call|>", "<|return|>")
_SIGNS = (*_CLOSINGS, START, CHANNEL)
_SIGN = re.compile("|".join(map(re.escape, _SIGNS)))
_RECIPIENT = re.compile(r"to=([^\s<]+)")


class HarmonyReader:
    """Reads one output. `lead` is the text by whose end the form of the output is told; without `thinks` reasoning is
    not told from the answer, and without `calls` nothing is taken for a call."""

    def __init__(self, lead: str, thinks: bool, calls: bool):
        self._thinks = thinks
        self._calls = calls
        self._held = ""
        self._final = False
        self._is_thought = lead.endswith(ANALYSIS)
        self._is_new = (
            False  # nothing of the message's body was given out, and a text of its kind came before
        )
        self._spoken: set[bool] = set()  # the kinds of which some text was given out
        self._body: JsonObjectReader | None = None
        self._num_calls = 0
        self._events: list[OutputEvent] = []
        at_header = lead.rstrip(WHITE).endswith(_OPENING)
        self._state: Callable[[], bool] = self._in_header if at_header else self._in_body

    def push(self, text: str) -> list[OutputEvent]:
        """Take the next piece of output; return what is settled by it."""
        self._held += text
        return self._run()

    def finish(self) -> list[OutputEvent]:
        """The output is over: return what was held."""
        self._final = True
        return self._run()

    def _run(self) -> list[OutputEvent]:
        while self._state():
            pass
        events, self._events = self._events, []
        return events

    def _in_header(self) -> bool:
        start, near = self._behind_space(self._held)
        if not near or not _may_begin_header(start):
            return self._no_header()
        end = start.find(MESSAGE, 0, MAX_HEADER + len(MESSAGE))
        if end < 0:
            return self._no_header() if self._final or len(start) >= MAX_HEADER + len(MESSAGE) else False
        before, found, channel = start[:end].removeprefix(START).partition(CHANNEL)
        named = before.strip(WHITE).removeprefix("assistant").strip(WHITE)
        recipient = _RECIPIENT.search(f"{named} {channel}")
        if (
            not found
            or CHANNEL in channel
            or START in channel
            or not (named == "" or _RECIPIENT.match(named))
        ):
            return self._no_header()
        body = start[end + len(MESSAGE) :]
        if recipient and recipient[1].startswith(FUNCTIONS) and recipient[1] != FUNCTIONS and self._calls:
            return self._begin_call(recipient[1].removeprefix(FUNCTIONS), body)
        is_thought = channel.strip(WHITE).startswith("analysis") and not recipient
        is_shown = recipient is not None or (is_thought and not self._thinks)
        self._is_thought = is_thought and self._thinks
        self._is_new = self._is_thought in self._spoken
        if is_shown:
            self._say(start[: end + len(MESSAGE)])
        self._held = body
        self._state = self._in_body
        return True

    def _no_header(self) -> bool:
        """Gives back the beginning of what only looked like a header."""
        self._say(self._held[:1])
        self._held = self._held[1:]
        self._state = self._in_body
        return True

    def _in_body(self) -> bool:
        found = _SIGN.search(self._held)
        if found is None:
            settled = len(self._held) - (0 if self._final else begun_len(self._held, _SIGNS))
            self._say(self._held[:settled])
            self._held = self._held[settled:]
            return False
        self._say(self._held[: found.start()])
        self._held = self._held[found.start() :]
        if found.group() in _CLOSINGS:
            self._end_message(found.group())
        self._state = self._in_header
        return True

    def _end_message(self, closing: str) -> None:
        self._held = self._held[len(closing) :]
        self._is_thought = False
        self._is_new = False

    def _begin_call(self, name: str, body: str) -> bool:
        """Begins a call once its object begins; until then the header stays unread."""
        start, near = self._behind_space(body)
        closing = _closing(start)
        if not near or not (start.startswith("{") or closing):
            waits = near and closing == ""
            return False if waits and not self._final else self._no_header()
        self._events.append(ToolCallStart(self._num_calls, new_call_id(), name))
        self._held = start
        if not closing:
            self._body = JsonObjectReader(whole=True)
            self._state = self._in_call
        else:
            self._events.append(ToolCallArguments(self._num_calls, "{}"))
            self._end_call()
        return True

    def _in_call(self) -> bool:
        assert self._body is not None
        at = self._body.feed(self._held, 0)
        self._held = self._held[at:]
        text = "".join(part.text for part in self._body.take() if part.kind == "value")
        done, failed, pending = self._body.done, self._body.failed, self._body.pending
        if self._final and not (done or failed):
            text += pending
        if text:
            self._events.append(ToolCallArguments(self._num_calls, text))
        if not (done or failed or self._final):
            return False
        self._end_call()
        if failed:
            self._say(pending)
        return True

    def _end_call(self) -> None:
        self._events.append(ToolCallEnd(self._num_calls))
        self._num_calls += 1
        self._body = None
        self._is_thought = False
        self._is_new = False
        self._state = self._after_call

    def _after_call(self) -> bool:
        """White space and a sign behind a call belong to it."""
        start, near = self._behind_space(self._held)
        closing = _closing(start) if near else None
        if closing == "" and not self._final:
            return False
        if closing or not start:
            self._held = start[len(closing or "") :]
        self._state = self._in_header
        return True

    def _behind_space(self, text: str) -> tuple[str, bool]:
        """What follows the white space at the beginning of a text, and whether that is short enough to be skipped."""
        start = text.lstrip(WHITE)
        return start, len(text) - len(start) <= MAX_SPACE

    def _say(self, text: str) -> None:
        if not text:
            return
        if self._is_new:
            text = f"\n\n{text}"
            self._is_new = False
        self._spoken.add(self._is_thought)
        self._events.append(Reasoning(text) if self._is_thought else Content(text))


def _closing(text: str) -> str | None:
    """The sign that a text begins with; "" if one may be on its way, None if there is none."""
    found = next((one for one in _CLOSINGS if text.startswith(one)), None)
    return "" if found is None and any(one.startswith(text) for one in _CLOSINGS) else found


def _may_begin_header(text: str) -> bool:
    return any(text.startswith(one) or one.startswith(text) for one in (START, CHANNEL, "to="))
