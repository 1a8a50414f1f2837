"""Calls read from text as it comes: both formats, however the text is cut, and whatever it holds."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from output_samples import HERMES, PROPERTIES, QWEN3_CODER, Output, cut, places, read, shuffled, tool

from headlong.text.output import ToolCallArguments

FORMATS = {"hermes": HERMES, "qwen3_coder": QWEN3_CODER}
HERMES_FRAGMENTS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<tool_",
        "call>",
        "<",
        "\n",
        " ",
        "x",
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        '"',
        "\\",
    ),
    *(
        '{"name": "f", "arguments": ',
        '{"a": 1}',
        '"name"',
        '"arguments"',
        '"f"',
        "null",
        "12",
        "-1.5e3",
        "tru",
        "é",
    ),
    *("\\n", '\\"', "\\u00e9", "\\u1", '{"a": "b<c}"}'),
]
CODER_FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<function=", "f", ">", "</function>", "<parameter=", "text", "count"),
    *(
        "</parameter>",
        "</para",
        "<",
        "\n",
        " ",
        "1",
        "true",
        '"',
        "\\",
        "é",
        "{}",
        "</function>\n</tool_call>",
    ),
    *("<tool_call>\n<function=f>\n", "<parameter=text>\n", "<parameter=count>\n", "\n</parameter>\n"),
]


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'


def coder(name: str, **values: str) -> str:
    blocks = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{blocks}</function>\n</tool_call>"


@settings(max_examples=300, deadline=None)
@given(text=shuffled(HERMES_FRAGMENTS), places=places)
def test_hermes_does_not_depend_on_the_cut(text, places):
    whole = read(HERMES, text)
    assert read(HERMES, cut(text, places)) == whole
    assert read(HERMES, list(text)) == whole


@settings(max_examples=300, deadline=None)
@given(text=shuffled(CODER_FRAGMENTS), places=places)
def test_qwen3_coder_does_not_depend_on_the_cut(text, places):
    whole = read(QWEN3_CODER, text)
    assert read(QWEN3_CODER, cut(text, places)) == whole
    assert read(QWEN3_CODER, list(text)) == whole


@settings(max_examples=100, deadline=None)
@given(text=shuffled([*HERMES_FRAGMENTS, *CODER_FRAGMENTS]), name=st.sampled_from(list(FORMATS)))
def test_text_without_a_call_is_given_back(text, name):
    output = read(FORMATS[name], text)
    if not output.calls:
        assert output.content == text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)
names = st.from_regex("[a-zA-Z0-9_.:-]{1,20}", fullmatch=True)
around = st.text(alphabet='ab \n{}<>"é', max_size=12).filter(lambda text: "<tool_call>" not in text)


@settings(max_examples=100, deadline=None)
@given(
    calls=st.lists(
        st.tuples(names, st.dictionaries(st.text(max_size=5), json_values, max_size=4)), max_size=3
    ),
    before=around,
    layout=st.tuples(st.booleans(), st.sampled_from([None, 2])),
    places=places,
)
def test_hermes_round_trip(calls, before, layout, places):
    ascii, indent = layout
    written = [hermes(name, json.dumps(value, ensure_ascii=ascii, indent=indent)) for name, value in calls]
    output = read(HERMES, cut(before + "\n".join(written), places))
    assert [call.name for call in output.calls] == [name for name, _ in calls]
    assert output.arguments == [value for _, value in calls]
    assert output.content == (before.rstrip(" \n") if calls else before)


@settings(max_examples=100, deadline=None)
@given(value=st.dictionaries(st.text(max_size=5), json_values, max_size=4), name=names)
def test_hermes_members_in_any_order(value, name):
    arguments = json.dumps(value)
    text = f'<tool_call>{{"id": [1, {{"name": 2}}], "arguments": {arguments}, "name": {json.dumps(name)}}}</tool_call>'
    output = read(HERMES, list(text))
    assert (output.calls[0].name, output.calls[0].arguments) == (name, arguments), "as it was written"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (hermes("f", "{}") + "\n\n" + hermes("g", '{"a":"}"}') + "\n", "", [("f", "{}"), ("g", '{"a":"}"}')]),
        ("Hi. \n" + hermes("f", "{}") + "\n Bye \n", "Hi.\n Bye \n", [("f", "{}")]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        (
            '<tool_call>{"name": "f", "name": "g", "arguments": {"a": 1}, "arguments": {"b": 2}}</tool_call>',
            "",
            [("f", '{"a": 1}')],
        ),
        # Two faults that are mended: a raw newline and a backslash that escapes nothing.
        (hermes("f", '{"a": "x\ny\\d"}'), "", [("f", '{"a": "x\\ny\\\\d"}')]),
        # The closing tag is missing, and so is the last brace.
        ('<tool_call>{"name": "f", "arguments": {"a": 1}\n', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', "", [("f", '{"a": 1}')]),
        # Not calls.
        ('<tool_call>{"name": 5, "arguments": {}}</tool_call>', None, []),
        ('<tool_call>{"name": "", "arguments": {}}</tool_call>', None, []),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', None, []),
        ('<tool_call>{"arguments": {"a": 1}}</tool_call>', None, []),
        ("<tool_call>\nHello\n</tool_call> ", None, []),
        ('<tool_call>["name"]</tool_call>', None, []),
        ("a <tool_call>\n" + hermes("f", "{}"), "a <tool_call>", [("f", "{}")]),
        # A fault after the arguments have begun ends the call; the rest is text.
        ('<tool_call>{"name": "f", "arguments": {"a": oops}}', "oops}}", [("f", '{"a": ')]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1 2}}', "2}}", [("f", '{"a": 1 ')]),
        # Cut off.
        ('<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')]),
        ('<tool_call>{"name": "f", "arguments": {"a": 12', "", [("f", '{"a": 12')]),
        ('<tool_call>{"name": "f", "argu', "", [("f", "")]),
        ('<tool_call>{"name": "f', None, []),
        ('<tool_call>{"arguments": {"a": "b"}, "na', None, []),
        (hermes("unknown tool", "{}"), "", [("unknown tool", "{}")]),
    ],
)
def test_hermes_examples(text, content, calls):
    for pieces in ([text], list(text)):
        output = read(HERMES, pieces)
        assert [(call.name, call.arguments) for call in output.calls] == calls
        assert output.content == (text if content is None else content)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (
            coder("f", text="a < b\n</parameterx> & </para"),
            "",
            [("f", {"text": "a < b\n</parameterx> & </para"})],
        ),
        (coder("f", text="\n two \n"), "", [("f", {"text": "\n two \n"})]),
        (coder("f", text=""), "", [("f", {"text": ""})]),
        (coder("f", text='"q"\\n', count="12"), "", [("f", {"text": '"q"\\n', "count": 12})]),
        (
            coder("f", count="1.0", ratio="1e3", flag="True"),
            "",
            [("f", {"count": 1, "ratio": 1e3, "flag": True})],
        ),
        (coder("f", nothing="None", maybe="null"), "", [("f", {"nothing": None, "maybe": None})]),
        (coder("f", maybe="nullify", either="12"), "", [("f", {"maybe": "nullify", "either": 12})]),
        (coder("f", either="x", any='{"a": 1}'), "", [("f", {"either": "x", "any": {"a": 1}})]),
        (coder("f", any='"x"'), "", [("f", {"any": '"x"'})]),
        (coder("f", map="{}", items="[1,\n 2]"), "", [("f", {"map": {}, "items": [1, 2]})]),
        # What is not of its type stays the text that it was.
        (coder("f", count="1.5", flag="yes"), "", [("f", {"count": "1.5", "flag": "yes"})]),
        (coder("f", ratio="NaN", items="[1"), "", [("f", {"ratio": "NaN", "items": "[1"})]),
        (coder("f", map="[]"), "", [("f", {"map": "[]"})]),
        (coder("f", count="9" * 5000), "", [("f", {"count": "9" * 5000})]),
        (coder("f", items="[" * 100_000), "", [("f", {"items": "[" * 100_000})]),
        (coder("f", unlisted="1"), "", [("f", {"unlisted": "1"})]),
        (coder("unknown", count="1"), "", [("unknown", {"count": "1"})]),
        (coder("g"), "", [("g", {})]),
        # The outer tag, one of its halves, or an inner closing tag is missing.
        ("<function=g>\n</function>", "", [("g", {})]),
        ("<function=g>\n</function>\n</tool_call>", "", [("g", {})]),
        ("<tool_call><function=g></tool_call>", "", [("g", {})]),
        ("<function=f><parameter=text>\na\n</function>\n</tool_call>", "", [("f", {"text": "a"})]),
        ("Hi.\n\n" + coder("g") + "\n" + coder("g") + "\n", "Hi.", [("g", {}), ("g", {})]),
        # A marker right behind one that leads nowhere.
        ("<function=<function=g>\n</function>", "<function=", [("g", {})]),
        ("<function=<tool_call><function=g>\n</function>", "<function=", [("g", {})]),
        # Not calls.
        ("<tool_call>\nf\n</tool_call>", None, []),
        ("<function=>x", None, []),
        ("<function=a\nb>", None, []),
        ("<function=" + "a" * 300 + ">", None, []),
        ("<tool_call>" + " " * 300 + "<tool_call>", None, []),
        ("see <function= and <tool_call> ", None, []),
        ("<tool_call>\n<function=f", None, []),
    ],
)
def test_qwen3_coder_examples(text, content, calls):
    for pieces in ([text], list(text)):
        output = read(QWEN3_CODER, pieces)
        assert [call.name for call in output.calls] == [name for name, _ in calls]
        assert output.arguments == [value for _, value in calls]
        assert output.content == (text if content is None else content)


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ("<function=f>", "", ""),
        ("<function=f>\n<parameter=te", "", ""),
        ("<function=f>\n<parameter=text>\nab\n", "", '{"text": "ab\\n'),
        ("<function=f>\n<parameter=text>\nab</para", "", '{"text": "ab</para'),
        ("<function=f>\n<parameter=items>\n[1, 2", "", '{"items": [1, 2'),
        ("<function=f>\n<parameter=text>\nab\n</parameter>\n</func", "", '{"text": "ab"'),
        ("<function=f>\noops</function>", "oops</function>", ""),
    ],
)
def test_qwen3_coder_that_breaks_off(text, content, arguments):
    for pieces in ([text], list(text)):
        output = read(QWEN3_CODER, pieces)
        assert [(call.name, call.arguments) for call in output.calls] == [("f", arguments)]
        assert output.content == content


def test_references_in_a_schema_tell_types():
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/$defs/loop"}, "c": {"enum": [1, 2]}},
        "$defs": {"n": {"allOf": [{"type": "integer"}]}, "loop": {"$ref": "#/$defs/loop"}},
    }
    output = read(QWEN3_CODER, coder("h", a="1", b="x", c="2"), tools=[tool("h", schema)])
    assert output.arguments == [{"a": 1, "b": "x", "c": 2}]


@pytest.mark.parametrize(
    "schema", [5, [], {"properties": 3}, {"properties": {"a": 7}}, {"type": [], "allOf": 1}]
)
def test_odd_schemas_are_no_reason_to_fail(schema):
    assert read(QWEN3_CODER, coder("h", a="1"), tools=[tool("h", schema), 3, {}]).calls[0].name == "h"


def test_arguments_come_as_they_are_written():
    """A piece of a string goes out with the piece of text that brought it."""
    for format, head in (
        (HERMES, '<tool_call>{"name": "f", "arguments": {"text": "'),
        (QWEN3_CODER, "<function=f>\n<parameter=text>\n"),
    ):
        parser = format.parser("", [tool("f", {"type": "object", "properties": PROPERTIES})])
        parser.push(head)
        for word in ("one", " two", "\\n"):
            expected = word if format is HERMES else json.dumps(word)[1:-1]
            assert parser.push(word) == [ToolCallArguments(0, expected)]


LOOKALIKES = {
    "markers": "<tool_call>",
    "braces": "<tool_call>{",
    "strings": '<tool_call>{"',
    "phases": '<tool_call>{":",":"',
    "spaces": "<tool_call>" + " " * 250,
    "functions": "<function=",
    "open functions": "<function=f>",
    "parameters": "<function=f><parameter=text>",
    "ends": "</parameter",
    "newlines": "\n",
    "quotes": '"',
}


HEADS = ("", '<tool_call>{"name": "', '<tool_call>{"arguments": {"a": "', "<function=f>\n<parameter=count>\n")


@pytest.mark.parametrize("name", FORMATS)
def test_a_megabyte_of_markers(name):
    for marker in ("<tool_call>", "<function=", "</tool_call>", "<tool_call"):
        start = time.process_time()
        assert read(FORMATS[name], marker * ((1 << 20) // len(marker))).calls == []
        assert time.process_time() - start < 2


@pytest.mark.parametrize("kind", LOOKALIKES)
@pytest.mark.parametrize("name", FORMATS)
def test_time_grows_with_the_length_alone(name, kind):
    """Were it the square, these would take minutes."""
    for head in HEADS:
        text = head + LOOKALIKES[kind] * ((1 << 17) // len(LOOKALIKES[kind]))
        for pieces in ([text], [text[at : at + 4] for at in range(0, len(text) // 4, 4)]):
            start = time.process_time()
            read(FORMATS[name], pieces)
            assert time.process_time() - start < 2


def test_no_tools_no_calls():
    text = "<think>a</think>" + hermes("f", "{}")
    assert read(HERMES, text, tools=None) == Output(content=text)
    assert read(HERMES, text, tools=[]) == Output(content=text)
