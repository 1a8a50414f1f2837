"""What a model's output text means: reasoning, answer, tool calls. One object reads one sequence.

Knows which formats there are and how to tell them from a chat template; the formats themselves are in
`reasoning` and `tools`. The text must still hold the markers, so tokens that spell them may not be
skipped when it is decoded. Pure text: no tokens, no HTTP.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from headlong.errors import ConfigError, RequestError
from headlong.params import Grammar
from headlong.text.events import (
    Content,
    OutputEvent,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from headlong.text.reasoning import THINK, Part, ReasoningFormat, ReasoningSplitter
from headlong.text.template import read_variables
from headlong.text.tools.grammar import call_grammar
from headlong.text.tools.hermes import HermesScanner
from headlong.text.tools.qwen3_coder import Qwen3CoderScanner
from headlong.text.tools.scan import CallScanner

__all__ = [
    "ChatFormat",
    "Content",
    "OutputEvent",
    "OutputParser",
    "Reasoning",
    "ToolCallArguments",
    "ToolCallEnd",
    "ToolCallStart",
]

ToolFormat = Literal["hermes", "qwen3_coder"]
ReasoningChoice = Literal["auto", "none", "think"]
ToolChoice = Literal["auto", "none", "hermes", "qwen3_coder"]

# How instructions inside a template show the JSON of a call, within either kind of quotes.
_JSON_CALL = re.compile(r'\\?"arguments\\?"')


class OutputParser:
    """Reads one output as text and returns events. Joined by type and by call, events do not depend on how the text was
    cut into pieces."""

    def __init__(self, splitter: ReasoningSplitter | None, calls: CallScanner | None):
        self._splitter = splitter
        self._calls = calls

    def push(self, text: str) -> list[OutputEvent]:
        """Take the next piece of output; return what is settled by it."""
        return self._read(self._splitter.push(text) if self._splitter else [Part(False, text)])

    def finish(self) -> list[OutputEvent]:
        """The output is over: return what was held. Nothing may be pushed afterwards."""
        events = self._read(self._splitter.finish()) if self._splitter else []
        return events + (self._calls.finish() if self._calls else [])

    def _read(self, parts: Sequence[Part]) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        for part in parts:
            if part.is_reasoning:
                events.append(Reasoning(part.text))
            elif self._calls:
                events += self._calls.push(part.text)
            elif part.text:
                events.append(Content(part.text))
        return events


@dataclass(frozen=True)
class ChatFormat:
    """How one model writes its reasoning and its tool calls; None where it writes none in a form that can be read
    here."""

    reasoning: ReasoningFormat | None
    tools: ToolFormat | None

    @classmethod
    def detect(
        cls,
        template_source: str | None,
        *,
        reasoning: ReasoningChoice = "auto",
        tools: ToolChoice = "auto",
    ) -> "ChatFormat":
        """The formats that the chat template shows the model; either can be given instead."""
        if reasoning not in get_args(ReasoningChoice):
            raise ConfigError(f"reasoning: must be one of {', '.join(get_args(ReasoningChoice))}")
        if tools not in get_args(ToolChoice):
            raise ConfigError(f"tools: must be one of {', '.join(get_args(ToolChoice))}")
        source = template_source or ""
        thinks = reasoning == "think" or (reasoning == "auto" and _mentions_reasoning(source))
        format = _tool_format(source) if tools == "auto" else None if tools == "none" else tools
        return cls(THINK if thinks else None, format)

    def parser(self, prompt_text: str, tools: Sequence[Mapping[str, Any]] | None) -> OutputParser:
        """A reader for one output to this prompt. Without tools nothing is taken for a call."""
        splitter = None
        if self.reasoning:
            splitter = ReasoningSplitter(self.reasoning, self.reasoning.opened_by(prompt_text))
        calls: CallScanner | None = None
        if tools and self.tools:
            calls = HermesScanner() if self.tools == "hermes" else Qwen3CoderScanner(tools)
        return OutputParser(splitter, calls)

    def end_of_reasoning(self, prompt_text: str) -> str | None:
        """What must come before an answer, if the output to this prompt starts inside the reasoning."""
        opened = self.reasoning is not None and self.reasoning.opened_by(prompt_text)
        return self.reasoning.end if self.reasoning and opened else None

    def tool_grammar(
        self, tools: Sequence[Mapping[str, Any]] | None, tool_choice: Any, parallel: bool
    ) -> Grammar | None:
        """Forces a call for "required" or a named function; None for "auto" and "none"."""
        if tool_choice in (None, "auto", "none"):
            return None
        if self.tools is None:
            raise RequestError("tool_choice: this model's chat template has no tool calls; leave it out")
        return call_grammar(self.tools, tools or (), tool_choice, parallel)


def _mentions_reasoning(source: str) -> bool:
    return THINK.start in source or THINK.end in source


def _tool_format(source: str) -> ToolFormat | None:
    if "tools" not in read_variables(source):
        return None
    if "<function=" in source:
        return "qwen3_coder"
    return "hermes" if "<tool_call>" in source and _JSON_CALL.search(source) else None
