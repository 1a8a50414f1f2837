"""What the tests of model output share: tools, a reader that checks the events' order, ways to cut a text."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from headlong.text.output import (
    ChatFormat,
    Content,
    OutputEvent,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
HERMES = ChatFormat.detect(None, tools="hermes")
QWEN3_CODER = ChatFormat.detect(None, tools="qwen3_coder")


def template_text(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name, "description": f"Does {name}."}
    return {
        "type": "function",
        "function": function if parameters is None else {**function, "parameters": parameters},
    }


PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "flag": {"type": "boolean"},
    "nothing": {"type": "null"},
    "items": {"type": "array"},
    "map": {"type": "object"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "either": {"type": ["integer", "string"]},
    "any": {},
}
TOOLS = [tool("f", {"type": "object", "properties": PROPERTIES}), tool("g")]


@dataclass
class Call:
    name: str
    arguments: str = ""


@dataclass
class Output:
    """Everything an output held, joined."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    @property
    def arguments(self) -> list[Any]:
        return [json.loads(call.arguments) for call in self.calls]


def gather(events: Iterable[OutputEvent]) -> Output:
    """Join the events, and check that none contradicts those before it."""
    output = Output()
    is_open = False
    ids = set()
    for event in events:
        match event:
            case ToolCallStart(index, id, name):
                assert not is_open and index == len(output.calls) and name
                assert re.fullmatch("call_[0-9a-f]{24}", id) and id not in ids
                ids.add(id)
                output.calls.append(Call(name))
                is_open = True
            case ToolCallArguments(index, text):
                assert is_open and index == len(output.calls) - 1 and text
                output.calls[-1].arguments += text
            case ToolCallEnd(index):
                assert is_open and index == len(output.calls) - 1
                is_open = False
            case Reasoning(text):
                assert not is_open and text and not output.content and not output.calls
                output.reasoning += text
            case Content(text):
                assert not is_open and text
                output.content += text
    assert not is_open
    return output


def read(format: ChatFormat, pieces: str | Iterable[str], prompt: str = "", tools: Any = TOOLS) -> Output:
    """What a whole output holds, pushed as one piece or as several."""
    parser = format.parser(prompt, tools)
    events: list[OutputEvent] = []
    for piece in (pieces,) if isinstance(pieces, str) else pieces:
        events += parser.push(piece)
    return gather(events + parser.finish())


def cut(text: str, places: Iterable[int]) -> list[str]:
    """The text in pieces, some perhaps empty."""
    ends = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(ends)]


places = st.lists(st.integers(0, 10_000), max_size=12)


def shuffled(fragments: Iterable[str], max_size: int = 14) -> st.SearchStrategy[str]:
    """Texts made of what markup is made of, and of a few letters."""
    return st.lists(st.sampled_from(list(fragments)), max_size=max_size).map("".join)
