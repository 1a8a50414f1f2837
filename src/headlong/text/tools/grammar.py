"""A grammar that leaves a model no choice but to call a tool, in the format it was trained on.

Finds the tools that may be called, puts the rules of a format's writer together, and says which tool's schema is at
fault. Knows no tokens: the engine turns the grammar into masks.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from headlong.errors import RequestError
from headlong.params import Grammar
from headlong.text.grammar import MAX_CACHED, Recent, stay_here
from headlong.text.grammar_cost import TooCostly, measure
from headlong.text.grammar_source import MAX_CHARS, translate
from headlong.text.tools import hermes
from headlong.text.tools.formats import FORMATS
from headlong.text.tools.rules import CallForm, Rules
from headlong.text.tools.schema import json_types, without_notes

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def check_tools(tools: Any) -> None:
    """Refuse a list of tools that no format can write a call for."""
    if not isinstance(tools, list | tuple):
        raise RequestError("tools: must be a list of {type, function} objects")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if not isinstance(tool, Mapping):
            raise RequestError(f"{where}: must be an object with `type` and `function`")
        if tool.get("type") != "function":
            raise RequestError(f"{where}.type: must be 'function'; no other kind of tool is supported")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise RequestError(f"{where}.function: must be an object with a `name`")
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise RequestError(f"{where}.function.name: must be 1 to 64 of the characters a-z A-Z 0-9 _ -")
        if name in names:
            raise RequestError(f"{where}.function.name: {name!r} is taken by another tool; rename one")
        names.add(name)
        if not isinstance(function.get("parameters", {}), Mapping | None):
            raise RequestError(f"{where}.function.parameters: must be a JSON schema, that is an object")


def call_grammar(
    format: str,
    tools: Sequence[Mapping[str, Any]],
    tool_choice: Any,
    parallel: bool,
) -> Grammar | None:
    """The grammar for `tool_choice`; None where the model may answer as it likes."""
    if tool_choice in (None, "auto", "none"):
        return None
    check_tools(tools)
    chosen = _chosen(tools, tool_choice)
    # A schema that is wrong is refused whatever the format, also where the format would not read all of it.
    grammar = _grammar(hermes.FORM, tools, chosen, parallel)
    form = FORMATS[format].form
    return grammar if form is hermes.FORM else _grammar(form, tools, chosen, parallel)


def _grammar(
    form: CallForm, tools: Sequence[Mapping[str, Any]], chosen: Sequence[int], parallel: bool
) -> Grammar:
    rules = {index: _tool_rules(form, index, tools[index]["function"]) for index in chosen}
    grammar = _assembled(form, rules, parallel)
    fault = _fault(grammar)
    if not fault:
        return grammar
    look = _too_long if _too_long(grammar) else _fault  # what is too long to be compiled is not, tool by tool
    for index, own in rules.items():
        if fault_of_one := look(_assembled(form, {index: own}, parallel)):
            raise RequestError(
                f"tools[{index}].function.parameters: cannot be enforced: {fault_of_one}; change or remove that"
            )
    raise RequestError(f"tools: cannot be enforced together: {fault}; send fewer or smaller ones")


def _too_long(grammar: Grammar) -> str:
    length, limit = len(grammar.source), MAX_CHARS["lark"]
    return f"as a grammar it has {length} characters, and {limit} are allowed" if length > limit else ""


def _chosen(tools: Sequence[Mapping[str, Any]], tool_choice: Any) -> list[int]:
    if tool_choice == "required":
        if not tools:
            raise RequestError("tool_choice: 'required' needs at least one entry in `tools`")
        return list(range(len(tools)))
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name is None or tool_choice.get("type") != "function":
        raise RequestError(
            "tool_choice: must be 'auto', 'none', 'required' or "
            '{"type": "function", "function": {"name": ...}}'
        )
    for index, tool in enumerate(tools):
        if tool["function"]["name"] == name:
            return [index]
    raise RequestError(f"tool_choice: `tools` has no function named {name!r}")


def _assembled(form: CallForm, rules: Mapping[int, Rules], parallel: bool) -> Grammar:
    """One grammar for these tools, each with its own rules."""
    whole = form.rules([f"tool_{index}" for index in rules], parallel)
    for own in rules.values():
        whole |= own
    return Grammar("lark", "".join(f"{name}: {body}\n" for name, body in whole.items()))


def _tool_rules(form: CallForm, index: int, function: Mapping[str, Any]) -> Rules:
    where = f"tools[{index}].function.parameters"
    try:
        schema = without_notes(function.get("parameters") or {"properties": {}})
        if json_types({**schema, "type": schema.get("type", "object")}, schema) != frozenset({"object"}):
            raise RequestError(f"{where}.type: must be 'object', for arguments have names")
        return form.write(f"{index}", function["name"], schema, where)
    except RequestError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{where}: is not a JSON schema ({error}); correct it") from error


def _fault(grammar: Grammar) -> str:
    """What is wrong with a grammar, in one line; empty if nothing is. Some faults show only when the grammar
    meets a vocabulary; the compiler reports those."""
    if too_long := _too_long(grammar):
        return too_long
    return _faults.get(grammar, lambda: _fault_found(grammar))


def _fault_found(grammar: Grammar) -> str:
    stay_here()
    try:
        found = measure(translate(grammar))
    except (RequestError, TooCostly) as error:
        return str(error)
    told = found.error or found.warning
    return next((line.strip()[:300] for line in told.splitlines() if line.strip()), "")


_faults: Recent[Grammar, str] = Recent(MAX_CACHED)
