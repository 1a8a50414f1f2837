"""Calls written as tags, as Qwen3-Coder and Qwen3.5 do:

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    value
    </parameter>
    </function>
    </tool_call>

The outer tag may be missing. A value is raw text up to the first `</parameter>`, or to the two tags that
end a call where a model forgets it, without one newline at either end; the tool's schema says what JSON it
stands for. A string is passed on as it comes. Anything
else is passed on once complete, as it was written if that is JSON of a type the schema allows, else as a
string. The name makes a call certain: what breaks it off afterwards leaves its arguments unclosed, and the
text from there on is content.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from headlong.text.events import WHITE, begun_len
from headlong.text.tools.scan import CALL_END, CallScanner
from headlong.text.tools.schema import STRING, JsonTypes, property_types, tool_parameters, type_of

CALL = "<tool_call>"
FUNCTION = "<function="
FUNCTION_END = "</function>"
PARAMETER = "<parameter="
PARAMETER_END = "</parameter>"
CALL_ENDS = (f"{FUNCTION_END}\n{CALL_END}", f"{FUNCTION_END}{CALL_END}")
"""The tags that end a value whose own closing tag is missing."""
MAX_SPACE = 256
"""The most white space between the two opening tags of a call."""
MAX_NAME = 256
_VALUE_END = re.compile("|".join((PARAMETER_END, *CALL_ENDS)))


class Qwen3CoderScanner(CallScanner):
    """Reads the tool calls of one output in the Qwen3-Coder format, for a request that has these tools."""

    markers = (CALL, FUNCTION)

    def __init__(self, tools: Sequence[Mapping[str, Any]]):
        super().__init__()
        self._parameters = tool_parameters(tools)

    def begin(self) -> None:
        self._phase = self._read_opening
        self._schema: Mapping[str, Any] = {}
        self._num_parameters = 0

    def read(self) -> bool:
        return self._phase()

    def _read_opening(self) -> bool:
        """Reads both opening tags and the name, or nothing: until all are there, `at` stays at the marker."""
        begin = self.at
        if self.text.startswith(CALL, begin):
            self.at += len(CALL)
            fits = self.skip_space() <= MAX_SPACE
        else:
            fits = True
        tag = self.next_is(FUNCTION) if fits else None
        name = self._tag_name(FUNCTION) if tag else tag
        if name:
            self.accept(name)
            self._schema = self._parameters.get(name, {})
            self._phase = self._read_body
            return True
        self.at = begin
        if name is None:
            self.reject()
        return name is None

    def _tag_name(self, tag: str) -> str | None:
        """The name in the tag that begins at `at`, and step behind it; "" if more text is needed, None if
        there is no name."""
        start = self.at + len(tag)
        end = self.text.find(">", start, start + MAX_NAME + 1)
        name = self.text[start : end if end >= 0 else start + MAX_NAME + 1]
        if "<" in name or "\n" in name or len(name) > MAX_NAME:
            return None
        if end < 0:
            return None if self.final else ""
        self.at = end + 1
        return name.strip(WHITE) or None

    def _read_body(self) -> bool:
        self.skip_space()
        tag = self.next_is(PARAMETER, FUNCTION_END, CALL_END)
        if tag == PARAMETER:
            name = self._tag_name(PARAMETER)
            if name:
                self._begin_value(name)
                return True
            tag = name
        if tag == "" and not self.final:
            return False
        if tag:
            # A missing </function> is forgiven; CALL_END is then left for the end of the call.
            self.at += len(tag) if tag == FUNCTION_END else 0
            self.arguments("}" if self._num_parameters else "{}")
        elif self.final:
            self.at = len(self.text)  # a tag that was cut short
        self.close()
        return True

    def _begin_value(self, name: str) -> None:
        self.arguments((", " if self._num_parameters else "{") + json.dumps(name, ensure_ascii=False) + ": ")
        self._num_parameters += 1
        self._types = property_types(self._schema, name)
        self._value: list[str] = []  # of a value that is not a string: all of it
        self._untouched = True  # no character of the value was read
        self._newline = ""  # the last character, if it is a newline: it may be the one before the tag
        if self._types == STRING:
            self.arguments('"')
        self._phase = self._read_value

    def _read_value(self) -> bool:
        found = _VALUE_END.search(self.text, self.at)
        if found is None:
            end = len(self.text)
            if not self.final:
                end -= begun_len(self.text[self.at :], (PARAMETER_END, *CALL_ENDS))
            self._take_value(self.text[self.at : end])
            self.at = end
            if self.final:
                self._put_value(self._newline)
                self.arguments("".join(self._value))
                self.close()
            return self.final
        self._take_value(self.text[self.at : found.start()])
        self.at = found.end() if found.group() == PARAMETER_END else found.start()
        self.arguments('"' if self._types == STRING else _as_json("".join(self._value), self._types))
        self._phase = self._read_body
        return True

    def _take_value(self, text: str) -> None:
        if self._untouched and text:
            self._untouched = False
            text = text.removeprefix("\n")
        text = self._newline + text
        self._newline = "\n" if text.endswith("\n") else ""
        self._put_value(text.removesuffix("\n"))

    def _put_value(self, text: str) -> None:
        if self._types == STRING:
            self.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value.append(text)


def _as_json(text: str, types: JsonTypes) -> str:
    """The JSON that a value stands for. Templates write strings bare and True, False and None in Python's
    way, so these are what a model was shown."""
    word = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text.strip())
    try:
        found = type_of(json.loads(word, parse_constant=_refuse))
    except (ValueError, RecursionError):
        found = "string"
    kinds = {found, "number"} if found == "integer" else {found}
    if found != "string" and (types is None or kinds & types):
        return word
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
