"""Calls as Hermes and Qwen3 write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from headlong.text.tools.object_calls import ObjectScanner
from headlong.text.tools.rules import CallForm, object_rules

CALL = "<tool_call>"
CALL_END = "</tool_call>"


class HermesScanner(ObjectScanner):
    """Reads the tool calls of one output in the Hermes format."""

    markers = (CALL,)
    tails = (CALL_END,)

    def begin(self) -> None:
        self.at += len(CALL)
        super().begin()


FORM = CallForm(object_rules, before=f"{CALL}\n", after=f"\n{CALL_END}", between="\n")
