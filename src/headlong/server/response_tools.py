"""The tools of a `/v1/responses` request, as the functions that a chat template can show.

A custom tool, whose input is plain text, is offered as a function with one text; a namespace's tools as functions
under its name. Tools that the service at the other end would run itself (web search, code interpreters) are left out
and named. Knows how calls of each are said on the wire, not how they are generated.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headlong.errors import RequestError
from headlong.server.schemas import chat
from headlong.server.schemas.responses import (
    CustomFormat,
    CustomTool,
    FunctionTool,
    HostedTool,
    NamespaceTool,
    Tool,
)

INPUT = "input"
"""The one argument of a custom tool."""
_INPUT_SCHEMA = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Origin:
    """What an offered function stands for."""

    name: str
    path: str
    """The tool's place in the request, for errors."""
    namespace: str | None = None
    custom: bool = False


@dataclass
class OfferedTools:
    """Functions for the chat, in order, and what each stands for."""

    functions: list[chat.Tool] = field(default_factory=list)
    origins: dict[str, Origin] = field(default_factory=dict)
    """What each function stands for, by the name under which it is offered."""
    left_out: list[str] = field(default_factory=list)
    """Types of tools that are not offered."""

    @classmethod
    def of(cls, tools: Sequence[Tool] | None) -> "OfferedTools":
        offered = cls()
        for index, tool in enumerate(tools or ()):
            offered._add(tool, f"tools[{index}]")
        return offered

    def origin(self, offered_name: str) -> Origin:
        """A call's own name and namespace; a name that nobody offered stands for itself."""
        return self.origins.get(offered_name) or Origin(offered_name, "tools")

    def offered_name(self, name: str, namespace: str | None = None) -> str:
        return name if namespace is None else f"{namespace}__{name}"

    @property
    def renamed(self) -> Mapping[str, str]:
        """Where a chat's tool stands in the request, as patterns for errors."""
        return {
            rf"tools\[{index}\](\.function)?": self.origins[tool.function.name].path
            for index, tool in enumerate(self.functions)
        }

    def _add(self, tool: Tool, path: str, namespace: str | None = None) -> None:
        match tool:
            case FunctionTool():
                function = chat.Function(**tool.model_dump(include=set(chat.Function.model_fields)))
                self._offer(function, Origin(tool.name, path, namespace))
            case CustomTool():
                said = f"{tool.description or ''}{_format_note(tool.format)}".strip()
                function = chat.Function(name=tool.name, description=said or None, parameters=_INPUT_SCHEMA)
                self._offer(function, Origin(tool.name, path, namespace, custom=True))
            case NamespaceTool():
                for index, own in enumerate(tool.tools):
                    self._add(own, f"{path}.tools[{index}]", tool.name)
            case HostedTool():
                if tool.type not in self.left_out:
                    self.left_out.append(tool.type)

    def _offer(self, function: chat.Function, origin: Origin) -> None:
        offered = self.offered_name(origin.name, origin.namespace)
        if offered in self.origins:
            raise RequestError(f"{origin.path}.name: {offered!r} is taken by another tool; rename one")
        named = function.model_copy(update={"name": offered})
        self.functions.append(chat.Tool(type="function", function=named))
        self.origins[offered] = origin


def custom_input(arguments: str) -> str:
    """The text that a custom tool was called with, or its beginning where the call was cut off."""
    try:
        given = json.loads(arguments)
    except ValueError:
        return arguments
    return given.get(INPUT, "") if isinstance(given, dict) else arguments


def custom_arguments(text: str) -> str:
    """The input of a custom tool as the arguments of a function, for a call that comes back with the conversation."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def _format_note(format: CustomFormat | None) -> str:
    if format is None or format.type == "text":
        return ""
    return f"\n\nThe input must follow this {format.syntax} grammar:\n{format.definition}"
