"""Calls and reasoning of every family: told from templates, read however they are cut, and forced by grammars."""

import json
import time
from typing import Any

import pytest
from format_samples import (
    ASK,
    COMPILED,
    FORMATS,
    SINGLE,
    SOURCES,
    TOOLS,
    assistant,
    generated,
    read_freely,
    rendered,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from output_samples import Output, cut, places, read, shuffled

from headlong.text.format_names import REASONING_FORMATS, TOOL_FORMATS
from headlong.text.output import ChatFormat, Content, Reasoning, ToolCallArguments
from headlong.text.reasoning import HARMONY, MISTRAL, THINK
from headlong.text.tools import formats

THINKING = {
    "qwen3_coder": None,
    "deepseek_v3": None,
    "mistral": None,
    "llama3_json": None,
    "harmony": HARMONY,
}
THINKING["mistral_args"] = MISTRAL
MARKS = {
    "qwen3_coder": ["<tool_call>", "<function=f>", "<parameter=text>", "</parameter>", "</function>", "</tool_call>"],
    "glm45": ["<tool_call>", "f", "<arg_key>", "text", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"],
    "deepseek_v3": ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", "f", "```json",
                    "```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<｜tool"],
    "deepseek_v4": ["<｜DSML｜tool_calls>", '<｜DSML｜invoke name="', "f", '">', '<｜DSML｜parameter name="', "text",
                    '" string="true">', '" string="false">', "</｜DSML｜parameter>", "</｜DSML｜invoke>",
                    "</｜DSML｜tool_calls>", "<｜DSML"],
    "kimi_k2": ["<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.", "f", ":0",
                "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"],
    "mistral": ["[TOOL_CALLS]", "[", "]", ",", '{"name": "f", "arguments": ', "}", "[ARGS]", "[CALL_ID]", "f", "[TOOL"],
    "harmony": ["<|start|>", "assistant", "<|channel|>", "analysis", "commentary", "final", " to=functions.f",
                " <|constrain|>json", "<|message|>", "<|end|>", "<|call|>", "<|chan", "<|start|>assistant<|channel|>",
                "<|channel|>final<|message|>", "<|channel|>analysis<|message|>",
                "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"],
    "llama3_json": ["<|python_tag|>", '{"name": "f", "parameters": ', '{"name": "x", ', "}", ";", '"arguments": '],
}  # fmt: skip
MARKS["glm47"] = MARKS["glm45"]
MARKS["deepseek_v31"] = MARKS["deepseek_v3"]
MARKS["deepseek_v32"] = [mark.replace("tool_calls", "function_calls") for mark in MARKS["deepseek_v4"]]
MARKS["mistral_args"] = MARKS["mistral"]
OTHERS = [
    "{}",
    '{"a": 1}',
    '{"a": "',
    '"',
    "\\",
    "\n",
    " ",
    "x",
    "é",
    "<",
    "1",
    "{",
    "<think>",
    "</think>",
    "[THINK]",
]


def test_the_names_are_those_of_the_table():
    assert sorted(TOOL_FORMATS) == sorted(formats.FORMATS)
    assert REASONING_FORMATS == ("think", "mistral", "harmony")


@pytest.mark.parametrize("name", SOURCES)
def test_templates_tell_their_format(name):
    assert ChatFormat.detect(SOURCES[name]) == ChatFormat(THINKING.get(name, THINK), name)
    assert ChatFormat.detect(None, tools=name).tools == name


def test_a_template_without_tools_tells_none():
    """It has the markers, for calls of the past, but no place for tools."""
    for name in ("deepseek_v31", "mistral_args", "kimi_k2"):
        assert ChatFormat.detect(SOURCES[name].replace("tools", "others")).tools is None


lines = st.text(alphabet='ab<>/{}[]"\\é\n =|｜', max_size=16)
words = lines.map(lambda text: text.strip(" \n"))
values: dict[str, st.SearchStrategy[Any]] = {
    "text": lines,
    "count": st.integers(-(10**20), 10**20),
    "ratio": st.floats(allow_nan=False, allow_infinity=False),
    "flag": st.booleans(),
    "nothing": st.none(),
    "items": st.lists(st.integers() | words, max_size=3),
    "map": st.dictionaries(words, st.none() | st.booleans(), max_size=2),
}
made = st.lists(
    st.tuples(st.sampled_from(["f", "g", "look_up-1"]), st.fixed_dictionaries({}, optional=values)),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("name", SOURCES)
@settings(max_examples=20, deadline=None)
@given(content=words, calls=made, places=places)
def test_calls_that_a_template_writes_are_read_back(name, content, calls, places):
    calls = calls[:1] if name in SINGLE else calls
    content = "" if name in SINGLE else content
    prompt, text = generated(name, assistant(content, calls), TOOLS)
    for prefix in ("<think></think>", "</think>"):
        text = text.lstrip("\n").removeprefix(prefix)
    prompt = prompt if name in ("harmony",) else ""
    output = read_freely(FORMATS[name], cut(text, places), prompt)
    assert output.content == content
    assert [call.name for call in output.calls] == [called for called, _ in calls]
    assert output.arguments == [arguments for _, arguments in calls]


@pytest.mark.parametrize("name", SOURCES)
@settings(max_examples=30, deadline=None)
@given(data=st.data(), places=places, inside=st.booleans())
def test_nothing_depends_on_the_cut(name, data, places, inside):
    text = data.draw(shuffled([*MARKS[name] * 2, *OTHERS]))
    opened = {"harmony": "<|start|>assistant", "mistral_args": "[THINK]"}.get(name, "<think>")
    prompt = opened if inside else ""
    whole = read_freely(FORMATS[name], [text], prompt)
    assert read_freely(FORMATS[name], cut(text, places), prompt) == whole
    assert read_freely(FORMATS[name], list(text), prompt) == whole


@pytest.mark.parametrize("name", [name for name in SOURCES if name != "harmony"])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_text_without_a_call_is_given_back(name, data):
    text = data.draw(shuffled([*MARKS[name] * 2, *OTHERS[:-3]]))
    output = read_freely(ChatFormat(None, name), [text])
    if not output.calls:
        assert output.content == text


@pytest.mark.parametrize("name", SOURCES)
def test_time_grows_with_the_length_alone(name):
    for mark in {*MARKS[name], "\n", "{", " "}:
        for head in ("", "".join(MARKS[name][:3])):
            text = head + mark * ((1 << 15) // len(mark))
            for pieces in ([text], [text[at : at + 4] for at in range(0, 1 << 13, 4)]):
                start = time.process_time()
                read_freely(FORMATS[name], pieces, "<|start|>assistant" if name == "harmony" else "")
                assert time.process_time() - start < 2, mark


V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
KIMI_CALL = "<|tool_call_begin|>functions.f:7<|tool_call_argument_begin|>"
DSML = '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="k" string="'


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("glm45", "<tool_call>f</tool_call>", "", [("f", "{}")]),
        ("glm47", "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>1</arg_value>", "", [("f", '{"text": "1"')]),
        ("glm45", "<tool_call>f<arg_key>count</arg_key><arg_value>12</arg_value></tool_call>!", "!",
         [("f", '{"count": 12}')]),
        ("glm45", "<tool_call>two words</tool_call>", None, []),
        ("deepseek_v31", V3 + '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜> ok', " ok", [("f", '{"a": 1}')]),
        ("deepseek_v3", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "", [("f", "{}")]),
        ("deepseek_v3", "<｜tool▁call▁begin｜>f<｜tool▁sep｜><｜tool▁call▁end｜>", "", [("f", "{}")]),
        ("deepseek_v3", V3 + '{"a": "<｜tool▁call▁end｜>', "", [("f", '{"a": "<｜tool▁call▁end｜>')]),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>none", None, []),
        ("deepseek_v4", DSML + 'true">1</｜DSML｜parameter>\n</｜DSML｜invoke>', "", [("f", '{"k": "1"}')]),
        ("deepseek_v4", DSML + 'false">"1"</｜DSML｜parameter></｜DSML｜invoke>', "", [("f", '{"k": "1"}')]),
        ("deepseek_v32", DSML + 'false">[1, x</｜DSML｜parameter></｜DSML｜invoke>', "", [("f", '{"k": "[1, x"}')]),
        ("deepseek_v4", DSML + 'maybe">', DSML[DSML.index("\n") + 1 :] + 'maybe">', [("f", "")]),
        ("kimi_k2", KIMI_CALL + '{"a": [1]}<|tool_call_end|><|tool_calls_section_end|>', "", [("f", '{"a": [1]}')]),
        ("kimi_k2", KIMI_CALL + '{"a": 1 oops', "oops", [("f", '{"a": 1 ')]),
        ("kimi_k2", KIMI_CALL + "oops", None, []),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}] [1]', " [1]", [("f", "{}")]),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, 5]', ", 5]", [("f", "{}")]),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"a": 1}]', "]", [("f", '{"a": 1}')]),
        ("mistral_args", '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[ARGS]{}', "", [("f", '{"a": 1}'), ("g", "{}")]),
        ("mistral_args", "[TOOL_CALLS] is what I would write", None, []),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        ("llama3_json", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "",
         [("f", "{}"), ("g", "{}")]),
        ("llama3_json", '<|python_tag|>{"name": "other", "parameters": {}}', "", [("other", "{}")]),
        ("llama3_json", '{"name": "other", "parameters": {}}', None, []),
        ("llama3_json", '{"name": "f", "age": 5}', None, []),
        ("llama3_json", 'Say {"name": "f", "parameters": {}}', None, []),
    ],
)  # fmt: skip
def test_examples(name, text, content, calls):
    for pieces in ([text], list(text)):
        output = read(FORMATS[name], pieces, tools=TOOLS)
        assert [(call.name, call.arguments) for call in output.calls] == calls
        assert output.content == (text if content is None else content)


THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("<|channel|>final<|message|>Yes.", ("", "Yes.", [])),
        (THOUGHT + "<|channel|>final <|constrain|>json<|message|>{}<|return|>", ("Hm.", "{}", [])),
        (THOUGHT + THOUGHT + "<|channel|>final<|message|>So.", ("Hm.\n\nHm.", "So.", [])),
        (THOUGHT + TO_F + '{"a": "<|end|>"}<|call|>', ("Hm.", "", [("f", '{"a": "<|end|>"}')])),
        (" to=functions.f<|channel|>commentary json<|message|>{}", ("", "", [("f", "{}")])),
        (TO_F + "<|call|>", ("", "", [("f", "{}")])),
        ("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + TO_F + "{}<|call|>",
         ("", "I look.", [("f", "{}")])),
        ("<|channel|>analysis<|message|>I th", ("I th", "", [])),
        ("<|channel|>analysis<|message|>a <|channel|> b", ("a <|channel|> b", "", [])),
        ("plain", ("", "plain", [])),
        ("\n plain", ("", "\n plain", [])),
        (TO_F + "no JSON", ("", TO_F + "no JSON", [])),
        (TO_F + '{"a": 1 oops', ("", "oops", [("f", '{"a": 1 ')])),
        ("<|channel|>" * 3, ("", "<|channel|>" * 3, [])),
    ],
)  # fmt: skip
def test_messages(text, output):
    for pieces in ([text], list(text)):
        found = read_freely(FORMATS["harmony"], pieces, ASK)
        assert (
            found.reasoning,
            found.content,
            [(call.name, call.arguments) for call in found.calls],
        ) == output


def test_messages_without_tools_and_without_reasoning():
    text = THOUGHT + TO_F + "{}"
    assert read_freely(FORMATS["harmony"], [text], ASK, tools=None) == Output(
        "Hm.", "<|start|>assistant" + TO_F + "{}"
    )
    plain = read_freely(ChatFormat(None, "harmony"), [text], ASK)
    assert plain.content.startswith("<|channel|>analysis<|message|>Hm.") and plain.calls[0].name == "f"


def test_where_a_thought_begins():
    user = [{"role": "user", "content": "Hi"}]
    for name, on, off in (("glm47", {}, {"enable_thinking": False}), ("deepseek_v4", {"thinking": True}, {})):
        opened, closed = (rendered(name, user, **variables) for variables in (on, off))
        assert FORMATS[name].end_of_reasoning(opened) == "</think>"
        assert FORMATS[name].end_of_reasoning(closed) is None
        assert read(FORMATS[name], "so</think>yes", opened) == Output("so", "yes")
    assert read(FORMATS["mistral_args"], "[THINK]so[/THINK]yes") == Output("so", "yes")
    continued = FORMATS["harmony"].parser("<|channel|>analysis<|message|>", None)
    assert continued.push("on") == [Reasoning("on")]
    assert FORMATS["harmony"].parser("<|end|>It was", None).push(" so") == [Content(" so")]


def test_arguments_come_as_they_are_written():
    heads = {
        "glm45": "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>",
        "deepseek_v4": DSML.replace('"k"', '"text"') + 'true">',
        "kimi_k2": KIMI_CALL + '{"text": "',
        "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {"text": "',
        "mistral_args": '[TOOL_CALLS]f[ARGS]{"text": "',
        "harmony": TO_F + '{"text": "',
        "llama3_json": '{"name": "f", "parameters": {"text": "',
    }
    for name, head in heads.items():
        parser = FORMATS[name].parser(ASK if name == "harmony" else "", TOOLS)
        parser.push(head)
        for word in ("one", " two"):
            assert parser.push(word) == [ToolCallArguments(0, word)], name


@pytest.mark.parametrize("name", SOURCES)
def test_conversations_go_back(name):
    """Two calls in one message, with reasoning and a text beside them, and their results, as clients send them."""
    made = assistant("I look.", [("f", {"a": "é"}), ("g", {})], reasoning_content="Why not.")
    made["tool_calls"] = made["tool_calls"][: 1 if name == "llama3_json" else 2]
    for call in made["tool_calls"]:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"result {number}"}
        for number, call in enumerate(made["tool_calls"])
    ]
    text = rendered(name, [{"role": "user", "content": "go"}, made, *results], tools=TOOLS)
    assert '"a"' in text or "é" in text or "\\u00e9" in text
    if name == "kimi_k2":
        assert "functions.f:0" in text and "functions.g:1" in text and "## Return of functions.g:1" in text
    if name == "harmony":
        assert (
            text.index("functions.f<")
            < text.index("result 0")
            < text.index("functions.g<")
            < text.index("result 1")
        )
        assert "Why not.\nI look." in text
    assert COMPILED[name].source == SOURCES[name]
