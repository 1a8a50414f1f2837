"""Grammars that are wrong, unsupported, hostile or too much: refused with the reason, and in time."""

import json
import time

import pytest

from headlong.errors import RequestError
from headlong.params import Grammar
from headlong.text import grammar as grammar_module
from headlong.text.grammar import GrammarCompiler


@pytest.fixture(scope="module")
def compiler(tale) -> GrammarCompiler:
    return GrammarCompiler(tale, tale.vocab_size, (2, 0))


WRONG = {
    "not JSON": (Grammar("json_schema", "{type: object}"), "not valid JSON"),
    "not a schema": (Grammar("json_schema", "[1]"), "not a JSON object"),
    "NaN": (Grammar("json_schema", '{"minimum": NaN}'), "NaN is not JSON"),
    "huge number": (Grammar("json_schema", '{"minimum": ' + "9" * 6000 + "}"), "not valid JSON"),
    "unknown type": (Grammar("json_schema", '{"type": "text"}'), "Invalid type: text"),
    "unsupported keyword": (Grammar("json_schema", '{"not": {"type": "string"}}'), '"not"'),
    "unsupported format": (Grammar("json_schema", '{"type": "string", "format": "wkt"}'), "wkt"),
    "leniently unsupported": (
        Grammar("json_schema", '{"x-guidance": {"lenient": true}, "uniqueItems": true, "type": "array"}'),
        "uniqueItems",
    ),
    "overlapping oneOf": (
        Grammar("json_schema", '{"oneOf": [{"type": "number"}, {"type": "integer"}]}'),
        "oneOf",
    ),
    "unsatisfiable": (Grammar("json_schema", '{"allOf": [{"type": "null"}, {"const": 1}]}'), "Unsatisfiable"),
    "no end": (
        Grammar("json_schema", '{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'),
        "no token",
    ),
    "remote ref": (Grammar("json_schema", '{"$ref": "https://example.com/s"}'), "example.com"),
    "deep schema": (Grammar("json_schema", '{"items":' * 20000 + "{}" + "}" * 20000), "nested too deeply"),
    "look-ahead": (Grammar("regex", "(?=a)b"), "look-ahead"),
    "open bracket": (Grammar("regex", "[a"), "unclosed"),
    "surrogate": (Grammar("regex", "a\ud800"), "lone surrogates"),
    "lark syntax": (Grammar("lark", 'begin: "a"'), "start"),
    "lark empty": (Grammar("lark", "start: a\na: a"), "no token"),
    "lark max_tokens": (Grammar("lark", "start: x\nx[max_tokens=3]: /[a-z]+/"), "max_tokens"),
    "lark temperature": (Grammar("lark", "start: x\nx[temperature=0.5]: /[a-z]+/"), "temperature"),
    "lark special token": (Grammar("lark", "start: <nothing>"), "nothing"),
    "gbnf syntax": (Grammar("gbnf", 'root = "a"'), "::="),
    "gbnf without root": (Grammar("gbnf", 'a ::= "b"'), "root"),
    "gbnf deep": (Grammar("gbnf", "root ::= " + "(" * 5000), "nested too deeply"),
    "gbnf rules": (Grammar("gbnf", "".join(f'r{i} ::= "a"\n' for i in range(501))), "500 rules"),
    "choice not JSON": (Grammar("choice", "yes|no"), "not valid JSON"),
    "choice of numbers": (Grammar("choice", "[1, 2]"), "1"),
    "no choice": (Grammar("choice", "[]"), "list of strings"),
    "empty choice": (Grammar("choice", '["a", ""]'), "not a text"),
    "long source": (Grammar("choice", json.dumps(["x" * (1 << 18)])), "characters"),
    "long lark": (Grammar("lark", "start: " + '"a" ' * (1 << 14)), "characters"),
    "slow multiples": (
        Grammar("json_schema", '{"type": "integer", "allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}'),
        "multipleOf",
    ),
    "hidden multiple": (
        Grammar("lark", 'start: %json {"type": "integer", "multiple\\u004ff": 99999989}'),
        "multipleOf",
    ),
    "long marker": (Grammar("json_object", after="x" * 300), "grammar.after"),
    "marker surrogate": (Grammar("json_object", after="\udfff"), "grammar.after"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_used_is_refused_with_the_reason(compiler, name):
    grammar, reason = WRONG[name]
    with pytest.raises(RequestError) as caught:
        compiler.compile(grammar)
    message = str(caught.value)
    assert message.startswith("grammar") and reason in message and len(message) < 1000
    assert "non-verbose" not in message


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("lark", "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4500)) + 'r4500: "z"'),
        Grammar(
            "lark", "start: R0\n" + "".join(f'R{i}: "a" R{i + 1}?\n' for i in range(3000)) + 'R3000: "z"'
        ),
        Grammar(
            "json_schema",
            json.dumps(
                {
                    "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(5000)}
                    | {"d5000": {"type": "string"}},
                    "$ref": "#/$defs/d0",
                }
            ),
        ),
        Grammar(
            "json_schema", json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(3000)}})
        ),
        Grammar("regex", "(x{1,1000}){1,1000}|(a|b)*a(a|b){300}"),
    ],
)
def test_hostile_grammars_end_in_an_answer(compiler, grammar):
    """Long chains overrun a usual stack and would end the process."""
    started = time.perf_counter()
    try:
        constraint = compiler.compile(grammar)()
        assert constraint.masks([], 0, 1)[0] is not None
    except RequestError as error:
        assert str(error).startswith("grammar")
    assert time.perf_counter() - started < 60


def test_a_model_without_an_end(tale):
    with pytest.raises(RequestError, match="end-of-sequence"):
        GrammarCompiler(tale, tale.vocab_size, ()).compile(Grammar("json_object"))


def test_compiling_has_a_time_limit(compiler, monkeypatch):
    """One that was given up makes room when it is done."""
    grammar = Grammar("choice", json.dumps([f"option {number}" for number in range(9000)]))
    with monkeypatch.context() as patch:
        patch.setattr(grammar_module, "MAX_SECONDS", 1e-4)
        with pytest.raises(RequestError, match=r"grammar: .* takes longer than"):
            compiler.compile(grammar)
    for _ in range(grammar_module.MAX_AT_ONCE + 1):
        assert compiler.compile(grammar)().masks([], 0, 1)[0] is not None
