"""Calls whose parameters are tags: a name, and for each parameter a key and a value, whatever the tags look like.

A value is raw text up to its closing tag; the tool's schema says what JSON it stands for, unless the tag itself says
so. A string is passed on as it comes. Anything else is passed on once complete, as it was written if that is JSON of a
type the schema allows, else as a string. The opening makes a call certain: what breaks it off afterwards leaves its
arguments unclosed, and the text from there on is content.
"""

import json
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from headlong.text.events import begun_len
from headlong.text.tools.scan import CallScanner
from headlong.text.tools.schema import STRING, JsonTypes, property_types, tool_parameters, type_of


class TaggedScanner(CallScanner):
    """Reads calls written as tags, for a request that has these tools."""

    key_start: str
    """What begins the tag of a parameter."""
    body_ends: tuple[str, ...]
    """The tags that end a call, all of which are among its `tails`."""
    value_end: str
    value_ends: tuple[str, ...] = ()
    """Tags that end a value whose own closing tag is missing."""
    in_lines = False
    """Whether a newline at either end of a value belongs to the tags."""
    is_text: bool | None = None
    """Whether the tag read last says that a bare string follows, or that JSON does; None if it does not say."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]):
        super().__init__()
        self._parameters = tool_parameters(tools)
        self._value_end = re.compile("|".join(map(re.escape, (self.value_end, *self.value_ends))))

    @abstractmethod
    def read_opening(self) -> str | None:
        """The name in the tags that begin at `at`, after stepping behind them; "" if more text is needed, None if there
        is no call."""

    @abstractmethod
    def read_key(self) -> str | None:
        """The key in the tags that begin at `at`, likewise."""

    def begin(self) -> None:
        self._phase = self._read_start
        self._schema: Mapping[str, Any] = {}
        self._num_parameters = 0

    def read(self) -> bool:
        return self._phase()

    def _read_start(self) -> bool:
        """Reads the opening and the name, or nothing: until all are there, `at` stays at the marker."""
        begin = self.at
        name = self.read_opening()
        if name:
            self.accept(name)
            self._schema = self._parameters.get(name, {})
            self._phase = self._read_body
            return True
        self.at = begin
        if name is None:
            self.reject()
        return name is None

    def _read_body(self) -> bool:
        self.skip_space()
        tag = self.next_is(self.key_start, *self.body_ends)
        if tag == self.key_start:
            begin = self.at
            key = self.read_key()
            if key:
                self._begin_value(key)
                return True
            self.at, tag = begin, key
        if tag == "" and not self.final:
            return False
        if tag:
            self.arguments("}" if self._num_parameters else "{}")
        elif self.final:
            self.at = len(self.text)  # a tag that was cut short
        self.close()
        return True

    def _begin_value(self, key: str) -> None:
        self.arguments((", " if self._num_parameters else "{") + json.dumps(key, ensure_ascii=False) + ": ")
        self._num_parameters += 1
        declared = property_types(self._schema, key) if self.is_text is None else None
        self._types = STRING if self.is_text else declared
        self._value: list[str] = []  # of a value that is not a string: all of it
        self._untouched = self.in_lines  # no character of the value was read
        self._newline = ""  # the last character, if it is a newline: it may be the one before the tag
        if self._types == STRING:
            self.arguments('"')
        self._phase = self._read_value

    def _read_value(self) -> bool:
        found = self._value_end.search(self.text, self.at)
        if found is None:
            end = len(self.text)
            if not self.final:
                end -= begun_len(self.text[self.at :], (self.value_end, *self.value_ends))
            self._take_value(self.text[self.at : end])
            self.at = end
            if self.final:
                self._put_value(self._newline)
                self.arguments("".join(self._value))
                self.close()
            return self.final
        self._take_value(self.text[self.at : found.start()])
        self.at = found.end() if found.group() == self.value_end else found.start()
        self.arguments('"' if self._types == STRING else self._value_as_json("".join(self._value)))
        self._phase = self._read_body
        return True

    def _value_as_json(self, text: str) -> str:
        return _as_json(text, self._types) if self.is_text is None else _as_written(text)

    def _take_value(self, text: str) -> None:
        if self._untouched and text:
            self._untouched = False
            text = text.removeprefix("\n")
        text = self._newline + text
        self._newline = "\n" if self.in_lines and text.endswith("\n") else ""
        self._put_value(text.removesuffix(self._newline))

    def _put_value(self, text: str) -> None:
        if self._types == STRING:
            self.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value.append(text)


def _as_json(text: str, types: JsonTypes) -> str:
    """The JSON that a value stands for. Templates write strings bare and True, False and None in Python's
    way, so these are what a model was shown."""
    word = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text.strip())
    found = _type_of_text(word)
    kinds = {found, "number"} if found == "integer" else {found}
    if found not in (None, "string") and (types is None or kinds & types):
        return word
    return json.dumps(text, ensure_ascii=False)


def _as_written(text: str) -> str:
    """A value that its tag says to be JSON; text that is none after all is a string."""
    return text.strip() if _type_of_text(text.strip()) else json.dumps(text, ensure_ascii=False)


def _type_of_text(text: str) -> str | None:
    """The type of the JSON that a text is; None if it is none."""
    try:
        return type_of(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
