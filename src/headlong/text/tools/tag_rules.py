"""Grammars for calls whose parameters are tags.

Where a format writes strings bare, they are free text up to the closing tag unless `enum`, `const`, `pattern`,
`minLength` or `maxLength` says more.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llguidance import regex_to_lark

from headlong.errors import RequestError
from headlong.text.tools.rules import COMBINING, Rules, RuleWriter, json_value, literal, without
from headlong.text.tools.scan import MAX_NAME
from headlong.text.tools.schema import JSON_TYPES, STRING, json_types, resolve

_COUNTING = ("minProperties", "maxProperties", "dependentRequired", "dependentSchemas")
_STRING_LIMITS = ("pattern", "minLength", "maxLength")


@dataclass(frozen=True)
class TagForm:
    """How a parameter is written: its head, given its key and whether its value is a bare string, its value, a newline
    perhaps, its closing tag, and what stands after it."""

    head: Callable[[str, bool], str]
    end: str
    newline: str = ""
    also_ends: tuple[str, ...] = ()
    """What else the scanner takes for the end of a value."""
    after: str = ""
    tells_text: bool = False
    """Whether the head says if the value is a bare string."""
    forbidden: str = "<>\n"
    """What no key can hold."""

    @property
    def closing(self) -> str:
        return literal(f"{self.newline}{self.end}")


def tagged_rules(form: TagForm, opening: Callable[[str], str], closing: str = "") -> RuleWriter:
    """For calls of parameters between an opening, given the tool's name, and a closing."""

    def write(key: str, name: str, schema: Mapping[str, Any], where: str) -> Rules:
        root = resolve(schema, schema)
        for word in (*COMBINING, *_COUNTING):
            if word in root:
                raise RequestError(
                    f"{where}.{word}: cannot be enforced in this model's call format; remove it"
                )
        properties: Mapping[str, Any] = root.get("properties") or {}
        required = root.get("required") or []
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise RequestError(f"{where}: `properties` must be an object and `required` a list")
        rules: Rules = {}
        blocks = []
        unlisted = (name for name in required if name not in properties)
        for number, parameter in enumerate([*properties, *unlisted]):
            _check_key(form, parameter, where)
            rule = f"{key}_{number}"
            value = _Value(form, parameter, schema, where)
            rules[f"parameter_{rule}"] = (
                f"value_{rule} {literal(form.after)}" if form.after else f"value_{rule}"
            )
            rules |= value.rules(f"value_{rule}", properties.get(parameter, {}))
            blocks.append(f"parameter_{rule}" + ("" if parameter in required else "?"))
        end = [literal(closing)] if closing else []
        return {f"tool_{key}": " ".join([literal(opening(name)), *blocks, *end]), **rules}

    return write


def _check_key(form: TagForm, key: Any, where: str) -> None:
    fits = isinstance(key, str) and 0 < len(key) <= MAX_NAME and key == key.strip()
    if not fits or any(char in form.forbidden for char in key):
        raise RequestError(f"{where}.properties: {key!r} cannot be written in this model's call format")


@dataclass(frozen=True)
class _Value:
    """Writes the rules of one parameter: its head, its value and its closing tag."""

    form: TagForm
    key: str
    root: Mapping[str, Any]
    where: str

    def rules(self, rule: str, schema: Any) -> Rules:
        form = self.form
        schema = resolve(schema, self.root)
        if self._is_free_text(schema):
            return self._free_text(rule, schema)
        if values := _listed_values(schema):
            return {rule: " | ".join(self._written(value) for value in values)}
        if branches := _branches(schema):
            found: Rules = {rule: " | ".join(f"{rule}_{number}" for number in range(len(branches)))}
            for number, branch in enumerate(branches):
                found |= self.rules(f"{rule}_{number}", branch)
            return found
        if json_types(schema, self.root) == STRING:
            return self._text(rule, f"({self._limited(schema)}) {form.closing}")
        return {rule: self._json(schema)}

    def _free_text(self, rule: str, schema: Mapping[str, Any]) -> Rules:
        form = self.form
        # Lazy, so the first closing tag ends it, with or without a newline.
        beside = f" & {without(*form.also_ends)}" if form.also_ends else ""
        found = self._text(rule, f"(/(?s:.*)/{beside}) {literal(form.end)}")
        types = json_types(schema, self.root)
        if form.tells_text and types != STRING:
            others = sorted((types or JSON_TYPES) - {"string"})
            found[rule] += f" | {self._json({**schema, 'type': others})}"
        return found

    def _text(self, rule: str, terminal: str) -> Rules:
        """A bare string, as a terminal that ends with the closing tag."""
        return {
            rule: f"{self._head(True)} text_{rule}",
            f"text_{rule}[lazy]": f"TEXT_{rule.upper()}",
            f"TEXT_{rule.upper()}": terminal,
        }

    def _json(self, schema: Mapping[str, Any]) -> str:
        definitions = {word: self.root[word] for word in ("$defs", "definitions") if word in self.root}
        return f"{self._head(False)} {json_value({**definitions, **schema})} {self.form.closing}"

    def _head(self, is_text: bool) -> str:
        return literal(self.form.head(self.key, is_text))

    def _is_free_text(self, schema: Any) -> bool:
        """Whether a value may be any text. Where a string is but one of the types, its limits are not enforced."""
        schema = resolve(schema, self.root)
        types = json_types(schema, self.root)
        if _listed_values(schema) or (types is not None and "string" not in types):
            return False
        if branches := _branches(schema):
            return types is None or any(self._is_free_text(branch) for branch in branches)
        return types != STRING or not any(word in schema for word in _STRING_LIMITS)

    def _written(self, value: Any) -> str:
        is_text = isinstance(value, str)
        text = value if is_text else json.dumps(value, ensure_ascii=False)
        if any(tag in text for tag in (self.form.end, *self.form.also_ends)):
            raise RequestError(f"{self.where}: {value!r} cannot be written in this model's call format")
        return f"{self._head(is_text)} {literal(text)} {self.form.closing}"

    def _limited(self, schema: Mapping[str, Any]) -> str:
        """Terminals that a bare string must match, all at once."""
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        if not isinstance(low, int) or not (isinstance(high, int) or high == ""):
            raise RequestError(f"{self.where}: `minLength` and `maxLength` must be whole numbers")
        parts = [f"/(?s:.{{{low},{high}}})/", without(self.form.end, *self.form.also_ends)]
        pattern = schema.get("pattern")
        if pattern is not None:
            if not isinstance(pattern, str):
                raise RequestError(f"{self.where}: `pattern` must be a string")
            before = "" if pattern.startswith("^") else "(?s:.*)"
            after = "" if re.search(r"(?<!\\)(?:\\\\)*\$$", pattern) else "(?s:.*)"
            core = pattern.removeprefix("^")
            core = core if after else core[:-1]
            parts.append(f"/{before}(?:{regex_to_lark(core, 'dw')}){after}/")
        return " & ".join(parts)


def _listed_values(schema: Mapping[str, Any]) -> list[Any]:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else []


def _branches(schema: Mapping[str, Any]) -> list[Any]:
    branches = schema.get("anyOf") or schema.get("oneOf")
    return branches if isinstance(branches, list) and "type" not in schema else []
