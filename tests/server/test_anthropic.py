"""`/v1/messages` with the real `anthropic` client over real sockets. What the same request gives as OpenAI's chat is
the oracle wherever there is one."""

import asyncio
import json
from typing import Literal

import anthropic
import pytest
from pydantic import BaseModel
from pydantic_core import from_json

from support.serving import RunningServer

STORY = {"role": "user", "content": "Write a short story about a shy dragon who learns to share."}
SAMPLED = {"seed": 7, "temperature": 0.8}
LIMIT = 24
WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "unit": {"type": "string", "enum": ["C", "F"]},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}
CHAT_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": WEATHER["input_schema"],
    },
}
NO_THOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}


def anthropic_client(running):
    return anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def claude(server):
    return anthropic_client(server)


@pytest.fixture(scope="module")
def tool_claude(tool_server):
    return anthropic_client(tool_server)


@pytest.fixture(scope="module")
def model(tool_client):
    return tool_client.models.list().data[0].id


@pytest.fixture(scope="module")
def called(tool_claude, model):
    """A message that is a call."""
    return tool_claude.messages.create(**forced(model))


def given(**more):
    extra = SAMPLED | more.pop("extra_body", {})
    return {"model": "tale-20m", "max_tokens": LIMIT, "messages": [STORY], "extra_body": extra} | more


def forced(model, **more):
    choice = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    return given(model=model, tools=[WEATHER], tool_choice=choice, **{"max_tokens": 300} | more)


def ask_chat(client, **more):
    """The same of OpenAI's chat."""
    return client.chat.completions.create(
        **{"model": "tale-20m", "max_tokens": LIMIT, "messages": [STORY], **SAMPLED} | more
    )


def comparable(message):
    """Without what differs from one request to the next, or is only in one of the two ways to answer."""
    data = message.to_dict()
    for name in ("id", "timings", "metrics", "stop_details"):
        data.pop(name, None)
    for block in data["content"]:
        if block["type"] == "tool_use":
            block.pop("id")
        block.pop("parsed_output", None)
    return data


def raw_events(running, **body):
    """Names and data of a stream, as they are on the wire."""
    with (
        running.client() as http,
        http.stream("POST", "/v1/messages", json=body | {"stream": True}) as response,
    ):
        text = response.read().decode()
    events = [block.split("\n") for block in text.strip().split("\n\n")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in events]


class TestText:
    def test_whole(self, claude, client):
        message = claude.messages.create(**given())
        chat = ask_chat(client)
        assert message.id.startswith("msg_") and (message.type, message.role) == ("message", "assistant")
        assert [block.type for block in message.content] == ["text"]
        assert message.content[0].text == chat.choices[0].message.content
        assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
        assert message.usage.input_tokens == chat.usage.prompt_tokens
        assert message.usage.output_tokens == LIMIT
        assert message.usage.cache_read_input_tokens == message.usage.cache_creation_input_tokens == 0
        assert message.timings["draft_n_accepted"] > 0
        assert message.metrics["speculative_decoding"]["num_draft_tokens"] == message.timings["draft_n"]

    def test_stream_equals_whole(self, claude):
        whole = claude.messages.create(**given())
        with claude.messages.stream(**given()) as stream:
            texts = list(stream.text_stream)
            final = stream.get_final_message()
        assert len(texts) > 3 and "".join(texts) == whole.content[0].text
        assert comparable(final) == comparable(whole)

    def test_events(self, server, claude):
        events = raw_events(server, model="tale-20m", max_tokens=LIMIT, messages=[STORY], **SAMPLED)
        names = [name for name, _ in events]
        assert [data["type"] for _, data in events] == names
        assert names == [
            "message_start",
            "ping",
            "content_block_start",
            *["content_block_delta"] * names.count("content_block_delta"),
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        start, end = events[0][1]["message"], events[-2][1]
        whole = claude.messages.create(**given())
        assert start["usage"]["input_tokens"] == whole.usage.input_tokens and start["content"] == []
        assert end["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
        assert end["usage"] == whole.usage.to_dict()
        assert end["timings"]["predicted_n"] == LIMIT and "speculative_decoding" in end["metrics"]

    def test_stop_sequence(self, claude):
        text = claude.messages.create(**given()).content[0].text
        word = text.split()[7]
        message = claude.messages.create(**given(stop_sequences=["never said", word]))
        assert message.content[0].text == text[: text.index(word)]
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", word)
        with claude.messages.stream(**given(stop_sequences=[word])) as stream:
            assert comparable(stream.get_final_message()) == comparable(message)

    def test_end_of_turn(self, claude):
        form = {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}
        message = claude.messages.create(**given(output_config={"format": form}))
        assert json.loads(message.content[0].text) in ("yes", "no")
        assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)

    def test_conversation(self, claude, client):
        """A system text, blocks and hints are the chat's messages."""
        hint = {"cache_control": {"type": "ephemeral"}}
        message = claude.messages.create(
            **given(
                system=[{"type": "text", "text": "You tell stories.", **hint}],
                messages=[
                    {"role": "user", "content": "Who are you?"},
                    {"role": "assistant", "content": [{"type": "text", "text": "A poet."}]},
                    {"role": "user", "content": [{"type": "text", "text": STORY["content"], **hint}]},
                ],
                metadata={"user_id": "u"},
                service_tier="auto",
            )
        )
        chat = ask_chat(
            client,
            messages=[
                {"role": "system", "content": "You tell stories."},
                {"role": "user", "content": "Who are you?"},
                {"role": "assistant", "content": "A poet."},
                STORY,
            ],
        )
        assert message.content[0].text == chat.choices[0].message.content
        assert message.usage.input_tokens == chat.usage.prompt_tokens
        system = claude.messages.create(**given(system="You tell stories."))
        assert system.usage.input_tokens > claude.messages.create(**given()).usage.input_tokens

    @pytest.mark.parametrize("extra", [{"top_k": 1}, {"top_p": 0.001}, {"temperature": 0}, {"min_p": 1.0}])
    def test_sampling(self, claude, extra):
        """Each of these leaves the likeliest token alone, whatever the seed."""
        texts = {
            claude.messages.create(**given(max_tokens=12, extra_body=extra | {"seed": seed})).content[0].text
            for seed in range(2)
        }
        assert len(texts) == 1

    def test_drafting_changes_no_token(self, claude):
        messages = [
            claude.messages.create(**given(extra_body={"speculative": {"mtp": mtp}})) for mtp in ("off", 1, 8)
        ]
        assert len({message.content[0].text for message in messages}) == 1
        assert [message.timings["draft_n"] > 0 for message in messages] == [False, True, True]

    def test_async_client(self, server, claude):
        async def text():
            other = anthropic.AsyncAnthropic(base_url=server.url, api_key="none")
            async with other, other.messages.stream(**given()) as stream:
                return "".join([piece async for piece in stream.text_stream])

        assert asyncio.run(text()) == claude.messages.create(**given()).content[0].text


class TestPrefill:
    """A last message of the assistant's is where the answer goes on from."""

    def test_it_is_the_chat_s_continued_message(self, claude, client):
        messages = [STORY, {"role": "assistant", "content": "Here is a poem: "}]
        message = claude.messages.create(**given(messages=messages))
        chat = ask_chat(client, messages=messages, extra_body={"continue_final_message": True})
        assert message.content[0].text == chat.choices[0].message.content
        with claude.messages.stream(**given(messages=messages)) as stream:
            assert comparable(stream.get_final_message()) == comparable(message)

    def test_thoughts_stay_apart(self, tool_claude, model):
        """What goes on after thinking is text, and is not taken for a thought."""
        said = [
            {"type": "thinking", "thinking": "Dragons are shy.", "signature": "s"},
            {"type": "text", "text": "A dragon"},
        ]
        message = tool_claude.messages.create(
            **given(
                model=model,
                messages=[STORY, {"role": "assistant", "content": said}],
                thinking={"type": "adaptive"},
            )
        )
        assert [block.type for block in message.content] == ["text"]


def test_context_management_that_clears_nothing(claude):
    """As Claude Code asks for it."""
    for edits in ([], [{"type": "clear_thinking_20251015", "keep": "all"}]):
        message = claude.beta.messages.create(
            **given(context_management={"edits": edits}, betas=["context-management-2025-06-27"])
        )
        assert message.content[0].text == claude.messages.create(**given()).content[0].text


class TestParse:
    class Dragon(BaseModel):
        mood: Literal["shy", "proud"]
        wings: bool

    def test_parse(self, claude):
        message = claude.messages.parse(**given(output_format=self.Dragon, max_tokens=400))
        assert isinstance(message.parsed_output, self.Dragon)
        with claude.messages.stream(**given(output_format=self.Dragon, max_tokens=400)) as stream:
            assert stream.get_final_message().parsed_output == message.parsed_output


class TestCountTokens:
    def test_is_what_a_message_reads(self, claude):
        prompt = {"system": "You tell stories.", "messages": [STORY]}
        counted = claude.messages.count_tokens(model="tale-20m", **prompt)
        assert counted.input_tokens == claude.messages.create(**given(**prompt)).usage.input_tokens

    def test_tools_count(self, tool_claude, model):
        plain = tool_claude.messages.count_tokens(model=model, messages=[STORY])
        with_tools = tool_claude.messages.count_tokens(model=model, messages=[STORY], tools=[WEATHER])
        assert with_tools.input_tokens > plain.input_tokens + 50
        message = tool_claude.messages.create(**given(model=model, tools=[WEATHER], max_tokens=1))
        assert message.usage.input_tokens == with_tools.input_tokens


class TestTools:
    def test_call(self, called):
        (call,) = called.content
        assert (call.type, call.name, called.stop_reason) == ("tool_use", "get_weather", "tool_use")
        assert set(call.input) == {"city", "unit"} and call.input["unit"] in ("C", "F")

    def test_stream_equals_whole(self, tool_claude, model, called):
        with tool_claude.messages.stream(**forced(model)) as stream:
            events = list(stream)
            final = stream.get_final_message()
        assert comparable(final) == comparable(called)
        pieces = [event.partial_json for event in events if event.type == "input_json"]
        assert len(pieces) > 1 and json.loads("".join(pieces)) == final.content[0].input
        started = next(event for event in events if event.type == "content_block_start")
        assert started.content_block.id == final.content[0].id and started.content_block.input == {}

    def test_any_and_one_at_a_time(self, tool_claude, model):
        choice = {"type": "any", "disable_parallel_tool_use": True}
        message = tool_claude.messages.create(**forced(model) | {"tool_choice": choice})
        assert [block.type for block in message.content] == ["tool_use"]

    def test_none(self, tool_claude, model):
        message = tool_claude.messages.create(
            **forced(model, max_tokens=8) | {"tool_choice": {"type": "none"}}
        )
        assert [block.type for block in message.content] == ["text"]
        plain = tool_claude.messages.create(**given(model=model, max_tokens=8))
        assert message.usage.input_tokens == plain.usage.input_tokens

    @pytest.mark.parametrize("failed", [False, True])
    def test_round_trip(self, tool_claude, tool_client, model, called, failed):
        """A call and its result, sent back, make the prompt that the chat's messages make."""
        (call,) = called.content
        result = {
            "type": "tool_result",
            "tool_use_id": call.id,
            "content": [{"type": "text", "text": "no such city"}],
            "is_error": failed,
        }
        message = tool_claude.messages.create(
            **given(
                model=model,
                tools=[WEATHER],
                max_tokens=6,
                messages=[
                    STORY,
                    {"role": "assistant", "content": called.content},
                    {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
                ],
            )
        )
        function = {"name": call.name, "arguments": json.dumps(call.input)}
        chat = ask_chat(
            tool_client,
            model=model,
            max_tokens=6,
            tools=[CHAT_WEATHER],
            messages=[
                STORY,
                {
                    "role": "assistant",
                    "tool_calls": [{"id": call.id, "type": "function", "function": function}],
                },
                {
                    "role": "tool",
                    "tool_call_id": call.id,
                    "content": "Error: no such city" if failed else "no such city",
                },
                {"role": "user", "content": "So?"},
            ],
            extra_body=NO_THOUGHT,
        )
        assert message.usage.input_tokens == chat.usage.prompt_tokens
        assert message.content[0].text == chat.choices[0].message.content

    def test_a_call_cut_off(self, tool_claude, model):
        message = tool_claude.messages.create(**forced(model, max_tokens=25))
        assert message.stop_reason == "max_tokens"
        for limit in range(16, 30):
            message = tool_claude.messages.create(**forced(model, max_tokens=limit))
            with tool_claude.messages.stream(**forced(model, max_tokens=limit)) as stream:
                text = "".join(event.partial_json for event in stream if event.type == "input_json")
                assert comparable(stream.get_final_message()) == comparable(message)
            if message.content and message.content[-1].type == "tool_use":
                assert from_json(text or "{}", allow_partial=True) == message.content[-1].input


class TestThinking:
    def test_off_unless_asked_for(self, tool_claude, model):
        """Clients that do not speak of thinking take the first block for the text."""
        plain = tool_claude.messages.create(**given(model=model, max_tokens=8))
        off = tool_claude.messages.create(**given(model=model, max_tokens=8, thinking={"type": "disabled"}))
        assert [block.type for block in plain.content] == ["text"]
        assert comparable(plain) == comparable(off)

    @pytest.mark.parametrize("thinking", [{"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}])
    def test_on(self, tool_claude, tool_client, model, thinking):
        limit = 1030 if "budget_tokens" in thinking else 12
        asked = given(model=model, max_tokens=limit, thinking=thinking, extra_body={"stop_sequences": [" "]})
        message = tool_claude.messages.create(**asked)
        chat = ask_chat(tool_client, model=model, max_tokens=limit, stop=[" "])
        (thought,) = message.content
        assert (thought.type, thought.signature) == ("thinking", "")
        assert thought.thinking == chat.choices[0].message.reasoning_content
        with tool_claude.messages.stream(**asked) as stream:
            events = list(stream)
            assert comparable(stream.get_final_message()) == comparable(message)
        kinds = [event.type for event in events]
        assert kinds.index("signature") > max(i for i, kind in enumerate(kinds) if kind == "thinking")
        assert message.usage.output_tokens_details.thinking_tokens == message.usage.output_tokens

    def test_sent_back(self, tool_claude, tool_client, model):
        thought = {"type": "thinking", "thinking": "Dragons are shy.", "signature": ""}
        said = {"role": "assistant", "content": [thought, {"type": "text", "text": "A dragon hid."}]}
        more = {"role": "user", "content": "Go on."}
        message = tool_claude.messages.create(
            **given(model=model, max_tokens=6, messages=[STORY, said, more])
        )
        flat = {
            "role": "assistant",
            "content": "A dragon hid.",
            "reasoning_content": "Dragons are shy.",
        }
        chat = ask_chat(
            tool_client, model=model, max_tokens=6, messages=[STORY, flat, more], extra_body=NO_THOUGHT
        )
        assert message.content[0].text == chat.choices[0].message.content
        assert message.usage.input_tokens == chat.usage.prompt_tokens


def block(**fields):
    return {"messages": [{"role": "user", "content": [fields]}]}


REFUSED = [
    (block(type="image", source={"type": "url", "url": "http://x"}), "messages[0].content[0]", "text alone"),
    (block(type="document", source={}), "messages[0].content[0]", "text alone"),
    (block(type="redacted_thinking", data="x"), "messages[0].content[0]", "must be a text"),
    (block(type="tool_use", id="x", name="y", input={}), "messages[0].content[0]", "not the user's"),
    (
        block(type="tool_result", tool_use_id="x", content=[{"type": "image"}]),
        "content[0].content[0]",
        "text",
    ),
    ({"messages": []}, "messages", ""),
    (
        {
            "messages": [
                STORY,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "y", "input": {}}]},
            ]
        },
        "messages",
        "must be a text",
    ),
    ({"system": [{"type": "image"}]}, "system[0]", "text"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]", "built-in"),
    ({"tools": [{"name": "x"}]}, "tools[0].input_schema", "missing"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "missing"),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "no tools"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.budget_tokens", "below max_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "thinking.budget_tokens", "1024"),
    ({"thinking": {"type": "adaptive", "budget_tokens": 2000}}, "thinking.budget_tokens", "enabled"),
    ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display", "in full"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "shape"}}}},
        "output_config.format",
        "schema",
    ),
    ({"max_tokens": 0}, "max_tokens", ""),
    ({"temperature": "hot"}, "temperature", ""),
    ({"speculative": {"trace": True}}, "speculative.trace", "remove"),
    (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management",
        "leave out",
    ),
    (
        {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}},
        "context_management",
        "leave out",
    ),
    ({"speculative": {"mtp": 9}}, "speculative.mtp", "maximum"),
    ({"mcp_servers": [{"type": "url", "name": "x", "url": "http://x"}]}, "mcp_servers", "tools of your own"),
    ({"n": 2}, "n", "one answer"),
]


@pytest.mark.parametrize(("body", "field", "fix"), REFUSED, ids=[str(one[0])[:40] for one in REFUSED])
def test_refused(claude, body, field, fix):
    with pytest.raises(anthropic.BadRequestError) as raised:
        claude.messages.create(**given(extra_body=body))
    error = raised.value.body
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert error["request_id"] == raised.value.response.headers["x-request-id"]
    assert field in error["error"]["message"] and fix in error["error"]["message"]


def test_max_tokens_is_required(server):
    with server.client() as http:
        answer = http.post("/v1/messages", json={"messages": [STORY]})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("max_tokens")


def test_unknown_model(claude):
    with pytest.raises(anthropic.NotFoundError) as raised:
        claude.messages.create(**given(model="claude-nobody"))
    assert raised.value.body["error"]["type"] == "not_found_error"


def test_an_error_in_a_stream():
    with RunningServer(request_timeout=0.05) as hasty:
        claude, asked = anthropic_client(hasty), given(max_tokens=1500)
        with pytest.raises(anthropic.APIStatusError) as raised, claude.messages.stream(**asked) as stream:
            list(stream)
        assert raised.value.body["error"]["type"] == "timeout_error"
        assert "request_timeout" in raised.value.body["error"]["message"]
        with pytest.raises(anthropic.InternalServerError):
            claude.messages.create(**asked)


def test_prefill(claude):
    """A last message of the assistant's is continued: a form of the answer that many prompts rely on."""
    more = {
        "model": "tale-20m",
        "max_tokens": 30,
        "extra_body": {"temperature": 0, "speculative": {"mtp": 3}},
    }
    whole = claude.messages.create(messages=[STORY], **more).content[0].text
    begun = whole[: whole.rindex(" ", 0, len(whole) // 2)]
    for prefill in (begun, [{"type": "text", "text": begun}]):
        answer = claude.messages.create(messages=[STORY, {"role": "assistant", "content": prefill}], **more)
        assert answer.content[0].text.startswith(whole[len(begun) :][:20])
