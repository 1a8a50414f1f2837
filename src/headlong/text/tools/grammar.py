"""A grammar that leaves a model no choice but to call a tool, in the format it was trained on.

Written in llguidance's Lark dialect. The arguments follow the tool's schema: the members of an object
come in the schema's order, with the separators that chat templates show, and without members that the
schema does not list. Where the format writes strings bare, they are free text up to the closing tag
unless `enum`, `const`, `pattern`, `minLength` or `maxLength` says more. Knows no tokens: the engine
turns the grammar into masks.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from llguidance import regex_to_lark

from headlong.errors import RequestError
from headlong.params import Grammar
from headlong.text.grammar import MAX_CACHED, Recent, stay_here
from headlong.text.grammar_cost import TooCostly, measure
from headlong.text.grammar_source import MAX_CHARS, translate
from headlong.text.tools import qwen3_coder
from headlong.text.tools.schema import STRING, json_types, resolve, without_notes

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_COMBINING = ("allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "propertyNames")
_COUNTING = ("minProperties", "maxProperties", "dependentRequired", "dependentSchemas")
_STRING_LIMITS = ("pattern", "minLength", "maxLength")

Rules = dict[str, str]
"""Rules of the grammar by name; a name may carry attributes in brackets."""
Writer = Callable[[str, str, Mapping[str, Any], str], Rules]
"""Writes the rules of one tool, given its key among the rules, its name, its schema and the field's name in errors."""


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
    format: Literal["hermes", "qwen3_coder"],
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
    grammar = _grammar(_hermes_rules, tools, chosen, parallel)
    return grammar if format == "hermes" else _grammar(_qwen3_coder_rules, tools, chosen, parallel)


def _grammar(
    write: Writer, tools: Sequence[Mapping[str, Any]], chosen: Sequence[int], parallel: bool
) -> Grammar:
    rules = {index: _tool_rules(write, index, tools[index]["function"]) for index in chosen}
    grammar = _assembled(rules, parallel)
    fault = _fault(grammar)
    if not fault:
        return grammar
    look = _too_long if _too_long(grammar) else _fault  # what is too long to be compiled is not, tool by tool
    for index, own in rules.items():
        if fault_of_one := look(_assembled({index: own}, parallel)):
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


def _assembled(rules: Mapping[int, Rules], parallel: bool) -> Grammar:
    """One grammar for these tools, each with its own rules."""
    whole: Rules = {
        "start": 'call ("\\n" call)*' if parallel else "call",
        "call": f'"<tool_call>\\n" ({" | ".join(f"tool_{index}" for index in rules)}) "\\n</tool_call>"',
    }
    for own in rules.values():
        whole |= own
    return Grammar("lark", "".join(f"{name}: {body}\n" for name, body in whole.items()))


def _tool_rules(write: Writer, index: int, function: Mapping[str, Any]) -> Rules:
    where = f"tools[{index}].function.parameters"
    try:
        schema = without_notes(function.get("parameters") or {"properties": {}})
        if json_types({**schema, "type": schema.get("type", "object")}, schema) != frozenset({"object"}):
            raise RequestError(f"{where}.type: must be 'object', for arguments have names")
        return write(f"{index}", function["name"], schema, where)
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


def _hermes_rules(key: str, name: str, schema: Mapping[str, Any], _: str) -> Rules:
    closed = _closed(schema) if "properties" in schema else {}
    head = f'{{"name": {json.dumps(name)}, "arguments": '
    return {
        f"tool_{key}": f'{_text(head)} arguments_{key} "}}"',
        f"arguments_{key}": _json({**schema, **closed, "type": "object"}),
    }


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    open_ended = "additionalProperties" in schema or any(word in schema for word in (*_COMBINING, "$ref"))
    return {} if open_ended else {"additionalProperties": False}


def _qwen3_coder_rules(key: str, name: str, schema: Mapping[str, Any], where: str) -> Rules:
    root = resolve(schema, schema)
    for word in (*_COMBINING, *_COUNTING):
        if word in root:
            raise RequestError(f"{where}.{word}: cannot be enforced in this model's call format; remove it")
    properties: Mapping[str, Any] = root.get("properties") or {}
    required = root.get("required") or []
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise RequestError(f"{where}: `properties` must be an object and `required` a list")
    rules: Rules = {}
    blocks = []
    for number, parameter in enumerate([*properties, *(name for name in required if name not in properties)]):
        _check_parameter_name(parameter, where)
        rule = f"{key}_{number}"
        head = _text(f"{qwen3_coder.PARAMETER}{parameter}>\n")
        rules[f"parameter_{rule}"] = f'{head} value_{rule} "\\n"'
        rules |= _value_rules(f"value_{rule}", properties.get(parameter, {}), schema, where)
        blocks.append(f"parameter_{rule}" + ("" if parameter in required else "?"))
    opening, closing = _text(f"{qwen3_coder.FUNCTION}{name}>\n"), _text(qwen3_coder.FUNCTION_END)
    return {f"tool_{key}": " ".join([opening, *blocks, closing]), **rules}


def _check_parameter_name(name: Any, where: str) -> None:
    fits = isinstance(name, str) and 0 < len(name) <= qwen3_coder.MAX_NAME and name == name.strip()
    if not fits or any(char in "<>\n" for char in name):
        raise RequestError(f"{where}.properties: {name!r} cannot be written in this model's call format")


def _value_rules(rule: str, schema: Any, root: Mapping[str, Any], where: str) -> Rules:
    """Rules for one value and its closing tag."""
    schema = resolve(schema, root)
    closing = _text(f"\n{qwen3_coder.PARAMETER_END}")
    if _is_free_text(schema, root):
        # Lazy, so the first closing tag ends it, with or without a newline.
        text = f'(/(?s:.*)/ & {_without(*qwen3_coder.CALL_ENDS)}) "{qwen3_coder.PARAMETER_END}"'
        return {f"{rule}[lazy]": rule.upper(), rule.upper(): text}
    if values := _listed_values(schema):
        return {rule: f"({' | '.join(_written(value, where) for value in values)}) {closing}"}
    if branches := _branches(schema):
        found: Rules = {rule: " | ".join(f"{rule}_{number}" for number in range(len(branches)))}
        for number, branch in enumerate(branches):
            found |= _value_rules(f"{rule}_{number}", branch, root, where)
        return found
    if json_types(schema, root) == STRING:
        return {f"{rule}[lazy]": rule.upper(), rule.upper(): f"({_limited_text(schema, where)}) {closing}"}
    definitions = {word: root[word] for word in ("$defs", "definitions") if word in root}
    return {rule: f"{_json({**definitions, **schema})} {closing}"}


def _is_free_text(schema: Any, root: Mapping[str, Any]) -> bool:
    """Whether a value may be any text. Where a string is but one of the types, its limits are not enforced."""
    schema = resolve(schema, root)
    types = json_types(schema, root)
    if _listed_values(schema) or (types is not None and "string" not in types):
        return False
    if branches := _branches(schema):
        return types is None or any(_is_free_text(branch, root) for branch in branches)
    return types != STRING or not any(word in schema for word in _STRING_LIMITS)


def _listed_values(schema: Mapping[str, Any]) -> list[Any]:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else []


def _branches(schema: Mapping[str, Any]) -> list[Any]:
    branches = schema.get("anyOf") or schema.get("oneOf")
    return branches if isinstance(branches, list) and "type" not in schema else []


def _written(value: Any, where: str) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if any(tag in text for tag in (qwen3_coder.PARAMETER_END, *qwen3_coder.CALL_ENDS)):
        raise RequestError(f"{where}: {value!r} cannot be written in this model's call format")
    return _text(text)


def _limited_text(schema: Mapping[str, Any], where: str) -> str:
    """Terminals that a bare string must match, all at once."""
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    if not isinstance(low, int) or not (isinstance(high, int) or high == ""):
        raise RequestError(f"{where}: `minLength` and `maxLength` must be whole numbers")
    parts = [f"/(?s:.{{{low},{high}}})/", _without(qwen3_coder.PARAMETER_END, *qwen3_coder.CALL_ENDS)]
    pattern = schema.get("pattern")
    if pattern is not None:
        if not isinstance(pattern, str):
            raise RequestError(f"{where}: `pattern` must be a string")
        before = "" if pattern.startswith("^") else "(?s:.*)"
        after = "" if re.search(r"(?<!\\)(?:\\\\)*\$$", pattern) else "(?s:.*)"
        core = pattern.removeprefix("^")
        core = core if after else core[:-1]
        parts.append(f"/{before}(?:{regex_to_lark(core, 'dw')}){after}/")
    return " & ".join(parts)


def _without(*tags: str) -> str:
    """A terminal for any text that contains none of these."""
    return f"~/(?s:.*)({'|'.join(tags)})(?s:.*)/".replace("</", "<\\/").replace("\n", "\\n")


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _SEPARATORS}, allow_nan=False)


def _text(text: str) -> str:
    return json.dumps(text)
