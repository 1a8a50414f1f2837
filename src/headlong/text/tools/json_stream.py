"""Reads one JSON object as its text comes, and tells its members apart while they are still open.

Knows JSON and nothing of what the members mean. Two faults that models make often and that have one
meaning only are mended: a control character inside a string is escaped, and a backslash that begins
no escape is doubled. Anything else that is not JSON ends the reading.
"""

import json
import re
from typing import Literal, NamedTuple

from headlong.text.events import WHITE

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_CONTROL = re.compile(r"[\x00-\x1f]+")
_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_SCALAR_FORM = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_SPACE = re.compile(f"[{WHITE}]+")
_HEX = frozenset("0123456789abcdefABCDEF")
_CLOSER = {"{": "}", "[": "]"}

Expected = Literal["object", "value", "item", "member", "key", "colon", "comma"]
"""What may come next: `item` and `member` stand for a first value or key, or the end of the array or object."""


class MemberPart(NamedTuple):
    """A part of a member of the object: its key, then the value's text in pieces, then the value's end."""

    kind: Literal["key", "value", "end"]
    text: str = ""


class JsonObjectReader:
    """Feed it text until `done` or `failed`; `take` what it read on the way. With `whole` the object is one value, and
    its members are not told apart."""

    def __init__(self, whole: bool = False) -> None:
        self.done = False
        self.failed = False
        self._parts: list[MemberPart] = []
        self._expected: Expected = "object"
        self._closers: list[str] = [""] if whole else []  # as if the object were a member's value
        self._bottom = len(self._closers)
        self._string: Literal["key", "value"] | None = None  # the kind of string it is in
        self._escape = ""  # an escape that is not complete yet
        self._scalar: list[str] = []  # a number or a word that is not complete yet
        self._key: list[str] = []
        self._in_value = False  # of a member, at any depth

    @property
    def pending(self) -> str:
        """What was read of a value but not given out, since it is not complete."""
        return self._escape + "".join(self._scalar)

    def take(self) -> list[MemberPart]:
        parts, self._parts = self._parts, []
        return parts

    def feed(self, text: str, at: int) -> int:
        """Read on from `text[at]`; return where it stopped: at the end, behind the object, or at a fault."""
        while at < len(text) and not (self.done or self.failed):
            if self._string:
                at = self._in_string(text, at)
            elif self._scalar:
                at = self._in_scalar(text, at)
            elif text[at] in WHITE:
                found = _SPACE.match(text, at)
                assert found is not None
                self._put(found.group())
                at = found.end()
            else:
                at = self._structure(text, at)
        return at

    def _structure(self, text: str, at: int) -> int:
        char, expected = text[at], self._expected
        if char == '"' and expected in ("key", "member"):
            self._string = "key"
            self._put(char)
        elif char == ":" and expected == "colon":
            self._put(char)
            self._expected = "value"
        elif char == "," and expected == "comma":
            self._put(char)
            self._expected = "key" if self._closers[-1] == "}" else "value"
        elif expected in ("comma", "item", "member") and char == self._closers[-1]:
            self._closers.pop()
            self._put(char)
            self._end_value()
        elif expected in ("object", "value", "item"):
            return self._begin_value(text, at)
        else:
            self.failed = True
            return at
        return at + 1

    def _begin_value(self, text: str, at: int) -> int:
        char = text[at]
        word = None if self._expected == "object" else _SCALAR.match(text, at)
        self._in_value = bool(self._closers)
        if char == "{" or (char == "[" and self._expected != "object"):
            self._put(char)
            self._closers.append(_CLOSER[char])
            self._expected = "member" if char == "{" else "item"
        elif char == '"' and self._expected != "object":
            self._string = "value"
            self._put(char)
        elif word:
            self._scalar.append(word.group())
            return word.end()
        else:
            self.failed = True
            return at
        return at + 1

    def _end_value(self) -> None:
        self._expected = "comma"
        if len(self._closers) == self._bottom:
            self.done = True
        elif len(self._closers) == 1:
            self._in_value = False
            self._parts.append(MemberPart("end"))

    def _in_scalar(self, text: str, at: int) -> int:
        found = _SCALAR.match(text, at)
        if found:
            self._scalar.append(found.group())
            return found.end()
        word = "".join(self._scalar)
        if not _SCALAR_FORM.fullmatch(word):
            self.failed = True
            return at
        self._scalar.clear()
        self._put(word)
        self._end_value()
        return at

    def _in_string(self, text: str, at: int) -> int:
        if self._escape:
            return self._in_escape(text, at)
        found = _PLAIN.match(text, at)
        if found:
            self._put(found.group())
            return found.end()
        found = _CONTROL.match(text, at)
        if found:
            self._put(json.dumps(found.group())[1:-1])
            return found.end()
        if text[at] == "\\":
            self._escape = "\\"
        else:
            self._put('"')
            self._end_string()
        return at + 1

    def _in_escape(self, text: str, at: int) -> int:
        char = text[at]
        if self._escape == "\\" and char not in '"\\/bfnrtu':
            self._escape = ""
            self._put("\\\\")
            return at
        if self._escape != "\\" and char not in _HEX:
            self.failed = True
            return at
        self._escape += char
        if len(self._escape) == (6 if self._escape[1] == "u" else 2):
            escape, self._escape = self._escape, ""
            self._put(escape)
        return at + 1

    def _end_string(self) -> None:
        kind, self._string = self._string, None
        if kind == "value":
            self._end_value()
            return
        self._expected = "colon"
        if len(self._closers) == 1 and not self._bottom:
            self._parts.append(MemberPart("key", json.loads("".join(self._key))))
            self._key.clear()

    def _put(self, text: str) -> None:
        """Give out what belongs to a member's value; gather a member's key."""
        if self._in_value:
            self._parts.append(MemberPart("value", text))
        elif self._string == "key":
            self._key.append(text)
