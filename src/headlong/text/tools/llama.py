"""Calls as Llama 3 writes them: `{"name": ..., "parameters": {...}}`, perhaps behind `<|python_tag|>`.

Without the tag the object must be the beginning of the answer, and its name one of the request's tools: an answer may
well be JSON for other reasons. Several objects have a semicolon between them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from headlong.text.events import WHITE
from headlong.text.tools.object_calls import ObjectScanner
from headlong.text.tools.rules import CallForm, Rules, arguments_schema, json_value
from headlong.text.tools.schema import tool_parameters

TAG = "<|python_tag|>"
MARKUP = (TAG,)


class LlamaScanner(ObjectScanner):
    """Reads the tool calls of one output in Llama's JSON format, for a request that has these tools."""

    markers = (TAG, "{")
    joint = ";"
    argument_keys = ("parameters", "arguments")
    needs_arguments = True

    def __init__(self, tools: Sequence[Mapping[str, Any]]):
        super().__init__()
        self._names = frozenset(tool_parameters(tools))
        self._at_start = True

    def begin(self) -> None:
        super().begin()
        self._may_be_call = self._at_start or not self.text.startswith("{", self.at)
        self._any_name = self.text.startswith(TAG, self.at)
        if not self.text.startswith("{", self.at):
            self.at += len(TAG if self._any_name else self.joint)

    def read(self) -> bool:
        if not self._may_be_call:
            self.reject()
            return True
        return super().read()

    def fits(self, name: str) -> bool:
        return self._any_name or name in self._names

    def put_text(self, text: str) -> None:
        self._at_start = self._at_start and not text.strip(WHITE)
        super().put_text(text)

    def close(self) -> None:
        self._at_start = False
        super().close()


def _rules(key: str, name: str, schema: Mapping[str, Any], _: str) -> Rules:
    """A call as one JSON value: were its head one text, an answer that is JSON as well could not begin as it does."""
    whole = {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": arguments_schema(schema)},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
    definitions = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
    return {f"tool_{key}": json_value({**definitions, **whole})}


FORM = CallForm(_rules, parallel=False)
