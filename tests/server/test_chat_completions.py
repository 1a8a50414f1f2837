"""`/v1/chat/completions` with the real `openai` client over real sockets, and the wire where the client hides it."""

import json
import re

import openai
import pytest

STORY = [{"role": "user", "content": "Write a short story about a shy dragon who learns to share."}]
SEEDED = {"model": "tale-20m", "messages": STORY, "seed": 7, "temperature": 0.8, "max_tokens": 60}

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def collect(chunks):
    """The texts of a stream by choice, and its last chunk that has each field."""
    texts, last = {}, {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                last["finish_reason"] = choice.finish_reason
        for name in ("usage", "timings", "metrics"):
            if getattr(chunk, name, None) is not None:
                last[name] = getattr(chunk, name)
    return texts, last


class TestText:
    def test_whole(self, client):
        answer = client.chat.completions.create(**SEEDED)
        assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
        assert answer.model == "tale-20m"
        choice = answer.choices[0]
        assert choice.message.role == "assistant" and len(choice.message.content) > 50
        assert choice.finish_reason == "length"
        assert answer.usage.completion_tokens == 60
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + 60

    def test_stream_equals_whole(self, client):
        whole = client.chat.completions.create(**SEEDED)
        texts, last = collect(client.chat.completions.create(**SEEDED, stream=True))
        assert texts == {0: whole.choices[0].message.content}
        assert last["finish_reason"] == "length"
        assert "usage" not in last

    @pytest.mark.parametrize("mtp", ["off", "auto", "on", 1, 4, 8])
    @pytest.mark.parametrize("temperature", [0, 1.0])
    def test_drafting_changes_no_token(self, client, mtp, temperature):
        given = SEEDED | {"temperature": temperature}
        plain = client.chat.completions.create(**given, extra_body={"speculative": {"mtp": 0}})
        drafted = client.chat.completions.create(**given, extra_body={"speculative": {"mtp": mtp}})
        assert drafted.choices[0].message.content == plain.choices[0].message.content
        timings = drafted.timings
        assert (timings["draft_n"] > 0) == (mtp != "off")

    def test_usage_in_stream(self, client):
        stream = client.chat.completions.create(**SEEDED, stream=True, stream_options={"include_usage": True})
        chunks = list(stream)
        assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 60
        details = chunks[-1].usage.completion_tokens_details
        timings = chunks[-2].timings
        assert details.accepted_prediction_tokens == timings["draft_n_accepted"] > 0
        drafted = details.accepted_prediction_tokens + details.rejected_prediction_tokens
        assert drafted == timings["draft_n"]

    def test_choices(self, client):
        answer = client.chat.completions.create(**SEEDED, n=3)
        texts = [choice.message.content for choice in answer.choices]
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert len(set(texts)) == 3
        assert answer.usage.completion_tokens == 180
        streamed, _ = collect(client.chat.completions.create(**SEEDED, n=3, stream=True))
        assert [streamed[index] for index in range(3)] == texts
        assert client.chat.completions.create(**SEEDED).choices[0].message.content == texts[0]

    def test_stop_and_limits(self, client):
        whole = client.chat.completions.create(**SEEDED).choices[0].message.content
        word = whole.split()[7]
        answer = client.chat.completions.create(**SEEDED, stop=[word])
        assert answer.choices[0].message.content == whole[: whole.index(word)]
        assert answer.choices[0].finish_reason == "stop"
        given = {name: value for name, value in SEEDED.items() if name != "max_tokens"}
        short = client.chat.completions.create(**given, max_completion_tokens=5)
        assert short.usage.completion_tokens == 5

    def test_roles(self, client):
        messages = [
            {"role": "developer", "content": "You write stories."},
            {
                "role": "system",
                "content": [{"type": "text", "text": "Short "}, {"type": "text", "text": "ones."}],
            },
            {"role": "user", "content": [{"type": "text", "text": "Tell me one."}]},
            {"role": "assistant", "content": "Once upon a time."},
            {"role": "user", "content": "Go on."},
        ]
        answer = client.chat.completions.create(model="tale-20m", messages=messages, max_tokens=5)
        assert answer.usage.completion_tokens == 5

    def test_penalties_and_filters(self, client):
        given = SEEDED | {"temperature": 0}
        plain = client.chat.completions.create(**given).choices[0].message.content
        penalised = client.chat.completions.create(**given, presence_penalty=2.0, frequency_penalty=2.0)
        assert penalised.choices[0].message.content != plain
        for extra in ({"top_k": 1}, {"min_p": 1.0}):
            sampled = client.chat.completions.create(**(given | {"temperature": 1.5}), extra_body=extra)
            assert sampled.choices[0].message.content == plain

    def test_logit_bias(self, client, server):
        given = SEEDED | {"temperature": 0, "max_tokens": 1}
        plain = client.chat.completions.create(**given).choices[0].message.content
        with server.client() as http:
            tokens = http.post("/v1/token/encode", json={"text": plain}).json()["tokens"]
        banned = client.chat.completions.create(**given, logit_bias={str(tokens[0]): -100})
        assert banned.choices[0].message.content != plain


class TestLogprobs:
    def test_whole_and_stream_agree(self, client):
        given = SEEDED | {"logprobs": True, "top_logprobs": 3, "max_tokens": 20}
        whole = client.chat.completions.create(**given).choices[0]
        assert len(whole.logprobs.content) == 20
        for entry in whole.logprobs.content:
            assert entry.logprob <= 0 and len(entry.top_logprobs) == 3
            assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token
        assert "".join(entry.token for entry in whole.logprobs.content) == whole.message.content
        streamed = [
            entry
            for chunk in client.chat.completions.create(**given, stream=True)
            for choice in chunk.choices
            if choice.logprobs
            for entry in choice.logprobs.content
        ]
        assert streamed == whole.logprobs.content

    def test_off_by_default(self, client):
        assert client.chat.completions.create(**SEEDED).choices[0].logprobs is None


class TestStructured:
    @pytest.mark.parametrize("mtp", ["off", "auto", 6])
    def test_json_schema(self, client, mtp):
        form = {
            "type": "json_schema",
            "json_schema": {"name": "dragon", "schema": SCHEMA, "strict": True},
        }
        given = SEEDED | {"max_tokens": 200, "response_format": form}
        plain = client.chat.completions.create(**given, extra_body={"speculative": {"mtp": "off"}})
        answer = client.chat.completions.create(**given, extra_body={"speculative": {"mtp": mtp}})
        data = json.loads(answer.choices[0].message.content)
        assert set(data) == {"name", "age"} and isinstance(data["age"], int) and len(data["name"]) <= 12
        assert answer.choices[0].message.content == plain.choices[0].message.content
        assert answer.choices[0].finish_reason == "stop"

    def test_pattern_grammar_and_choice(self, client):
        def ask(**extra):
            return client.chat.completions.create(**SEEDED, extra_body=extra).choices[0].message.content

        text = ask(response_format={"type": "regex", "pattern": r"[a-z]{3}-[0-9]{4}"})
        assert re.fullmatch(r"[a-z]{3}-[0-9]{4}", text)
        text = ask(response_format={"type": "grammar", "grammar": 'start: "yes" | "no"'})
        assert text in ("yes", "no")
        text = ask(response_format={"type": "grammar", "syntax": "gbnf", "grammar": 'root ::= "ja" | "nein"'})
        assert text in ("ja", "nein")
        assert ask(structured_outputs={"choice": ["red", "green"]}) in ("red", "green")
        assert json.loads(ask(structured_outputs={"json": {"enum": ["a", "b"]}})) in ("a", "b")

    def test_json_object(self, client):
        answer = client.chat.completions.create(
            **(SEEDED | {"max_tokens": 400}), response_format={"type": "json_object"}
        )
        if answer.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(answer.choices[0].message.content), dict)
        else:
            assert answer.choices[0].message.content.lstrip().startswith("{")

    @pytest.mark.parametrize(
        ("form", "param"),
        [
            ({"type": "json_schema"}, "response_format"),
            (
                {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}},
                "response_format",
            ),
            ({"type": "regex", "pattern": "("}, "response_format"),
            ({"type": "grammar", "grammar": "start: missing"}, "response_format"),
            ({"type": "yaml"}, "response_format.type"),
            ({"type": "text", "pattern": "a"}, "response_format.pattern"),
        ],
    )
    def test_wrong_forms(self, client, form, param):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**SEEDED, extra_body={"response_format": form})
        assert param in caught.value.body["param"] or param in caught.value.body["message"]


class TestRefusals:
    @pytest.mark.parametrize(
        ("extra", "param"),
        [
            ({"functions": [{"name": "f"}]}, "functions"),
            ({"best_of": 2}, "best_of"),
            ({"audio": {"voice": "ash", "format": "wav"}}, "audio"),
            ({"speculative": {"k": 3}}, "speculative.k"),
            ({"speculative": {"mtp": "maybe"}}, "speculative.mtp"),
            ({"speculative": {"mtp": 9}}, "speculative.mtp"),
            ({"temperature": -1}, "temperature"),
            ({"temperature": "1"}, "temperature"),
            ({"top_p": 0}, "top_p"),
            ({"n": 0}, "n"),
            ({"n": 129}, "n"),
            ({"seed": -1}, "seed"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"stop": [""]}, "stop"),
            ({"logit_bias": {"x": 1}}, "logit_bias"),
            ({"logit_bias": {"99999999": 1}}, "logit_bias"),
            ({"messages": []}, "messages"),
            ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
            ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
            ({"messages": [{"role": "user", "contents": "x"}]}, "messages[0].contents"),
            ({"stream_options": {"include_usages": True}}, "stream_options.include_usages"),
            ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
            ({"tool_choice": "required"}, "tool_choice"),
        ],
    )
    def test_names_the_field(self, client, extra, param):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**SEEDED, extra_body=extra)
        assert caught.value.body["param"] == param or caught.value.body["message"].startswith(param)
        assert caught.value.body["type"] == "invalid_request_error"

    def test_prompt_over_the_context(self, client):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model="tale-20m", messages=[{"role": "user", "content": "word " * 5000}], stream=True
            )
        assert caught.value.code == "context_length_exceeded"
        assert "4096" in caught.value.body["message"]

    def test_image(self, client):
        part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        with pytest.raises(openai.BadRequestError, match="text"):
            client.chat.completions.create(model="tale-20m", messages=[{"role": "user", "content": [part]}])

    def test_unknown_model(self, client):
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="gpt-9", messages=STORY)
        assert caught.value.code == "model_not_found"


class TestTrace:
    def test_every_token_is_accounted_for(self, server):
        body = SEEDED | {"stream": True, "speculative": {"mtp": 4, "trace": True}}
        text, shown, accepted, own = "", "", 0, 0
        with server.client() as http, http.stream("POST", "/v1/chat/completions", json=body) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                for choice in chunk["choices"]:
                    text += choice["delta"].get("content") or ""
                if "headlong" in chunk:
                    step = chunk["headlong"]
                    shown += "".join(token["text"] for token in step["tokens"])
                    drafted = [token["drafted"] for token in step["tokens"]]
                    assert sum(drafted) <= step["num_accepted"] <= step["num_drafted"] <= 4
                    assert len(step["rejected"]) == step["num_drafted"] - step["num_accepted"]
                    accepted += sum(drafted)
                    own += len(drafted) - sum(drafted)
                if "timings" in chunk:
                    timings = chunk["timings"]
        assert shown == text
        assert accepted + own == 60 and accepted <= timings["draft_n_accepted"]
