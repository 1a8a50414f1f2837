"""Calls that a grammar forces, in every family's format: they fit the tools' schemas and read back whole."""

import json
import random

import jsonschema_rs
import pytest
from format_samples import ASK, FORMATS, read_freely
from output_samples import tool
from test_tool_grammar import EOS, NAMED, SCHEMAS, TOOLS, _has, finite, walk

from headlong.errors import RequestError
from headlong.params import Grammar
from headlong.text.grammar import GrammarCompiler

SMALL = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["c", "f", "é <"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "code": {"type": "string", "pattern": "^[A-Z]{2}$"},
        "either": {"type": ["string", "null"]},
        "choice": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "boolean"}]},
    },
    "required": ["city", "days", "choice"],
}
SMALL_TOOLS = [tool("look-up_1", SMALL), tool("bare")]
FAMILIES = [name for name in FORMATS if name != "qwen3_coder"]
SEVERAL = [name for name in FAMILIES if name not in ("harmony", "llama3_json")]
ENDS = {
    "glm45": "</arg_value>\n", "glm47": "</arg_value>", "harmony": "<|end|>",
    "deepseek_v32": "</｜DSML｜parameter>\n", "deepseek_v4": "</｜DSML｜parameter>\n",
}  # fmt: skip


@pytest.fixture(scope="module")
def compiler(tale) -> GrammarCompiler:
    return GrammarCompiler(tale, tale.vocab_size, [EOS])


@pytest.mark.parametrize("name", FAMILIES)
def test_walks_are_calls_that_fit(compiler, tale, name, monkeypatch):
    monkeypatch.setattr("test_tool_grammar.ENDS", (ENDS.get(name, '"'), '"', "]", "}"))
    format, rng = FORMATS[name], random.Random(name)
    grammar = format.whole_grammar(None, format.tool_grammar(SMALL_TOOLS, "required", True), ASK)
    assert grammar is not None
    seen: list[str] = []
    nums = set()
    for _ in range(8):
        text = walk(compiler, tale, grammar, rng, max_len=600)
        if text is None:
            continue
        output = read_freely(format, [text], ASK if name == "harmony" else "", SMALL_TOOLS)
        assert output.content == "" and output.calls, text
        for call in output.calls:
            arguments = json.loads(call.arguments, parse_float=finite)
            jsonschema_rs.validate(SMALL if call.name == "look-up_1" else {"maxProperties": 0}, arguments)
            assert list(arguments) == [key for key in SMALL["properties"] if key in arguments]
            seen.append(call.name)
        nums.add(len(output.calls))
    assert (seen and min(nums) == 1) or name in SEVERAL
    assert max(nums) == 1 or name in SEVERAL


BARE = {
    "glm45": "<tool_call>bare\n</tool_call>",
    "glm47": "<tool_call>bare</tool_call>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>bare\n```json\n{}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>bare<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="bare">\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>",
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="bare">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.bare:0<|tool_call_argument_begin|>{}"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "mistral": '[TOOL_CALLS][{"name": "bare", "arguments": {}}]',
    "mistral_args": "[TOOL_CALLS]bare[ARGS]{}",
    "harmony": "<|channel|>analysis<|message|>Hm. <|<|end|><|start|>assistant"
    "<|channel|>commentary to=functions.bare <|constrain|>json<|message|>{}",
    "llama3_json": '{"name": "bare", "parameters": {}}',
}


def allows(compiler, tale, grammar, text):
    """Whether a grammar allows a text, spelled letter by letter, as a whole output."""
    constraint = compiler.compile(grammar)()
    tokens = [token for char in text for token in tale.encode(char)]
    masks = constraint.masks(tokens, 0, len(tokens) + 1)
    ends = masks[-1] is not None and any(_has(masks[-1], token) for token in compiler._eos_ids)
    return ends and all(_has(mask, token) for mask, token in zip(masks, tokens, strict=False))


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_allowed(compiler, tale, name):
    """The shortest call, also where a form of the answer is another choice; never a call of another tool."""
    format, bare = FORMATS[name], BARE[name]
    calls = format.tool_grammar(SMALL_TOOLS, "required", False)
    assert (
        read_freely(format, [bare], ASK if name == "harmony" else "", SMALL_TOOLS).calls[0].arguments == "{}"
    )
    schema = Grammar(
        "json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    )
    answer = '{"a": 1}'
    if name == "harmony":
        answer = (
            bare[: bare.index("<|channel|>commentary")]
            + "<|channel|>final <|constrain|>json<|message|>"
            + answer
        )
    for form, may_answer in ((None, False), (schema, True)):
        grammar = format.whole_grammar(form, calls, ASK)
        assert allows(compiler, tale, grammar, bare)
        assert not allows(compiler, tale, grammar, bare.replace("bare", "other"))
        assert allows(compiler, tale, grammar, answer) == may_answer
        assert not allows(compiler, tale, grammar, "Sure.")
    named = format.tool_grammar(SMALL_TOOLS, {"type": "function", "function": {"name": "look-up_1"}}, True)
    assert not allows(compiler, tale, format.whole_grammar(None, named, ASK), bare)


def test_messages_hold_the_form_of_an_answer(compiler, tale):
    format = FORMATS["harmony"]
    for form, right in (
        (Grammar("json_object"), '{"a": [1]}'),
        (Grammar("choice", '["yes", "é \\"no\\""]'), 'é "no"'),
        (Grammar("regex", "[a-c]+/d"), "abc/d"),
    ):
        grammar = format.whole_grammar(form, None, ASK)
        assert allows(compiler, tale, grammar, "<|channel|>final<|message|>" + right)
        assert not allows(compiler, tale, grammar, "<|channel|>final<|message|>wrong")
        assert not allows(compiler, tale, grammar, right)
        assert format.whole_grammar(form, None, "<|end|>It was") is form
        thinking = format.whole_grammar(form, None, "<|channel|>analysis<|message|>")
        assert allows(
            compiler, tale, thinking, "so<|end|><|start|>assistant<|channel|>final<|message|>" + right
        )
    for form in (Grammar("lark", 'start: "x"'), Grammar("json_schema", "[]"), Grammar("choice", "{}")):
        with pytest.raises(RequestError, match=r"^grammar: "):
            format.whole_grammar(form, None, ASK)


@pytest.mark.parametrize("name", ["glm45", "deepseek_v4"])
def test_schemas_that_tags_cannot_write(name):
    for parameters in (
        {"type": "object", "properties": {"a>": {"type": "string"}}},
        {"type": "object", "properties": {"a": {"enum": ["x</arg_value></｜DSML｜parameter>"]}}},
        {"type": "object", "properties": {}, "anyOf": [{"required": ["a"]}]},
    ):
        with pytest.raises(RequestError, match=r"^tools\[0\]\.function\.parameters"):
            FORMATS[name].tool_grammar([tool("f", parameters)], "required", True)


@pytest.mark.parametrize("name", ["glm47", "deepseek_v4"])
def test_a_rich_schema_can_be_written(compiler, tale, name, monkeypatch):
    monkeypatch.setattr("test_tool_grammar.ENDS", (ENDS[name], '"', "]", "}"))
    grammar, rng = FORMATS[name].tool_grammar(TOOLS, NAMED, False), random.Random(name)
    assert grammar is not None
    written = [walk(compiler, tale, grammar, rng, max_len=1500) for _ in range(6)]
    assert any(written)
    for text in filter(None, written):
        call = read_freely(FORMATS[name], [text], tools=TOOLS).calls[0]
        jsonschema_rs.validate(SCHEMAS["look-up_1"], json.loads(call.arguments, parse_float=finite))
