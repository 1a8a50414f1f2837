"""What clients send, made fit for templates; and what is refused, by name."""

import copy

import pytest
from output_samples import TEMPLATES

from headlong.errors import RequestError
from headlong.text.messages import prepare_messages, template_variables
from headlong.text.template import ChatTemplate

USER = {"role": "user", "content": "x"}


def call(arguments: object, **function: object) -> dict:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments, **function}}


def calling(*calls: object) -> dict:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def test_forms_that_clients_send():
    sent = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b\n"}]},
        calling(call('{"x": [1, {"y": "é"}]}'), call({"x": 1}), call(""), call(None)),
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "ok"}]},
        {"role": "assistant", "content": "", "tool_calls": None, "refusal": None},
        {"role": "user", "content": []},
    ]
    before = copy.deepcopy(sent)
    prepared = prepare_messages(sent)
    assert sent == before, "the caller's messages are its own"
    assert [message["role"] for message in prepared] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]
    assert [message["content"] for message in prepared] == ["Be brief.", "ab\n", "", "ok", "", ""]
    arguments = [made["function"]["arguments"] for made in prepared[2]["tool_calls"]]
    assert arguments == [{"x": [1, {"y": "é"}]}, {"x": 1}, {}, {}]
    assert "tool_calls" not in prepared[4]
    assert prepared[3]["tool_call_id"] == "1"


@pytest.mark.parametrize("name", ["Qwen3.5-4B", "Qwen3-Coder"])
def test_templates_can_read_them(name):
    template = ChatTemplate((TEMPLATES / f"{name}.jinja").read_text())
    parts = {
        "role": "user",
        "content": [{"type": "text", "text": "Weather in "}, {"type": "text", "text": "Rome?"}],
    }
    chat = [{"role": "developer", "content": "S"}, parts, calling(call('{"city": "Rome"}'))]
    text = template.render(prepare_messages(chat))
    assert "Weather in Rome?" in text and "<parameter=city>\nRome\n</parameter>" in text


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "content[0].type: "),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]},
            "content[1].type: ",
        ),
        ({"role": "user", "content": [{}]}, "content[0].type: "),
        ({"role": "user", "content": [{"type": "text"}]}, "content[0].text: "),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, "content[0].text: "),
        ({"role": "user", "content": None}, "content: "),
        ({"role": "assistant", "content": "", "tool_calls": 3}, "tool_calls: "),
        (calling(3), "tool_calls[0].function: "),
        (calling({}), "tool_calls[0].function: "),
        (calling(call("{}", name="")), "tool_calls[0].function.name: "),
        (calling(call("{}", name=None)), "tool_calls[0].function.name: "),
        (calling(call("{}"), call("{")), "tool_calls[1].function.arguments: "),
        (calling(call("[]")), "tool_calls[0].function.arguments: "),
        (calling(call("3")), "tool_calls[0].function.arguments: "),
        (calling(call('{"a": NaN}')), "tool_calls[0].function.arguments: "),
        (calling(call("[" * 100_000)), "tool_calls[0].function.arguments: "),
        (calling(call(7)), "tool_calls[0].function.arguments: "),
    ],
)
def test_refusals_name_the_field(message, field):
    with pytest.raises(RequestError) as caught:
        prepare_messages([USER, message])
    assert str(caught.value).startswith(f"messages[1].{field}")


@pytest.mark.parametrize("messages", [None, "x", [], [3], [{"content": "x"}]])
def test_what_is_no_list_of_messages(messages):
    with pytest.raises(RequestError, match=r"^messages"):
        prepare_messages(messages)


def test_variables():
    given = {"enable_thinking": False, "documents": [1], "été": None}
    assert template_variables(given) == given
    assert template_variables(None) == {}


@pytest.mark.parametrize(
    "name",
    ["messages", "tools", "add_generation_prompt", "headlong_step", "_x", "__class__", "a b", "1a", "", 3],
)
def test_variables_that_are_ours(name):
    with pytest.raises(RequestError) as caught:
        template_variables({"fine": 1, name: 2})
    assert str(caught.value).startswith(f"chat_template_kwargs.{name}: ")


@pytest.mark.parametrize("kwargs", [3, "x", ["enable_thinking"]])
def test_variables_must_be_an_object(kwargs):
    with pytest.raises(RequestError, match=r"^chat_template_kwargs: "):
        template_variables(kwargs)
