"""Calls as Kimi K2 writes them: `<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{...}`.

What stands before the arguments is the call's id, which counts the calls of a conversation from 0. Calls get ids of our
own all the same, since a model may repeat one; the template is shown the ids that the model would have written.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from headlong.text.tools.headed_calls import HeadedScanner
from headlong.text.tools.rules import CallForm, headed_rules, literal

CALLS = "<|tool_calls_section_begin|>"
CALLS_END = "<|tool_calls_section_end|>"
CALL = "<|tool_call_begin|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
CALL_END = "<|tool_call_end|>"
MARKUP = (CALLS, CALLS_END, CALL, ARGUMENTS, CALL_END)
_ID = re.compile(r"(?:functions\.)?(.+?)(?::[0-9]+)?", re.DOTALL)


class KimiScanner(HeadedScanner):
    """Reads the tool calls of one output in Kimi's format."""

    markers = (CALLS, CALL)
    tails = (CALL_END, CALLS_END)
    empty_ends = (CALL_END,)

    def read_head(self) -> str | None:
        tag = self.step_into(CALL, CALLS)
        if not tag:
            return tag
        written = self.up_to(ARGUMENTS)
        found = _ID.fullmatch(written or "")
        return found[1] if found else written


def _head(name: str) -> str:
    return f"{literal(f'functions.{name}:')} /0|[1-9][0-9]{{0,3}}/ {literal(ARGUMENTS)}"


def with_kimi_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the ids that Kimi gives its calls."""
    ids: dict[Any, str] = {}
    changed: list[dict[str, Any]] = []
    count = 0
    for message in messages:
        changed.append(dict(message))
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                own = f"functions.{call['function']['name']}:{count}"
                count += 1
                ids[call.get("id", own)] = own
                calls.append({**call, "id": own})
            changed[-1]["tool_calls"] = calls
        if message.get("tool_call_id") in ids:
            changed[-1]["tool_call_id"] = ids[message["tool_call_id"]]
    return changed


FORM = CallForm(headed_rules(_head), before=CALL, after=CALL_END, opening=CALLS, closing=CALLS_END)
