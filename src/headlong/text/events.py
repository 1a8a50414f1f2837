"""What a model's output is made of, as events, and what all readers of markup share. Knows no format."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

WHITE = " \t\r\n"
"""What counts as white space next to markup. Other Unicode spaces are part of the text."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The next piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """The next piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins; `index` counts the calls of one output from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The next piece of a call's arguments; all pieces joined are one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """A call is over, because it was complete or because the output ended or broke off inside it."""

    index: int


def new_call_id() -> str:
    """An id that no other call has."""
    return f"call_{secrets.token_hex(12)}"


OutputEvent = Reasoning | Content | ToolCallStart | ToolCallArguments | ToolCallEnd


class OutputReader(Protocol):
    """Reads one output as text and returns events. Joined by type and by call, events do not depend on how the text was
    cut into pieces."""

    def push(self, text: str) -> list[OutputEvent]:
        """Take the next piece of output; return what is settled by it."""
        ...

    def finish(self) -> list[OutputEvent]:
        """The output is over: return what was held. Nothing may be pushed afterwards."""
        ...


def begun_len(text: str, markers: Iterable[str]) -> int:
    """How many of the last characters may be the beginning of a marker, and must wait for what follows."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest
