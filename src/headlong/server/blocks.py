"""What a model said, in the order it said it: stretches of reasoning, of text, and tool calls.

For the dialects whose answer is a list of such blocks. Knows no wire format.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pydantic_core import from_json

from headlong.text.output import (
    Content,
    OutputEvent,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

BlockType = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    """A stretch of output of one type: reasoning, text or a call. The text of a call is its arguments."""

    type: BlockType
    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    closed: bool = False
    """Nothing more can come; the last block stays open if nothing followed it."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Change(NamedTuple):
    """What happened to a block. `text` is what a block that grew gained, and empty for other changes."""

    what: Literal["opened", "grew", "closed"]
    block: Block
    text: str = ""


class Blocks:
    """Collects events. One block at most is open."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def texts(self, type: BlockType) -> str:
        """The texts of all blocks of one type, joined."""
        return "".join(block.text for block in self._blocks if block.type == type)

    def take(self, events: Iterable[OutputEvent]) -> list[Change]:
        changes: list[Change] = []
        for event in events:
            match event:
                case Reasoning(text) if text:
                    changes += self._turn_to("reasoning") + self._grow(text)
                case Content(text) if text:
                    changes += self._turn_to("text") + self._grow(text)
                case ToolCallStart(_, call_id, name):
                    changes += self.close() + self._open("call", call_id, name)
                case ToolCallArguments(_, text) if text:
                    changes += self._grow(text)
                case ToolCallEnd():
                    changes += self.close()
        return changes

    def close(self) -> list[Change]:
        """Ends the open block, if there is one."""
        if not self._blocks or self._blocks[-1].closed:
            return []
        self._blocks[-1].closed = True
        return [Change("closed", self._blocks[-1])]

    def _turn_to(self, type: BlockType) -> list[Change]:
        if self._blocks and self._blocks[-1].type == type and not self._blocks[-1].closed:
            return []
        return self.close() + self._open(type)

    def _open(self, type: BlockType, call_id: str = "", name: str = "") -> list[Change]:
        self._blocks.append(Block(type, len(self._blocks), call_id, name))
        return [Change("opened", self._blocks[-1])]

    def _grow(self, text: str) -> list[Change]:
        block = self._blocks[-1]
        assert not block.closed, "arguments come between a call's start and its end"
        block.pieces.append(text)
        return [Change("grew", block, text)]


def cut_off(block: Block, blocks: Blocks, finish_reason: str | None) -> bool:
    """Whether the limit fell into this block. A call is whole if its arguments are."""
    if finish_reason != "length" or block.index < len(blocks) - 1:
        return False
    return block.type != "call" or not is_json(block.text)


def is_json(text: str) -> bool:
    """Whether a text is JSON to its end."""
    try:
        from_json(text)
    except ValueError:
        return False
    return True


def arguments_object(text: str) -> dict[str, Any]:
    """The arguments of a call as an object, as clients read them from a stream: a value that the token limit cut off is
    left out. It is empty if they hold what JSON cannot represent, such as 1e999."""
    try:
        given = from_json(text or "{}", allow_partial=True)
        json.dumps(given, allow_nan=False)
    except ValueError:
        return {}
    return given
