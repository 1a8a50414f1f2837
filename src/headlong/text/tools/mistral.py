"""Calls as Mistral's models write them, behind `[TOOL_CALLS]`.

Older ones write one JSON list, `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, newer ones
`[TOOL_CALLS]NAME[ARGS]{...}` for each call, some of them with `[CALL_ID]` and an id before `[ARGS]`. One scanner reads
all of them.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from headlong.text.events import WHITE
from headlong.text.tools.headed_calls import HeadedScanner
from headlong.text.tools.object_calls import ObjectScanner
from headlong.text.tools.rules import CallForm, headed_rules, literal, object_rules
from headlong.text.tools.scan import MAX_SPACE

CALLS = "[TOOL_CALLS]"
ID = "[CALL_ID]"
ARGUMENTS = "[ARGS]"
MARKUP = (CALLS, ID, ARGUMENTS)
_HEAD = re.compile(r"([\w.:-]{1,256})(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])?")
_PART_OF_HEAD = re.compile(r"[\w.:-]{0,256}(?:\[[A-Z_]{0,7}\]?\w{0,64}){0,2}")
_ID_FORM = re.compile(r"[a-zA-Z0-9]{9}")


class MistralScanner(ObjectScanner, HeadedScanner):
    """Reads the tool calls of one output in either of the two formats."""

    markers = (CALLS,)

    def begin(self) -> None:
        ObjectScanner.begin(self)
        HeadedScanner.begin(self)
        self._phase = self._read_marker
        self._is_first = self.text.startswith(CALLS, self.at)

    def read(self) -> bool:
        return self._phase()

    def _read_marker(self) -> bool:
        """Tells the two formats apart by what follows the marker, which stays unread until it is there. A comma stands
        only between the objects of a list."""
        begin = self.at
        self.at += len(CALLS if self._is_first else self.joint)
        near = self.skip_space() <= MAX_SPACE
        opening = self.next_is("[" if self._is_first else "{") if near else None
        if opening == "":
            self.at = begin
            return False
        if opening:
            self.at += self._is_first
            self.tails, self.joint = ("]",), ","
            self._phase = self._read_object
        elif self._is_first:
            self.at = begin
            self.tails, self.joint = (), ""
            self._phase = self._read_headed
        else:
            self.reject()
        return True

    def _read_object(self) -> bool:
        return ObjectScanner.read(self)

    def _read_headed(self) -> bool:
        return HeadedScanner.read(self)

    def read_head(self) -> str | None:
        self.at += len(CALLS)
        if self.skip_space() > MAX_SPACE:
            return None
        if self.at < len(self.text) and (found := _HEAD.match(self.text, self.at)):
            following = self.text[found.end() : found.end() + 1]
            if following and following in f"{{{WHITE}":
                self.at = found.end()
                return found[1]
        is_begun = _PART_OF_HEAD.fullmatch(self.text, self.at) is not None
        return "" if is_begun and not self.final else None


def with_short_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with ids of nine letters and digits, which is all that Mistral's templates accept."""
    changed: list[dict[str, Any]] = []
    for message in messages:
        changed.append(dict(message))
        if message.get("tool_calls"):
            changed[-1]["tool_calls"] = [
                {**call, "id": _short(call.get("id") or f"{number}")}
                for number, call in enumerate(message["tool_calls"])
            ]
        if message.get("tool_call_id"):
            changed[-1]["tool_call_id"] = _short(message["tool_call_id"])
    return changed


def _short(id: Any) -> str:
    text = str(id)
    return (
        text if _ID_FORM.fullmatch(text) else hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:9]
    )


def _head(name: str) -> str:
    return f"{literal(name)} ({literal(ID)} /[a-zA-Z0-9]{{9}}/)? {literal(ARGUMENTS)}"


LIST_FORM = CallForm(object_rules, opening=f"{CALLS}[", closing="]", between=", ")
ARGUMENTS_FORM = CallForm(headed_rules(_head), before=CALLS)
