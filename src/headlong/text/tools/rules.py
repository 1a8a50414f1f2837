"""What the grammars of all call formats are made of. Written in llguidance's Lark dialect; knows no single format.

Arguments follow the tool's schema: the members of an object come in the schema's order, with the separators that chat
templates show, and without members that the schema does not list.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
COMBINING = ("allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "propertyNames")
_REGEX_SIGNS = re.compile(r"[\\^$.|?*+()\[\]{}/]")

Rules = dict[str, str]
"""Rules of the grammar by name; a name may carry attributes in brackets."""
RuleWriter = Callable[[str, str, Mapping[str, Any], str], Rules]
"""Writes the rules of one tool, given its key among the rules, its name, its schema and the field's name in errors."""


@dataclass(frozen=True)
class CallForm:
    """How a model writes calls. `write` makes a rule `tool_KEY` for each tool; the texts stand around every call,
    around all of them, and between two."""

    write: RuleWriter
    before: str = ""
    after: str = ""
    opening: str = ""
    closing: str = ""
    between: str = ""
    parallel: bool = True
    """Whether one output can hold several calls."""
    first: str = ""
    """A rule for what comes before all of this."""
    more: Rules = field(default_factory=dict)
    """The rules that `first` needs."""

    def rules(self, tools: list[str], parallel: bool) -> Rules:
        """The rules `start` and `call` for these tools' rules."""
        between = f"{literal(self.between)} call" if self.between else "call"
        calls = f"call ({between})*" if parallel and self.parallel else "call"
        return {
            "start": f"{self.first} {_sequence(self.opening, calls, self.closing)}".lstrip(),
            "call": _sequence(self.before, f"({' | '.join(tools)})", self.after),
            **self.more,
        }


def object_rules(key: str, name: str, schema: Mapping[str, Any], _: str) -> Rules:
    """For calls that are objects with a name and arguments."""
    head = f'{{"name": {json.dumps(name)}, "arguments": '
    return _with_arguments(key, literal(head), schema, ' "}"')


def headed_rules(head: Callable[[str], str]) -> RuleWriter:
    """For calls that are a head with the name, as a piece of grammar, and then the arguments as an object."""

    def write(key: str, name: str, schema: Mapping[str, Any], _: str) -> Rules:
        return _with_arguments(key, head(name), schema)

    return write


def _with_arguments(key: str, head: str, schema: Mapping[str, Any], end: str = "") -> Rules:
    return {
        f"tool_{key}": f"{head} arguments_{key}{end}",
        f"arguments_{key}": json_value(arguments_schema(schema)),
    }


def arguments_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an object without members that the tool's schema does not list."""
    closed = _closed(schema) if "properties" in schema else {}
    return {**schema, **closed, "type": "object"}


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    open_ended = "additionalProperties" in schema or any(word in schema for word in (*COMBINING, "$ref"))
    return {} if open_ended else {"additionalProperties": False}


def json_value(schema: Mapping[str, Any]) -> str:
    """A value that fits a schema, as JSON."""
    return "%json " + json.dumps({**schema, "x-guidance": _SEPARATORS}, allow_nan=False)


def literal(text: str) -> str:
    """This text and no other."""
    return json.dumps(text)


def without(*tags: str) -> str:
    """A terminal for any text that contains none of these."""
    escaped = "|".join(_REGEX_SIGNS.sub(r"\\\g<0>", tag) for tag in tags).replace("\n", "\\n")
    return f"~/(?s:.*)({escaped})(?s:.*)/"


def _sequence(before: str, core: str, after: str) -> str:
    return " ".join([*([literal(before)] if before else []), core, *([literal(after)] if after else [])])
