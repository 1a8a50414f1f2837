"""Formats told from templates, and whole outputs as real templates would have them."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from output_samples import HERMES, PROPERTIES, TEMPLATES, TOOLS, Output, cut, places, read, shuffled, tool

from headlong.errors import ConfigError
from headlong.text.messages import prepare_messages
from headlong.text.output import ChatFormat, Content, Reasoning
from headlong.text.reasoning import THINK
from headlong.text.template import ChatTemplate

QWEN3_5 = (TEMPLATES / "Qwen3.5-4B.jinja").read_text()
CODER = (TEMPLATES / "Qwen3-Coder.jinja").read_text()
# The form in which Qwen3 and Hermes tell the model what to write.
JSON_CALLS = """{%- if tools %}{{ '<tools>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{{- "return a json object: <tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <object>}\\n</tool_call>" }}{% endif %}
{%- for m in messages %}{{ m.content }}{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' ~ call.function.arguments|tojson ~ '}' }}
{{- '\\n</tool_call>' }}{% endfor %}{% endfor %}"""


@pytest.mark.parametrize(
    ("source", "reasoning", "tools"),
    [
        (QWEN3_5, THINK, "qwen3_coder"),
        (CODER, None, "qwen3_coder"),
        (JSON_CALLS, None, "hermes"),
        (JSON_CALLS.replace("tools %}", "tools and thinks %}</think>"), THINK, "hermes"),
        # It says what a call looks like but is never given the tools.
        (JSON_CALLS.replace("tools", "others"), None, None),
        ('{% set tools = [] %}{{ tools }}<tool_call>{"arguments"}', None, None),
        ('{{ tools }}<tool_call>{"arguments"}', None, "hermes"),
        # Tags of another kind.
        ("{{ tools }}<tool_call>{name}<argument>{{ call.arguments }}", None, None),
        ("{{ messages }}", None, None),
        ("{% this is no template <function=", None, None),
        ("", None, None),
        (None, None, None),
    ],
)
def test_detection(source, reasoning, tools):
    assert ChatFormat.detect(source) == ChatFormat(reasoning, tools)


def test_embedded_template_knows_tools(tale):
    assert ChatFormat.detect(tale.chat_template) == ChatFormat(None, "hermes")


def test_overrides():
    assert ChatFormat.detect(QWEN3_5, reasoning="none", tools="none") == ChatFormat(None, None)
    assert ChatFormat.detect(QWEN3_5, reasoning="think", tools="hermes") == ChatFormat(THINK, "hermes")
    assert ChatFormat.detect(None, reasoning="think", tools="qwen3_coder") == ChatFormat(THINK, "qwen3_coder")
    wrong: Any = "xml"
    with pytest.raises(ConfigError, match=r"^reasoning: .*think"):
        ChatFormat.detect(None, reasoning=wrong)
    with pytest.raises(ConfigError, match=r"^tools: .*qwen3_coder"):
        ChatFormat.detect(None, tools=wrong)


def test_where_the_output_starts():
    """Thinking on, off, and as the model likes, in the words of a real template."""
    template, format = ChatTemplate(QWEN3_5), ChatFormat.detect(QWEN3_5)
    user = [{"role": "user", "content": "What is <think>?"}]
    on, off = template.render(user), template.render(user, enable_thinking=False)
    assert (format.end_of_reasoning(on), format.end_of_reasoning(off)) == ("</think>", None)
    text = "so\n</think>\n\nyes"
    assert read(format, text, prompt=on) == Output(reasoning="so", content="yes")
    assert read(format, text, prompt=off) == Output(content=text)
    plain = ChatTemplate(CODER).render(user)
    assert read(format, "<think>" + text, prompt=plain) == Output(reasoning="so", content="yes")
    assert ChatFormat.detect(CODER).end_of_reasoning(on) is None


def test_events_in_order():
    parser = ChatFormat(THINK, None).parser("<think>\n", None)
    assert parser.push("a\n</think>\n\nb ") == [Reasoning("a"), Content("b ")]
    assert parser.push("c") == [Content("c")]
    assert parser.finish() == []


lines = st.text(alphabet='ab<>/{}"\\é\n =', max_size=20)
words = lines.map(str.strip)
values: dict[str, st.SearchStrategy[Any]] = {
    "text": lines.filter(lambda text: "</parameter>" not in text),
    "count": st.integers(-(10**20), 10**20),
    "ratio": st.floats(allow_nan=False, allow_infinity=False),
    "flag": st.booleans(),
    "nothing": st.none(),
    "items": st.lists(st.integers() | lines, max_size=3),
    "map": st.dictionaries(lines, st.none() | st.booleans(), max_size=2),
}
calls = st.lists(
    st.tuples(st.sampled_from(["f", "g", "other.tool"]), st.fixed_dictionaries({}, optional=values)),
    max_size=3,
)
QWEN3_TOOLS = [tool(name, {"type": "object", "properties": PROPERTIES}) for name in ("f", "g", "other.tool")]


COMPILED = {source: ChatTemplate(source) for source in (QWEN3_5, CODER)}
FORMATS = {source: ChatFormat.detect(source) for source in COMPILED}


def assistant(content: str, made: list[tuple[str, dict[str, Any]]], **extra: str) -> dict[str, Any]:
    written = [
        {"id": str(number), "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(made)
    ]
    return {"role": "assistant", "content": content, "tool_calls": written, **extra}


def generated(source: str, message: dict[str, Any]) -> tuple[str, str]:
    """(prompt, output) such that the template writes the message as that output to that prompt."""
    template = COMPILED[source]
    chat = prepare_messages([{"role": "user", "content": "go"}])
    whole = template.render(
        [*chat, *prepare_messages([message])], tools=QWEN3_TOOLS, add_generation_prompt=False
    )
    prompt = template.render(chat, tools=QWEN3_TOOLS)
    assert whole.startswith(prompt)
    return prompt, whole[len(prompt) :].removesuffix("\n").removesuffix("<|im_end|>")


@settings(max_examples=120, deadline=None)
@given(reasoning=words, content=words, made=calls, places=places)
def test_qwen3_5_round_trip(reasoning, content, made, places):
    message = assistant(content, made, reasoning_content=reasoning)
    prompt, text = generated(QWEN3_5, message)
    assert prompt.endswith("<think>\n")
    output = read(FORMATS[QWEN3_5], cut(text, places), prompt, QWEN3_TOOLS)
    assert (output.reasoning, output.content) == (reasoning, content)
    assert [(call.name) for call in output.calls] == [name for name, _ in made]
    assert output.arguments == [arguments for _, arguments in made]


@settings(max_examples=60, deadline=None)
@given(content=words.filter(bool), made=calls.filter(bool), places=places)
def test_qwen3_coder_round_trip(content, made, places):
    prompt, text = generated(CODER, assistant(content, made))
    output = read(FORMATS[CODER], cut(text, places), prompt, QWEN3_TOOLS)
    assert output.content == content
    assert output.arguments == [arguments for _, arguments in made]


def test_json_template_round_trip():
    made = [("f", {"a": "\n é </tool_call> {"}), ("g", {})]
    text = (
        ChatTemplate(JSON_CALLS).render([assistant("Hi", made)], tools=TOOLS).partition("</tool_call>Hi")[2]
    )
    output = read(ChatFormat.detect(JSON_CALLS), list("Hi" + text))
    assert (output.content, output.arguments) == ("Hi", [arguments for _, arguments in made])


ALL = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<function=f>",
    "<parameter=text>",
    "</parameter>",
]
ALL += ["</function>", '{"name": "f", "arguments": {', "}}", "\n", " ", "a", "<"]


@settings(max_examples=200, deadline=None)
@given(text=shuffled(ALL), places=places, inside=st.booleans())
def test_any_output_can_be_cut_anywhere(text, places, inside):
    prompt = "<think>\n" if inside else ""
    for format in (FORMATS[QWEN3_5], ChatFormat(THINK, HERMES.tools)):
        assert read(format, cut(text, places), prompt) == read(format, text, prompt)
