"""Tool calls and reasoning over the wire. The embedded weights know neither, so calls are forced by `tool_choice`,
which is the harder half: the grammar, the drafts and the parser must agree."""

import json

import openai
import pytest

from support.serving import RunningServer, model_with_template

ASK = {
    "messages": [{"role": "user", "content": "What is the weather in Rome?"}],
    "seed": 3,
    "temperature": 0.9,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"type": "string", "enum": ["C", "F"]},
            },
            "required": ["city", "days", "unit"],
            "additionalProperties": False,
        },
    },
}
TIME = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}
NO_THOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(params=["qwen3_coder", "hermes"])
def caller(request):
    """(client, model) of a server with that tool format."""
    name = {"qwen3_coder": "tool_client", "hermes": "hermes_client"}[request.param]
    client = request.getfixturevalue(name)
    return client, client.models.list().data[0].id


def streamed(chunks):
    """The calls a stream builds up, and its finish reason."""
    calls, reason, deltas = {}, None, 0
    for chunk in chunks:
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or []:
                known = calls.setdefault(call.index, {"name": "", "arguments": "", "id": ""})
                known["name"] += call.function.name or ""
                known["id"] += call.id or ""
                known["arguments"] += call.function.arguments or ""
                deltas += bool(call.function.arguments)
    return calls, reason, deltas


class TestForcedCalls:
    @pytest.mark.parametrize("mtp", ["off", 3, 8])
    def test_named(self, caller, mtp):
        client, model = caller
        answer = client.chat.completions.create(
            **ASK,
            model=model,
            tools=[WEATHER, TIME],
            tool_choice={"type": "function", "function": {"name": "get_weather"}},
            parallel_tool_calls=False,
            max_tokens=300,
            extra_body=NO_THOUGHT | {"speculative": {"mtp": mtp}},
        )
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        calls = choice.message.tool_calls
        assert [call.function.name for call in calls] == ["get_weather"]
        for call in calls:
            data = json.loads(call.function.arguments)
            assert set(data) == {"city", "days", "unit"}
            assert isinstance(data["city"], str) and 1 <= data["days"] <= 9 and data["unit"] in ("C", "F")

    def test_streamed_equals_whole(self, caller):
        client, model = caller
        given = ASK | {
            "model": model,
            "tools": [WEATHER, TIME],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_tokens": 300,
        }
        whole = client.chat.completions.create(**given, extra_body=NO_THOUGHT).choices[0].message
        chunks = client.chat.completions.create(**given, extra_body=NO_THOUGHT, stream=True)
        calls, reason, deltas = streamed(chunks)
        assert reason == "tool_calls" and len(calls) == len(whole.tool_calls) == 1
        assert calls[0]["name"] == whole.tool_calls[0].function.name
        assert calls[0]["arguments"] == whole.tool_calls[0].function.arguments
        json.loads(calls[0]["arguments"])
        if calls[0]["name"] == "get_weather":
            assert deltas > 1, "arguments should come in parts"

    def test_round_trip(self, caller):
        """A call and its result go back into the conversation."""
        client, model = caller
        call = {
            "id": "call_1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city":"Rome"}'},
        }
        messages = [
            *ASK["messages"],
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "18 degrees"},
        ]
        answer = client.chat.completions.create(
            model=model, messages=messages, tools=[WEATHER], max_tokens=8, extra_body=NO_THOUGHT
        )
        assert answer.usage.completion_tokens >= 1

    def test_none(self, caller):
        client, model = caller
        answer = client.chat.completions.create(
            **ASK, model=model, tools=[WEATHER], tool_choice="none", max_tokens=20, extra_body=NO_THOUGHT
        )
        assert answer.choices[0].message.tool_calls is None

    @pytest.mark.parametrize(
        ("extra", "param"),
        [
            ({"tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
            ({"tools": [{"type": "function", "function": {"name": "bad name"}}]}, "tools[0].function.name"),
            ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ],
    )
    def test_refusals(self, caller, extra, param):
        client, model = caller
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**ASK, model=model, extra_body={"tools": [WEATHER]} | extra)
        assert param in f"{caught.value.body['param']} {caught.value.body['message']}"


ANSWER = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {
            "type": "object",
            "properties": {"degrees": {"type": "integer", "minimum": -60, "maximum": 60}},
            "required": ["degrees"],
            "additionalProperties": False,
        },
    },
}


class TestToolsWithAForm:
    """Tools and `response_format` in one request: the output is a call, or follows the schema, and nothing else."""

    def test_a_call_or_the_schema(self, caller, server):
        """The weights prefer a call; a bias on how the schema begins makes them prefer the answer now and then."""
        client, model = caller
        kinds = set()
        with server.client() as http:
            brace = http.post("/v1/token/encode", json={"text": '{"'}).json()["tokens"][0]
        for seed in range(6):
            answers = [
                client.chat.completions.create(
                    **(ASK | {"seed": seed, "temperature": 3.0}),
                    model=model,
                    tools=[WEATHER],
                    response_format=ANSWER,
                    parallel_tool_calls=False,
                    max_tokens=300,
                    logit_bias={str(brace): 12 * (seed % 2)},
                    extra_body=NO_THOUGHT | {"speculative": {"mtp": mtp}},
                )
                for mtp in ("off", 3)
            ]
            plain, drafted = (one.choices[0] for one in answers)
            assert plain.finish_reason == drafted.finish_reason != "length"
            assert plain.message.content == drafted.message.content
            kinds.add(plain.finish_reason)
            if plain.finish_reason == "tool_calls":
                assert not plain.message.content
                for call, same in zip(plain.message.tool_calls, drafted.message.tool_calls, strict=True):
                    assert call.function.arguments == same.function.arguments
                    assert set(json.loads(call.function.arguments)) == {"city", "days", "unit"}
            else:
                assert -60 <= json.loads(plain.message.content)["degrees"] <= 60
        assert kinds == {"tool_calls", "stop"}, "both must be within reach"

    @pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), ("none", "stop")])
    def test_the_choice_goes_first(self, caller, choice, reason):
        client, model = caller
        answer = client.chat.completions.create(
            **ASK,
            model=model,
            tools=[WEATHER],
            tool_choice=choice,
            response_format=ANSWER,
            parallel_tool_calls=False,
            max_tokens=300,
            extra_body=NO_THOUGHT,
        )
        assert answer.choices[0].finish_reason == reason

    @pytest.mark.parametrize(
        "form",
        [
            {"response_format": {"type": "json_object"}},
            {"response_format": {"type": "regex", "pattern": "[0-9]{1,2} degrees"}},
            {"structured_outputs": {"choice": ["warm", "cold"]}},
            {"structured_outputs": {"grammar": 'start: "warm" | "cold"'}},
        ],
    )
    def test_every_form(self, caller, form):
        client, model = caller
        answer = client.chat.completions.create(
            **ASK, model=model, tools=[WEATHER], max_tokens=300, extra_body=NO_THOUGHT | form
        )
        message = answer.choices[0].message
        if message.tool_calls:
            assert not message.content
        else:
            assert message.content[0] in "{0123456789wc"

    def test_a_schema_that_cannot_be_enforced_is_named(self, caller):
        client, model = caller
        form = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "if": {}, "then": {}}}}
        with pytest.raises(openai.BadRequestError, match="JSON schema"):
            client.chat.completions.create(
                **ASK, model=model, tools=[WEATHER], extra_body=NO_THOUGHT | {"response_format": form}
            )


class TestBundledModels:
    def test_the_embedded_model_takes_tools(self, server):
        """Its own template has a place for them; what it calls by itself is another matter."""
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        model = client.models.list().data[0].id
        given = ASK | {
            "model": model,
            "tools": [WEATHER, TIME],
            "parallel_tool_calls": False,
            "max_tokens": 300,
        }
        called = client.chat.completions.create(**given, tool_choice="required").choices[0].message
        messages = [
            *ASK["messages"],
            called.model_dump(exclude_none=True),
            *({"role": "tool", "tool_call_id": call.id, "content": "18"} for call in called.tool_calls),
        ]
        free = client.chat.completions.create(**(given | {"messages": messages})).choices[0].message
        assert free.content and not free.tool_calls


def test_a_template_without_tools_says_so(tmp_path):
    """Every word of the conversation would be written, and the tools would not."""
    plain = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    with RunningServer(model=str(model_with_template(tmp_path / "plain", plain))) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none")
        with pytest.raises(openai.BadRequestError, match="chat template has no place for tools"):
            client.chat.completions.create(model="plain", **ASK, tools=[WEATHER])


class TestReasoning:
    def test_split_and_counted(self, tool_client):
        """Qwen3.5's template opens `<think>` itself; the weights never close it, so all of it is reasoning."""
        model = tool_client.models.list().data[0].id
        given = ASK | {"model": model, "max_tokens": 40}
        answer = tool_client.chat.completions.create(**given)
        message = answer.choices[0].message
        assert message.reasoning_content and not message.content
        assert answer.usage.completion_tokens_details.reasoning_tokens == answer.usage.completion_tokens
        off = tool_client.chat.completions.create(**given, extra_body=NO_THOUGHT)
        assert off.choices[0].message.content
        assert getattr(off.choices[0].message, "reasoning_content", None) is None
        effort = tool_client.chat.completions.create(**given, reasoning_effort="none")
        assert effort.choices[0].message.content == off.choices[0].message.content

    def test_grammar_begins_where_reasoning_ends(self, tool_client, tool_server):
        """The reasoning is free. A bias makes the weights close it sooner or later; from there on the schema holds,
        whichever draft of a step the end falls on."""
        with tool_server.client() as http:
            (end,) = http.post("/v1/token/encode", json={"text": "</think>"}).json()["tokens"]
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["Rome", "Paris"]}}}
        given = ASK | {
            "model": tool_client.models.list().data[0].id,
            "max_tokens": 90,
            "response_format": form,
        }
        thought = 0
        for seed in range(6):
            answers = [
                tool_client.chat.completions.create(
                    **(given | {"seed": seed, "logit_bias": {str(end): 17.5}}),
                    extra_body={"speculative": {"mtp": mtp}},
                )
                for mtp in ("off", 1, 5)
            ]
            messages = [answer.choices[0].message for answer in answers]
            assert len({(one.content, getattr(one, "reasoning_content", None)) for one in messages}) == 1
            if answers[0].choices[0].finish_reason == "stop" and messages[0].content:
                assert json.loads(messages[0].content) in ("Rome", "Paris")
                thought += getattr(messages[0], "reasoning_content", None) is not None
        assert thought >= 2, "some must have thought first"

    def test_without_reasoning_the_grammar_begins_at_once(self, tool_client):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["Rome", "Paris"]}}}
        answer = tool_client.chat.completions.create(
            **ASK,
            model=tool_client.models.list().data[0].id,
            max_tokens=40,
            response_format=form,
            extra_body=NO_THOUGHT,
        )
        assert json.loads(answer.choices[0].message.content) in ("Rome", "Paris")
