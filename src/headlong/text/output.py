"""What a model's output text means: reasoning, answer, tool calls. One object reads one sequence.

Knows which formats there are and how to tell them from a chat template; the formats themselves are in
`reasoning` and `tools`. The text must still hold the markers, so tokens that spell them may not be
skipped when it is decoded. Pure text: no tokens, no HTTP.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headlong.errors import ConfigError, RequestError
from headlong.params import Grammar
from headlong.text.events import (
    Content,
    OutputEvent,
    OutputReader,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from headlong.text.format_names import REASONING_FORMATS, TOOL_FORMATS
from headlong.text.harmony import HarmonyReader
from headlong.text.reasoning import HARMONY, MISTRAL, THINK, Part, ReasoningFormat, ReasoningSplitter
from headlong.text.template import read_variables
from headlong.text.tools.formats import FORMATS, format_of
from headlong.text.tools.grammar import call_grammar
from headlong.text.tools.message_grammar import message_grammar
from headlong.text.tools.scan import CallScanner

__all__ = [
    "ChatFormat",
    "Content",
    "OutputEvent",
    "OutputParser",
    "OutputReader",
    "Reasoning",
    "ToolCallArguments",
    "ToolCallEnd",
    "ToolCallStart",
]


class OutputParser:
    """Reads one output: first the reasoning, then the answer and the calls in it."""

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
    tools: str | None
    """The name of a format of `headlong.text.tools.formats`."""

    @classmethod
    def detect(
        cls, template_source: str | None, *, reasoning: str = "auto", tools: str = "auto"
    ) -> "ChatFormat":
        """The formats that the chat template shows the model; either can be given instead."""
        _check_choice("reasoning", reasoning, REASONING_FORMATS)
        _check_choice("tools", tools, TOOL_FORMATS)
        source = template_source or ""
        thoughts = _reasoning_format(source) if reasoning == "auto" else _REASONING.get(reasoning)
        calls = _tool_format(source) if tools == "auto" else None if tools == "none" else tools
        return cls(thoughts, calls)

    @property
    def in_messages(self) -> bool:
        """Whether an output is a list of messages, as gpt-oss writes them."""
        return self.reasoning is HARMONY or self.tools == "harmony"

    def parser(self, prompt_text: str, tools: Sequence[Mapping[str, Any]] | None) -> OutputReader:
        """A reader for one output to this prompt. Without tools nothing is taken for a call."""
        if self.in_messages:
            return HarmonyReader(
                prompt_text, self.reasoning is HARMONY, bool(tools) and self.tools == "harmony"
            )
        splitter = None
        if self.reasoning:
            splitter = ReasoningSplitter(self.reasoning, self.reasoning.opened_by(prompt_text))
        scanner = FORMATS[self.tools].scanner if tools and self.tools else None
        return OutputParser(splitter, scanner(tools) if scanner and tools else None)

    def prepare(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages in a form that the model's chat template can write."""
        prepare = FORMATS[self.tools].prepare if self.tools else None
        return prepare(messages) if prepare else [dict(message) for message in messages]

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

    def whole_grammar(self, form: Grammar | None, calls: Grammar | None, prompt_text: str) -> Grammar | None:
        """The grammar of a whole output to this prompt: what the model thinks first is free, then comes the form of the
        answer, or calls, or either where both are given."""
        if form is None and calls is None:
            return None
        if self.in_messages:
            return message_grammar(form, calls, prompt_text)
        grammar = calls if form is None else replace(form, alternative=calls)
        return None if grammar is None else replace(grammar, after=self.end_of_reasoning(prompt_text))


_REASONING = {one.name: one for one in (THINK, MISTRAL, HARMONY)}


def _check_choice(field: str, value: str, names: Sequence[str]) -> None:
    if value not in (choices := ("auto", "none", *names)):
        raise ConfigError(f"{field}: must be one of {', '.join(choices)}")


def _reasoning_format(source: str) -> ReasoningFormat | None:
    if "<|channel|>" in source:
        return HARMONY
    found = (one for one in (THINK, MISTRAL) if one.start in source or one.end in source)
    return next(found, None)


def _tool_format(source: str) -> str | None:
    return format_of(source) if "tools" in read_variables(source) else None
