"""`/v1/responses` with the real `openai` client over real sockets. What the same request gives as a chat is the
oracle wherever there is one."""

import asyncio
import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field

from support.serving import RunningServer

STORY = "Write a short story about a shy dragon who learns to share."
SEEDED = {"model": "tale-20m", "temperature": 0.8}
SEED = {"seed": 7}
LIMIT = 30
NO_THOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}
WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "unit": {"type": "string", "enum": ["C", "F"]},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    "strict": True,
}
THINKING = {
    "extra_body": {
        **NO_THOUGHT,
        "structured_outputs": {"regex": r"<think>\n[a-z ]{9,30}\n</think>\n\n[A-Z][a-z ]{9,30}\."},
    }
}
"""The embedded weights do not think by themselves; a form makes them."""
FORCED = {
    "tools": [{"type": "function", **WEATHER}],
    "tool_choice": {"type": "function", "name": "get_weather"},
    "parallel_tool_calls": False,
    "max_output_tokens": 300,
    "extra_body": NO_THOUGHT,
}


class Dragon(BaseModel):
    name: str = Field(max_length=12)
    mood: Literal["shy", "proud"]
    age: int = Field(ge=1, le=999)


def comparable(response):
    """Without what differs from one request to the next: ids, times, speeds, drafts, and what the helpers add."""
    data = response.to_dict()
    for name in ("id", "created_at", "completed_at", "timings", "metrics"):
        data.pop(name)
    for kind in ("accepted", "rejected"):  # drafts whose masks are late are cut
        data["usage"]["output_tokens_details"].pop(f"{kind}_prediction_tokens")
    for item in data["output"]:
        item.pop("id")
        item.pop("call_id", None)
        item.pop("parsed_arguments", None)
        for part in item.get("content", ()):
            part.pop("parsed", None)
    return data


def ask(client, **given):
    extra = SEED | given.pop("extra_body", {})
    return client.responses.create(**SEEDED | {"input": STORY} | given, extra_body=extra)


def ask_chat(client, **given):
    messages = [{"role": "user", "content": STORY}]
    return client.chat.completions.create(
        **SEEDED | {"messages": messages, "max_tokens": LIMIT, **SEED} | given
    )


def streamed(client, **given):
    """A stream's events, and the response its helper put together."""
    extra = SEED | given.pop("extra_body", {})
    with client.responses.stream(**SEEDED | {"input": STORY} | given, extra_body=extra) as stream:
        events = list(stream)
        return events, stream.get_final_response()


@pytest.fixture(scope="module")
def model(tool_client):
    return tool_client.models.list().data[0].id


@pytest.fixture(scope="module")
def called(tool_client, model):
    """A response that is a call."""
    return ask(tool_client, model=model, **FORCED)


class TestText:
    def test_whole(self, client):
        response = ask(client, max_output_tokens=LIMIT)
        text = ask_chat(client).choices[0].message.content
        assert response.id.startswith("resp_") and response.object == "response"
        assert response.output_text == text
        assert [item.type for item in response.output] == ["message"]
        assert response.output[0].status == response.status == "incomplete"
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.usage.output_tokens == LIMIT
        assert response.usage.total_tokens == LIMIT + response.usage.input_tokens
        assert response.store is True and response.previous_response_id is None
        assert (response.temperature, response.top_p, response.max_output_tokens) == (0.8, 1.0, LIMIT)
        assert response.metrics["speculative_decoding"]["num_draft_tokens"] == response.timings["draft_n"]
        accepted = response.usage.output_tokens_details.accepted_prediction_tokens
        assert accepted == response.timings["draft_n_accepted"] > 0

    def test_an_end_of_its_own(self, client):
        text = ask(client, max_output_tokens=LIMIT).output_text
        word = text.split()[9]
        response = ask(client, max_output_tokens=LIMIT, extra_body={"stop": [word]})
        assert response.output_text == text[: text.index(word)]
        assert response.status == response.output[0].status == "completed"
        assert response.incomplete_details is None

    def test_stream_equals_whole(self, client):
        word = ask(client, max_output_tokens=LIMIT).output_text.split()[14]
        given = {"max_output_tokens": LIMIT, "extra_body": {"stop": [word]}}
        whole = ask(client, **given)
        events, final = streamed(client, **given)
        assert comparable(final) == comparable(whole)
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert len(deltas) > 3 and "".join(deltas) == whole.output_text
        assert final.timings["predicted_n"] == whole.usage.output_tokens

    def test_events(self, client):
        events = list(ask(client, max_output_tokens=LIMIT, stream=True))
        kinds = [event.type for event in events]
        deltas = kinds.count("response.output_text.delta")
        assert kinds == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            *["response.output_text.delta"] * deltas,
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.incomplete",
        ]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        last = events[-1].response
        assert comparable(last) == comparable(ask(client, max_output_tokens=LIMIT))
        assert events[0].response.id == last.id and events[0].response.output == []
        assert events[-2].item == last.output[0] and events[2].item.id == last.output[0].id
        assert events[-4].text == last.output_text

    def test_drafting_changes_no_token(self, client):
        texts = {
            mtp: ask(client, max_output_tokens=LIMIT, extra_body={"speculative": {"mtp": mtp}}).output_text
            for mtp in ("off", 1, 8)
        }
        assert len(set(texts.values())) == 1

    def test_conversation(self, client):
        """Strings, parts and shorthand messages are the chat's messages."""
        response = ask(
            client,
            instructions="You tell stories.",
            input=[
                {"role": "user", "content": "Who are you?"},
                {
                    "type": "message",
                    "id": "msg_1",
                    "status": "completed",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "A poet.", "annotations": []}],
                },
                {"role": "user", "content": [{"type": "input_text", "text": STORY}]},
            ],
            max_output_tokens=LIMIT,
        )
        chat = ask_chat(
            client,
            messages=[
                {"role": "system", "content": "You tell stories."},
                {"role": "user", "content": "Who are you?"},
                {"role": "assistant", "content": "A poet."},
                {"role": "user", "content": STORY},
            ],
        )
        assert response.usage.input_tokens == chat.usage.prompt_tokens
        assert response.output_text == chat.choices[0].message.content

    def test_an_output_is_an_input(self, client):
        first = ask(client, max_output_tokens=20)
        more = [{"role": "user", "content": "Go on."}]
        second = ask(
            client, input=[{"role": "user", "content": STORY}, *first.output, *more], max_output_tokens=20
        )
        before = [{"role": "user", "content": STORY}, {"role": "assistant", "content": first.output_text}]
        chat = ask_chat(client, messages=before + more, max_tokens=20)
        assert second.output_text == chat.choices[0].message.content

    def test_logprobs(self, client):
        given = {"max_output_tokens": 20, "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
        response = ask(client, **given)
        part = response.output[0].content[0]
        chat = ask_chat(client, max_tokens=20, logprobs=True, top_logprobs=2)
        assert [one.to_dict() for one in part.logprobs] == [
            one.to_dict() for one in chat.choices[0].logprobs.content
        ]
        assert "".join(one.token for one in part.logprobs) == part.text
        events = list(ask(client, **given, stream=True))
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        told = [one for event in deltas for one in event.logprobs]
        assert [(one.token, one.logprob) for one in told] == [
            (one.token, one.logprob) for one in part.logprobs
        ]

    def test_async_client(self, server, client):
        async def text():
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as other:
                given = SEEDED | {"input": STORY, "max_output_tokens": 20, "extra_body": SEED}
                return (await other.responses.create(**given)).output_text

        assert asyncio.run(text()) == ask(client, max_output_tokens=20).output_text


class TestForms:
    def test_parse(self, client):
        response = client.responses.parse(**SEEDED, input=STORY, text_format=Dragon, extra_body=SEED)
        assert isinstance(response.output_parsed, Dragon)
        assert response.status == "completed" and response.text.format.type == "json_schema"

    def test_parse_a_stream(self, client):
        _, final = streamed(client, text_format=Dragon)
        whole = client.responses.parse(**SEEDED, input=STORY, text_format=Dragon, extra_body=SEED)
        assert final.output_parsed == whole.output_parsed

    def test_other_forms(self, client):
        response = ask(client, text={"format": {"type": "regex", "pattern": "[a-f]{3}-[0-9]{2}"}})
        assert len(response.output_text) == 6 and response.output_text[3] == "-"
        response = ask(client, text={"format": {"type": "grammar", "grammar": 'start: "yes" | "no"'}})
        assert response.output_text in ("yes", "no")


class TestTools:
    def test_call(self, called):
        (call,) = called.output
        assert (call.type, call.name, call.status) == ("function_call", "get_weather", "completed")
        arguments = json.loads(call.arguments)
        assert set(arguments) == {"city", "unit"} and arguments["unit"] in ("C", "F")
        assert call.call_id and call.id != call.call_id and called.status == "completed"
        assert called.tool_choice.name == called.tools[0].name == "get_weather"

    def test_stream_equals_whole(self, tool_client, model, called):
        events, final = streamed(tool_client, model=model, **FORCED)
        assert comparable(final) == comparable(called)
        (call,) = final.output
        assert call.parsed_arguments == json.loads(call.arguments)
        kinds = [event.type for event in events]
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert len(deltas) > 1 and "".join(deltas) == call.arguments
        assert kinds == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            *["response.function_call_arguments.delta"] * len(deltas),
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
        added = next(event.item for event in events if event.type == "response.output_item.added")
        assert (added.call_id, added.id, added.arguments) == (call.call_id, call.id, "")

    def test_round_trip(self, tool_client, model, called):
        """A call and its result, sent back, make the prompt that the chat's messages make."""
        given = FORCED | {"tool_choice": "auto", "model": model, "max_output_tokens": 6}
        (call,) = called.output
        question = {"role": "user", "content": STORY}
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        response = ask(tool_client, **given | {"input": [question, call, result]})
        function = {"name": call.name, "arguments": call.arguments}
        chat = ask_chat(
            tool_client,
            model=model,
            messages=[
                question,
                {
                    "role": "assistant",
                    "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
                },
                {"role": "tool", "tool_call_id": call.call_id, "content": "sunny"},
            ],
            tools=[{"type": "function", "function": WEATHER}],
            max_tokens=6,
            extra_body=NO_THOUGHT,
        )
        assert response.usage.input_tokens == chat.usage.prompt_tokens
        assert response.output_text == chat.choices[0].message.content

    def test_a_call_cut_off(self, tool_client, model):
        response = ask(tool_client, model=model, **FORCED | {"max_output_tokens": 25})
        assert response.status == "incomplete"
        assert [item.status for item in response.output] == ["incomplete"]


class TestReasoning:
    def test_items(self, tool_client, model):
        response = ask(tool_client, model=model, **THINKING)
        thought, message = response.output
        assert (thought.type, thought.summary, thought.status) == ("reasoning", [], "completed")
        assert thought.content[0].type == "reasoning_text" and 9 <= len(thought.content[0].text) <= 30
        assert message.content[0].text == response.output_text and response.output_text.endswith(".")
        assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens

    def test_stream_equals_whole(self, tool_client, model):
        whole = ask(tool_client, model=model, **THINKING)
        events, final = streamed(tool_client, model=model, **THINKING)
        assert comparable(final) == comparable(whole)
        deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(deltas) == whole.output[0].content[0].text
        places = [event.output_index for event in events if hasattr(event, "output_index")]
        assert places == sorted(places) and set(places) == {0, 1}

    def test_logprobs_are_the_text_s(self, tool_client, model):
        response = ask(tool_client, model=model, include=["message.output_text.logprobs"], **THINKING)
        part = response.output[1].content[0]
        assert "".join(one.token for one in part.logprobs) == part.text

    def test_effort(self, tool_client, model):
        """`none` closes the thinking in the prompt, any other effort leaves it open."""
        on = ask(tool_client, model=model, reasoning={"effort": "low"}, max_output_tokens=6)
        off = ask(tool_client, model=model, reasoning={"effort": "none"}, max_output_tokens=6)
        assert [item.type for item in on.output] == ["reasoning"]
        assert [item.type for item in off.output] == ["message"]
        assert on.reasoning.effort == "low"
        assert on.usage.output_tokens_details.reasoning_tokens == 6

    def test_sent_back(self, tool_client, model):
        question, more = ({"role": "user", "content": text} for text in (STORY, "Go on."))
        first = ask(tool_client, model=model, **THINKING)
        second = ask(
            tool_client,
            model=model,
            input=[question, *first.output, more],
            include=["reasoning.encrypted_content"],
            max_output_tokens=6,
            extra_body=NO_THOUGHT,
        )
        said = {
            "role": "assistant",
            "content": first.output_text,
            "reasoning_content": first.output[0].content[0].text,
        }
        chat = ask_chat(
            tool_client, model=model, messages=[question, said, more], max_tokens=6, extra_body=NO_THOUGHT
        )
        assert second.output_text == chat.choices[0].message.content
        assert second.usage.input_tokens == chat.usage.prompt_tokens


REFUSED = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "whole conversation in input"),
    ({"conversation": "conv_1"}, "conversation", "send the conversation in input"),
    ({"background": True}, "background", "stream"),
    ({"prompt": {"id": "p"}}, "prompt", "instructions"),
    ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice.type", "function"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "missing"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format", "json_schema"),
    ({"text": {"format": {"type": "regex", "pattern": "("}}}, "text.format", "pattern"),
    ({"input": [{"type": "function_call", "call_id": "x", "name": "y", "arguments": "{"}]}, "input", "JSON"),
    ({"input": []}, "input", ""),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "must be a message"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0]",
        "text alone",
    ),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content", "content"),
    ({"max_output_tokens": 0}, "max_output_tokens", ""),
    ({"n": 2}, "n", "one output"),
    ({"speculative": {"trace": True}}, "speculative.trace", "remove"),
    ({"speculative": {"mtp": 9}}, "speculative.mtp", "maximum"),
]


@pytest.mark.parametrize(("given", "param", "fix"), REFUSED, ids=[str(one[0])[:40] for one in REFUSED])
def test_refused(client, given, param, fix):
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(model="tale-20m", input=STORY, extra_body=given)
    assert raised.value.param == param
    assert fix in raised.value.message


def test_accepted_for_what_it_is(client):
    """Fields that change no output, and the values that say what the server does anyway."""
    plain = ask(client, max_output_tokens=20)
    response = ask(
        client,
        max_output_tokens=20,
        store=True,
        truncation="auto",
        max_tool_calls=1,
        include=["file_search_call.results"],
        text={"verbosity": "low"},
        metadata={"a": "b"},
        user="u",
        prompt_cache_key="k",
        service_tier="auto",
        reasoning={"summary": "detailed"},
        extra_body={"shoe_size": 44, "background": False, "previous_response_id": None},
    )
    assert response.output_text == plain.output_text and response.metadata == {"a": "b"}


@pytest.fixture(scope="module")
def hasty():
    with RunningServer(request_timeout=0.3) as running:
        yield running


class TestFailure:
    def test_in_a_stream(self, hasty):
        body = {"input": STORY, "stream": True, "max_output_tokens": 1500, "ignore_eos": True}
        with hasty.client() as http, http.stream("POST", "/v1/responses", json=body) as response:
            lines = [line for line in response.iter_lines() if line.startswith("data: ")]
        error, failed = (json.loads(line.removeprefix("data: ")) for line in lines[-2:])
        assert (error["type"], error["code"]) == ("error", "request_timeout")
        assert "request_timeout" in error["message"]
        assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
        assert failed["response"]["error"]["message"] == error["message"]
        assert failed["response"]["output"][0]["content"][0]["text"]
        assert failed["sequence_number"] == error["sequence_number"] + 1

    def test_told_by_the_client(self, hasty):
        client = openai.OpenAI(base_url=f"{hasty.url}/v1", api_key="none", max_retries=0)
        given = {"model": "tale-20m", "input": STORY, "extra_body": {"ignore_eos": True}}
        kinds = [event.type for event in client.responses.create(**given, stream=True)]
        assert kinds[-2:] == ["error", "response.failed"]
        with pytest.raises(openai.InternalServerError) as raised:
            client.responses.create(**given)
        assert raised.value.status_code == 504
