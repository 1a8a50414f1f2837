"""Grammars that force a call: random walks under the engine's own masks are read back and must fit the schema."""

import json
import random
import subprocess
import sys
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from output_samples import HERMES, QWEN3_CODER, read, tool

from headlong.errors import RequestError
from headlong.params import Grammar
from headlong.text.grammar import GrammarCompiler
from headlong.text.output import ChatFormat

EOS = 2
ITEM = {
    "type": "object",
    "properties": {"k": {"type": "number"}, "s": {"type": "string", "maxLength": 5}},
    "required": ["k"],
    "additionalProperties": False,
}
RICH = {
    "type": "object",
    "description": "Everything at once.",
    "properties": {
        "city": {"type": "string", "description": "free text"},
        "unit": {"enum": ["c", "f", "é <"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9, "format": "int32"},
        "label": {"anyOf": [{"type": "string", "enum": ["x", "y"]}, {"type": "null"}]},
        "code": {"type": "string", "pattern": "^[A-Z]{2}/\\d+$", "maxLength": 6},
        "short": {"type": "string", "minLength": 1, "maxLength": 3},
        "items": {"type": "array", "items": {"$ref": "#/$defs/Item"}, "maxItems": 2},
        "flag": {"type": "boolean"},
        "très 'bon'": {"type": ["string", "null"]},
        "any": {},
    },
    "required": ["city", "days", "items", "code"],
    "$defs": {"Item": ITEM},
}
TOOLS = [tool("look-up_1", RICH), tool("bare"), tool("none", {"type": "object", "properties": {}})]
SCHEMAS = {"look-up_1": RICH, "bare": {"type": "object", "maxProperties": 0}, "none": {"maxProperties": 0}}
NAMED = {"type": "function", "function": {"name": "look-up_1"}}
FORMATS = {"hermes": HERMES, "qwen3_coder": QWEN3_CODER}
ENDS = ("\n</parameter>\n", "</parameter>\n", '"', "]", "}", ', "')


@pytest.fixture(scope="module")
def compiler(tale) -> GrammarCompiler:
    return GrammarCompiler(tale, tale.vocab_size, [EOS])


def walk(
    compiler: GrammarCompiler, tale: Any, grammar: Grammar, rng: random.Random, max_len: int
) -> str | None:
    """A random output under the grammar's masks; strings and lists are closed rather often, or none would end."""
    constraint = compiler.compile(grammar)()
    endings = [tale.encode(end) for end in ENDS]
    tokens: list[int] = []
    while len(tokens) < max_len:
        mask = constraint.masks([], 0, 1)[0]
        assert mask is not None
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
        if EOS in allowed and (len(allowed) == 1 or rng.random() < 0.3):
            return tale.decode(tokens, skip_special_tokens=False)
        step = [int(rng.choice(allowed[allowed != EOS]))]
        if rng.random() < 0.4:
            ending = rng.choice(endings)
            masks = constraint.masks(ending, 0, len(ending))
            step = (
                ending if all(_has(mask, token) for mask, token in zip(masks, ending, strict=True)) else step
            )
        assert constraint.advance(step) == len(step), constraint.failure
        tokens += step
    return None


def _has(mask: bytes | None, token: int) -> bool:
    return mask is not None and bool(mask[token // 8] >> token % 8 & 1)


def finite(text: str) -> float:
    """A walk may well write 1e999, which is JSON and fits `number`."""
    return min(max(float(text), -1e300), 1e300)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("choice", "parallel"), [("required", True), ("required", False), (NAMED, True), (NAMED, False)]
)
def test_walks_are_calls_that_fit(compiler, tale, name, choice, parallel):
    format, rng = FORMATS[name], random.Random(f"{name} {choice} {parallel}")
    grammar = format.tool_grammar(TOOLS, choice, parallel)
    assert grammar is not None
    seen: list[str] = []
    nums = set()
    for _ in range(25):
        text = walk(compiler, tale, grammar, rng, max_len=1500)
        if text is None:
            continue
        output = read(format, text, tools=TOOLS)
        assert output.content == "" and output.calls
        for call in output.calls:
            arguments = json.loads(call.arguments, parse_float=finite)
            jsonschema_rs.validate(SCHEMAS[call.name], arguments)
            order = [key for key in RICH["properties"] if key in arguments]
            assert list(arguments) == order, "in the schema's order, and nothing else"
            seen.append(call.name)
        nums.add(len(output.calls))
    assert set(seen) == ({"look-up_1"} if choice is NAMED else set(SCHEMAS))
    assert (max(nums) > 1) == parallel and min(nums) == 1


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("hermes", '<tool_call>\n{"name": "bare", "arguments": {}}\n</tool_call>', True),
        ("hermes", '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>', False),
        ("hermes", '<tool_call>\n{"name": "bare", "arguments": {"a": 1}}\n</tool_call>', False),
        ("hermes", "Sure.", False),
        ("qwen3_coder", "<tool_call>\n<function=bare>\n</function>\n</tool_call>", True),
        ("qwen3_coder", "<tool_call>\n<function=bare>\n<parameter=a>\n1\n</parameter>\n</function>", False),
        (
            "qwen3_coder",
            "<tool_call>\n<function=look-up_1>\n<parameter=city>\na < b\n\nc\n</parameter>\n",
            True,
        ),
        ("qwen3_coder", "<tool_call>\n<function=look-up_1>\n<parameter=unit>\n", False),
        (
            "qwen3_coder",
            "<tool_call>\n<function=look-up_1>\n<parameter=city>\nx\n</function>\n</tool_call>",
            False,
        ),
    ],
)
def test_what_is_allowed(compiler, tale, name, text, allowed):
    grammar = FORMATS[name].tool_grammar(TOOLS, "required", False)
    constraint = compiler.compile(grammar)()
    tokens = [token for char in text for token in tale.encode(char)]
    masks = constraint.masks(tokens, 0, len(tokens))
    assert all(_has(mask, token) for mask, token in zip(masks, tokens, strict=True)) == allowed


def test_free_choices_have_no_grammar():
    for choice in (None, "auto", "none"):
        assert HERMES.tool_grammar(TOOLS, choice, True) is None
        assert ChatFormat(None, None).tool_grammar(TOOLS, choice, True) is None


def test_long_descriptions_do_not_count():
    schema = {
        "type": "object",
        "properties": {"description": {"type": "string", "description": "x" * 100_000}},
    }
    grammar = QWEN3_CODER.tool_grammar([tool("f", schema)], "required", False)
    assert grammar is not None and len(grammar.source) < 1000
    assert "<parameter=description>" in grammar.source


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"type": "array"}, ".type: "),
        ({"type": "object", "properties": []}, ": "),
        ({"type": "object", "properties": {"a": {"type": "wibble"}}}, ": "),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}}, ": "),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/gone"}}}, ": "),
        ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, ": "),
        ({"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 99991}}}, ": "),
        ({"type": "object", "properties": {"a": {"type": "number", "minimum": float("nan")}}}, ": "),
        ({"type": "object", "properties": {"a": {"type": "string", "minLength": "3})/ x: /"}}}, ": "),
        (json.loads('{"properties": {"a": ' + '{"items":' * 400 + "{}" + "}" * 402), ": "),
    ],
)
def test_schemas_that_cannot_be_enforced(name, parameters, field):
    with pytest.raises(RequestError) as caught:
        FORMATS[name].tool_grammar([tool("fine"), tool("f", parameters)], "required", True)
    assert str(caught.value).startswith(f"tools[1].function.parameters{field}")


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"a>": {"type": "string"}}},
        {"type": "object", "properties": {"a\nb": {"type": "string"}}},
        {"type": "object", "properties": {"": {"type": "string"}}},
        {"type": "object", "properties": {"a": {"enum": ["x</parameter>"]}}},
        {"type": "object", "properties": {}, "anyOf": [{"required": ["a"]}]},
    ],
)
def test_schemas_that_tags_cannot_write(parameters):
    with pytest.raises(RequestError, match=r"^tools\[0\]\.function\.parameters"):
        QWEN3_CODER.tool_grammar([tool("f", parameters)], "required", True)


@pytest.mark.parametrize(
    ("tools", "choice", "field"),
    [
        ([], "required", "tool_choice: "),
        (None, "required", "tool_choice: "),
        (TOOLS, {"type": "function", "function": {"name": "gone"}}, "tool_choice: "),
        (TOOLS, {"type": "function"}, "tool_choice: "),
        (TOOLS, {"type": "tool", "function": {"name": "bare"}}, "tool_choice: "),
        (TOOLS, "any", "tool_choice: "),
        (TOOLS, 5, "tool_choice: "),
        ([3], "required", "tools[0]: "),
        ([{"type": "web_search"}], "required", "tools[0].type: "),
        ([{"type": "function"}], "required", "tools[0].function: "),
        ([tool("ok"), tool("a b")], "required", "tools[1].function.name: "),
        ([tool('x">\n')], "required", "tools[0].function.name: "),
        ([tool("a" * 65)], "required", "tools[0].function.name: "),
        ([tool("f"), tool("f")], "required", "tools[1].function.name: "),
        (
            [{"type": "function", "function": {"name": "f", "parameters": 5}}],
            "required",
            "tools[0].function.parameters: ",
        ),
        ([tool(f"f{n}", RICH) for n in range(200)], "required", "tools: "),
    ],
)
def test_refusals_name_the_field(tools, choice, field):
    for format in FORMATS.values():
        with pytest.raises(RequestError) as caught:
            format.tool_grammar(tools, choice, True)
        assert str(caught.value).startswith(field)


def test_models_without_calls():
    with pytest.raises(RequestError, match=r"^tool_choice: "):
        ChatFormat(None, None).tool_grammar(TOOLS, "required", True)


def test_a_schema_that_recurses_deeply_ends_no_process():
    """The library follows references on its own stack, which must be deep enough for any schema we take."""
    code = """
from headlong.errors import RequestError
from headlong.text.tools.grammar import call_grammar
depth = 1100
chain = {f"n{i}": {"items": {"$ref": f"#/$defs/n{i + 1}"}} for i in range(depth)} | {f"n{depth}": {}}
schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/n0"}}, "$defs": chain}
tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
for format in ("hermes", "qwen3_coder"):
    try:
        call_grammar(format, [tool], "required", False)
    except RequestError:
        pass
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
