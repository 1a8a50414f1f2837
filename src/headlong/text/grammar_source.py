"""Turns what a request sends as a grammar into the text that the grammar library compiles, or refuses it.

The library bounds most of what a hostile grammar can cost; what it does not bound is bounded here. Knows no
tokenizer and compiles nothing.
"""

import json
import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from headlong.errors import RequestError
from headlong.params import Grammar
from headlong.text.closed_schema import closed

MAX_CHARS = {"lark": 1 << 16, "gbnf": 1 << 15}
MAX_CHARS_OTHERS = 1 << 18
MAX_GBNF_RULES = 500
"""The most rules of a GBNF grammar: the converter's time grows with the square of their number."""
MAX_MULTIPLE = 10_000
"""The largest `multipleOf`: divisibility is decided by an automaton with as many states as the least common
multiple."""
JSON_BLANKS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""White space between JSON tokens: what `json.dumps` writes, one space or none after a comma or colon. A weak model
that may write more writes little else."""

NAMES = {
    "json_schema": "JSON schema",
    "json_object": "JSON object",
    "regex": "pattern",
    "lark": "Lark grammar",
    "gbnf": "GBNF grammar",
    "choice": "list of choices",
}
FIXES = {
    "json_schema": "rewrite or leave out what it names",
    "json_object": "ask for a json_schema instead",
    "regex": "write it without look-around, word boundaries and back references",
    "lark": "correct it, or describe the form as a json_schema or regex",
    "gbnf": "correct it, or describe the form as a json_schema or regex",
    "choice": 'give a JSON list of strings such as ["yes", "no"]',
}

# Without it the library forces its own choice of tokens where the text is certain, and asks the tokenizer for it.
_OPTIONS = '%llguidance {"no_forcing": true}'
_TEMPERATURE = re.compile(r"^[^\S\n]*[?!]?[\w-]+[^\S\n]*\[[^\]\n]*\btemperature\s*=", re.MULTILINE)
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*(-?[0-9.]+(?:[eE][-+]?[0-9]{1,3})?)')
_JSON_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")
_GBNF_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[\s\S])")


def translate(grammar: Grammar) -> str:
    """The grammar in the library's own form, with its alternative. Raises `RequestError` if it has none."""
    forms = [("content", grammar)]
    if grammar.alternative is not None:
        forms.append(("alternative", grammar.alternative))
    parts = [{"name": name, **_part(form)} for name, form in forms]
    if len(parts) == 1 and "lark_grammar" in parts[0]:
        return parts[0]["lark_grammar"]
    either = " | ".join(f"@{name}" for name, _ in forms)
    return json.dumps({"grammars": [{"lark_grammar": f"{_OPTIONS}\nstart: {either}"}, *parts]})


def _part(grammar: Grammar) -> dict[str, Any]:
    """One form, as a `lark_grammar` or a `json_schema` of the library."""
    limit = MAX_CHARS.get(grammar.kind, MAX_CHARS_OTHERS)
    if len(grammar.source) > limit:
        raise refusal(
            grammar, f"it has {len(grammar.source)} characters, and {limit} are allowed", "shorten it"
        )
    try:
        grammar.source.encode()
        return _TRANSLATORS[grammar.kind](grammar)
    except UnicodeEncodeError as error:
        raise refusal(grammar, "it is not valid Unicode", "remove lone surrogates") from error
    except RecursionError as error:
        raise refusal(grammar, "it is nested too deeply", "flatten it") from error


def refusal(grammar: Grammar, why: str, fix: str | None = None) -> RequestError:
    return RequestError(
        f"grammar: the {NAMES[grammar.kind]} cannot be used: {why}; {fix or FIXES[grammar.kind]}"
    )


def _json_schema(grammar: Grammar) -> dict[str, Any]:
    schema = _parse_json(grammar)
    if not isinstance(schema, dict):
        raise refusal(grammar, "it is not a JSON object", 'give a schema such as {"type": "object"}')
    return _schema(grammar, closed(schema))


def _json_object(grammar: Grammar) -> dict[str, Any]:
    return _schema(grammar, {"type": "object"})


def _schema(grammar: Grammar, schema: dict[str, Any]) -> dict[str, Any]:
    options = schema.get("x-guidance", {})
    if not isinstance(options, dict):
        raise refusal(grammar, "x-guidance is not a JSON object", "leave it out")
    if options.keys().isdisjoint(("whitespace_pattern", *JSON_BLANKS)):
        options = {**JSON_BLANKS, **options}
    schema = {**schema, "x-guidance": options}
    _check_multiples(grammar, json.dumps(schema))
    return {"json_schema": schema}


def _regex(grammar: Grammar) -> dict[str, Any]:
    inner = json.loads(LLMatcher.grammar_from_regex(grammar.source))
    return _lark_part(inner["grammars"][0]["lark_grammar"])


def _choice(grammar: Grammar) -> dict[str, Any]:
    choices = _parse_json(grammar)
    if not isinstance(choices, list) or not choices:
        raise refusal(grammar, "it is not a JSON list of strings")
    for choice in choices:
        if not isinstance(choice, str) or not choice:
            raise refusal(grammar, f"it holds {choice!r}, which is not a text")
    # One terminal, not a rule: the library joins its alternatives into one automaton.
    return _lark_part(f"start: CHOICE\nCHOICE: {' | '.join(map(_lark_string, choices))}")


def _lark(grammar: Grammar) -> dict[str, Any]:
    if _TEMPERATURE.search(grammar.source):
        raise refusal(grammar, "it sets a temperature", "set the request's own temperature")
    text = _JSON_ESCAPE.sub(lambda found: chr(int(found[1], 16)), grammar.source)
    _check_multiples(grammar, text)
    return _lark_part(grammar.source)


def _gbnf(grammar: Grammar) -> dict[str, Any]:
    if grammar.source.count("::=") > MAX_GBNF_RULES:
        raise refusal(grammar, f"it has more than {MAX_GBNF_RULES} rules", "use fewer")
    try:
        lark = gbnf_to_lark(_GBNF_ESCAPE.sub(_plain_escape, grammar.source))
    except RecursionError:
        raise
    except Exception as error:  # the converter raises bare `Exception` for most faults
        raise refusal(grammar, str(error)) from error
    return _lark_part(lark)


def _lark_part(source: str) -> dict[str, Any]:
    return {"lark_grammar": f"{source}\n{_OPTIONS}\n"}


_TRANSLATORS: dict[str, Callable[[Grammar], dict[str, Any]]] = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "lark": _lark,
    "gbnf": _gbnf,
}


def _parse_json(grammar: Grammar) -> Any:
    def no_number(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(grammar.source, parse_constant=no_number)
    except ValueError as error:
        raise refusal(grammar, f"it is not valid JSON ({error})", "send it as JSON text") from error


def _check_multiples(grammar: Grammar, text: str) -> None:
    """Refuses `multipleOf`s that would keep the compiler busy for minutes. Powers of ten are free."""
    product = 1
    for number in _MULTIPLE.findall(text):
        try:
            digits = Decimal(number).normalize().as_tuple().digits
        except ArithmeticError:
            continue  # not a number; the library says so
        product = math.lcm(product, int("".join(map(str, digits))) or 1)
    if product > MAX_MULTIPLE:
        why = f"the least common multiple of its multipleOf values is above {MAX_MULTIPLE}"
        raise refusal(grammar, why, "use smaller ones")


def _lark_string(text: str) -> str:
    """A Lark string literal; what cannot be printed is escaped."""
    text.encode()
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() or ord(c) > 0xFFFF else f"\\u{ord(c):04x}" for c in quoted)


def _plain_escape(found: re.Match[str]) -> str:
    r"""GBNF's \u and \U as characters or \x, which is all that the converter's output may hold."""
    body = found[1]
    if len(body) == 1:
        return found[0]
    code = int(body[1:], 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(f"{found[0]} is not a character")
    return chr(code) if code > 0x7F else f"\\x{code:02X}"
