"""Objects that list their members get no others; a schema that could not be met so stays as it is."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from headlong.params import Grammar
from headlong.text.closed_schema import closed
from headlong.text.grammar_source import translate

TOY = {"type": "object", "properties": {"red": {"type": "boolean"}}}
CLOSED_TOY = TOY | {"additionalProperties": False}


def pet(toy):
    return {
        "type": "object",
        "properties": {"name": {"type": "string"}, "toys": {"type": "array", "items": toy}, "if": toy},
        "required": ["name"],
    }


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        (TOY, CLOSED_TOY),
        ({"anyOf": [TOY, {"type": "null"}]}, {"anyOf": [CLOSED_TOY, {"type": "null"}]}),
        (
            {"$defs": {"toy": TOY}, "$ref": "#/$defs/toy"},
            {"$defs": {"toy": CLOSED_TOY}, "$ref": "#/$defs/toy"},
        ),
        ({"additionalProperties": TOY}, {"additionalProperties": CLOSED_TOY}),
        ({"propertyNames": {"type": "string"}, "additionalProperties": {}}, {"additionalProperties": {}}),
        ({"prefixItems": [TOY], "const": [TOY]}, {"prefixItems": [CLOSED_TOY], "const": [TOY]}),
    ],
)
def test_lists_are_whole(schema, wanted):
    before = json.dumps(schema)
    assert closed(schema) == wanted and json.dumps(schema) == before


def test_inside():
    schema = pet(TOY)
    del schema["properties"]["if"]
    wanted = pet(CLOSED_TOY) | {"additionalProperties": False}
    del wanted["properties"]["if"]
    assert closed(schema) == wanted


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        TOY | {"additionalProperties": True},
        TOY | {"additionalProperties": {"type": "string"}},
        TOY | {"patternProperties": {"^x": {"type": "string"}}},
        TOY | {"required": ["blue"]},
        TOY | {"minProperties": 2},
        {"allOf": [TOY, {"properties": {"blue": {"type": "boolean"}}, "required": ["blue"]}]},
        {"$defs": {"toy": TOY}, "items": {"allOf": [{"$ref": "#/$defs/toy"}], "properties": {}}},
        TOY | {"anyOf": [{"required": ["blue"]}, {"required": ["green"]}]},
        TOY | {"properties": 7},
        TOY | {"minProperties": "x"},
    ],
)
def test_what_may_need_more_stays_open(schema):
    assert closed(schema) == schema


def test_the_grammar_follows():
    tokenizer = LLTokenizer("byte")

    def takes(text):
        matcher = LLMatcher(tokenizer, translate(Grammar("json_schema", json.dumps(TOY))))
        return matcher.try_consume_tokens(tokenizer.tokenize_str(text)) == len(text)

    assert takes('{"red": true}') and takes("{}") and not takes('{"red": true, "it": 1}')
