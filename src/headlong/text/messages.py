"""Turns chat messages as clients send them into messages as chat templates want them.

Templates were written for Python objects: arguments of calls are mappings, contents are strings. Clients
send JSON text and lists of parts. Knows no template and no HTTP, and changes none of what it is given.
"""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from headlong.errors import RequestError
from headlong.text.template import check_messages

_RESERVED = ("messages", "tools", "add_generation_prompt")


def prepare_messages(messages: Any) -> list[dict[str, Any]]:
    """A copy of the messages in the form that templates read.

    The text parts of a content are joined without anything between them: templates that accept parts
    write them that way themselves, and all others need a string.
    """
    check_messages(messages)
    return [_prepare(message, f"messages[{index}]") for index, message in enumerate(messages)]


def template_variables(kwargs: Any) -> dict[str, Any]:
    """A request's own variables for the chat template, if they touch none of ours."""
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping):
        raise RequestError("chat_template_kwargs: must be an object of names and values")
    for name in kwargs:
        if not isinstance(name, str) or not name.isidentifier():
            raise RequestError(f"chat_template_kwargs.{name}: is not a name a template could read; rename it")
        if name in _RESERVED:
            raise RequestError(
                f"chat_template_kwargs.{name}: is set from the request's own fields; use those"
            )
        if name.startswith(("_", "headlong")):
            raise RequestError(f"chat_template_kwargs.{name}: is reserved; choose another name")
    return dict(kwargs)


def _prepare(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    prepared = dict(message)
    if message["role"] == "developer":
        prepared["role"] = "system"
    content = message.get("content")
    if content is None:
        prepared["content"] = ""
    elif not isinstance(content, str):
        prepared["content"] = "".join(
            _part_text(part, f"{where}.content[{number}]") for number, part in enumerate(content)
        )
    calls = prepared.pop("tool_calls", None)
    if calls is not None:
        if not isinstance(calls, list | tuple):
            raise RequestError(f"{where}.tool_calls: must be a list of calls")
        prepared["tool_calls"] = [
            _prepare_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(calls)
        ]
    return prepared


def _part_text(part: Mapping[str, Any], where: str) -> str:
    kind = part.get("type")
    if kind != "text":
        raise RequestError(f"{where}.type: is {kind!r}, but this model reads text only; send 'text' parts")
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text: must be a string")
    return text


def _prepare_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}.function: must be an object with `name` and `arguments`")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise RequestError(f"{where}.function.name: must be a non-empty string")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


class Arguments(dict[str, Any]):
    """The arguments of a call: a mapping, and their JSON where a template writes them or adds them to a text."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __radd__(self, before: Any) -> Any:
        return before + str(self) if isinstance(before, str) else NotImplemented

    def __add__(self, after: Any) -> Any:
        return str(self) + after if isinstance(after, str) else NotImplemented


def _arguments(given: Any, where: str) -> Arguments:
    """The arguments as a mapping. None and blank text are what clients send for a call without any."""
    if given is None or (isinstance(given, str) and not given.strip()):
        return Arguments()
    if isinstance(given, str):
        try:
            given = json.loads(given, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where}: is not JSON ({error}); send the text of a JSON object") from error
    if not isinstance(given, Mapping):
        raise RequestError(f"{where}: must be a JSON object, or its text")
    return Arguments(given)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not allowed")
