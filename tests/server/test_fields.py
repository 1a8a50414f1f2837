"""The one rule for fields that a schema does not have: accepted, refused with a reason, or taken for a misspelling.

Over real sockets, with an engine that says what a script says: what is tested here ends before an engine begins.
"""

import io
import json
import time
from pathlib import Path

import pytest

from headlong.cli import fields_table
from headlong.server import logs
from headlong.server.left_out import MAX_CLIENTS, MAX_HEADER_CHARS
from headlong.server.schemas.chat import ChatRequest
from headlong.server.schemas.completions import CompletionRequest
from headlong.server.schemas.messages import CountTokensRequest, MessagesRequest
from headlong.server.schemas.ollama import GenerateRequest, OllamaChatRequest, Options
from headlong.server.schemas.responses import ResponsesRequest
from headlong.server.sifting import MAX_FIELDS, MAX_NOTED, candidates_of, fields_of, rules_of, sift
from headlong.server.spelling import nearest
from support.scripted import ScriptedEngine, ScriptedEngines
from support.serving import RunningServer

USER = [{"role": "user", "content": "Hi"}]
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
OLLAMA, GENERATE = "/api/chat", "/api/generate"
GOOD = {
    CHAT: {"messages": USER},
    TEXT: {"prompt": "Once"},
    RESPONSES: {"input": "Hi"},
    MESSAGES: {"messages": USER, "max_tokens": 8},
    OLLAMA: {"model": "tale-20m", "messages": USER},
    GENERATE: {"model": "tale-20m", "prompt": "Once"},
}
BODIES = {
    CHAT: ChatRequest,
    TEXT: CompletionRequest,
    RESPONSES: ResponsesRequest,
    MESSAGES: MessagesRequest,
    OLLAMA: OllamaChatRequest,
    GENERATE: GenerateRequest,
}
OURS = ("x-headlong-ignored", "x-headlong-unknown")


def scripted(**options):
    return RunningServer(loader=ScriptedEngines(ScriptedEngine("A dragon slept.")), **options)


@pytest.fixture(scope="module")
def running():
    with scripted() as server:
        yield server


@pytest.fixture(scope="module")
def http(running):
    with running.client() as client:
        yield client


def told(answer):
    """What an answer's headers say was left out: without effect, and unknown."""
    return tuple(answer.headers.get(name) for name in OURS)


def refused(answer):
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


ACCEPTED = [
    (CHAT, {"store": True, "metadata": {"a": "b"}, "user": "u"}, "store, metadata, user"),
    (CHAT, {"service_tier": "flex", "prompt_cache_retention": "24h"}, "service_tier, prompt_cache_retention"),
    (CHAT, {"prediction": {"type": "content", "content": "x"}}, "prediction"),
    (CHAT, {"modalities": ["text"], "functions": [], "typical_p": 1.0}, "modalities, functions, typical_p"),
    (CHAT, {"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    (
        CHAT,
        {"messages": [{**USER[0], "id": "x", "provider_specific_fields": {"a": 1}}] * 2},
        "messages[].id, messages[].provider_specific_fields",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}]},
        "messages[].content[].cache_control",
    ),
    (TEXT, {"user": "u", "cache_prompt": True}, "user, cache_prompt"),
    (RESPONSES, {"truncation": "auto"}, "truncation"),
    (RESPONSES, {"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    (RESPONSES, {"input": [{**USER[0], "phase": "commentary"}]}, "input[].phase"),
    (MESSAGES, {"metadata": {"user_id": "u"}, "service_tier": "auto", "mcp_servers": []}, None),
    (
        MESSAGES,
        {"system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
        "system[].cache_control",
    ),
    (MESSAGES, {"thinking": {"type": "disabled", "block_binding": "x"}}, "thinking.block_binding"),
]


@pytest.mark.parametrize(("path", "extra", "ignored"), ACCEPTED)
def test_without_effect(http, path, extra, ignored):
    plain, answer = http.post(path, json=GOOD[path]), http.post(path, json=GOOD[path] | extra)
    assert answer.status_code == 200, answer.text
    assert told(plain) == (None, None)
    assert told(answer) == (ignored or ", ".join(extra), None)


@pytest.mark.parametrize("path", GOOD)
def test_null_asks_for_nothing(http, path):
    names = [*fields_of(BODIES[path]), *rules_of(BODIES[path]), "temprature", "shoe_size"]
    answer = http.post(path, json=dict.fromkeys(names) | GOOD[path])
    assert answer.status_code == 200, answer.text
    assert told(answer) == (None, None)


REFUSED = [
    (
        CHAT,
        {"web_search_options": {"search_context_size": "low"}},
        "web_search_options",
        "function of your own",
    ),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities", "text alone"),
    (CHAT, {"typical_p": 0.5}, "typical_p", "top_p"),
    (CHAT, {"allowed_token_ids": [1]}, "allowed_token_ids", "response_format"),
    (CHAT, {"samplers": ["top_k", "temperature"]}, "samplers", "penalties, temperature, top_k, top_p, min_p"),
    (RESPONSES, {"guided_json": {"type": "object"}}, "guided_json", "response_format"),
    (MESSAGES, {"n_predict": 5}, "n_predict", "max_tokens"),
    (CHAT, {"max_output_tokens": 5}, "max_output_tokens", "max_completion_tokens"),
    (CHAT, {"messages": [{**USER[0], "audio": {"id": "x"}}]}, "messages[0].audio", "text"),
    (TEXT, {"suffix": "x"}, "suffix", "trained to fill gaps"),
    (TEXT, {"messages": USER}, "messages", CHAT),
    (RESPONSES, {"background": True}, "background", "stream"),
    (MESSAGES, {"stop": ["x"]}, "stop", "stop_sequences"),
    (MESSAGES, {"thread": {"type": "create"}}, "thread", "all messages"),
    (MESSAGES, {"container": "c"}, "container", "tools of your own"),
]


@pytest.mark.parametrize(("path", "extra", "param", "fix"), REFUSED)
def test_would_change_the_answer(http, path, extra, param, fix):
    error = refused(http.post(path, json=GOOD[path] | extra))
    assert error["message"].startswith(f"{param}: ") and fix in error["message"]
    if path != MESSAGES and param != "suffix":
        assert (error["param"], error["code"]) == (param, "unsupported_parameter")


MISSPELT = [
    (CHAT, "temprature", "temperature"),
    (CHAT, "max_token", "max_tokens"),
    (CHAT, "maxTokens", "max_tokens"),
    (CHAT, "max-tokens", "max_tokens"),
    (CHAT, "topP", "top_p"),
    (CHAT, "tool", "tools"),
    (CHAT, "stops", "stop"),
    (CHAT, "reponse_fromat", "response_format"),
    (CHAT, "frequncy_penalty", "frequency_penalty"),
    (TEXT, "promt", "prompt"),
    (RESPONSES, "instuctions", "instructions"),
    (MESSAGES, "stop_sequence", "stop_sequences"),
    (MESSAGES, "thinkng", "thinking"),
]


@pytest.mark.parametrize(("path", "name", "meant"), MISSPELT)
def test_misspelt(http, path, name, meant):
    error = refused(http.post(path, json=GOOD[path] | {name: 1}))
    assert error["message"] == f"{name}: is not known; did you mean {meant}?"


def test_misspelt_inside(http):
    error = refused(http.post(CHAT, json={"messages": [{**USER[0], "contnt": "x"}]}))
    assert error["param"] == "messages[0].contnt"
    error = refused(http.post(CHAT, json=GOOD[CHAT] | {"speculative": {"k": 3}}))
    assert error["param"] == "speculative.k"
    error = refused(http.post(CHAT, json=GOOD[CHAT] | {"response_format": {"type": "text", "colour": 1}}))
    assert error["param"] == "response_format.colour"


def test_a_client_s_own_values_are_not_looked_into():
    """A schema's properties may be called anything."""
    schema = {"type": "object", "properties": {"temprature": {"type": "string"}}, "max_token": 1, "x": None}
    body = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    clean = sift({"messages": USER, "response_format": body}, ChatRequest)
    assert clean.body["response_format"]["json_schema"]["schema"] == schema
    assert not clean.unknown.places


OTHERS = ("top_n", "min_k", "seeds_used", "user_name", "toolbox", "temperature_range", "logit", "input_text")


@pytest.mark.parametrize("path", BODIES)
def test_another_s_field_is_no_misspelling(path):
    """Whatever name any dialect knows is not taken for a slip in another, unless it says the same."""
    schema = BODIES[path]
    known = {name for body in BODIES.values() for name in (*fields_of(body), *rules_of(body))}
    strangers = [
        one for one in (*sorted(known), *OTHERS) if one not in {*fields_of(schema), *rules_of(schema)}
    ]
    wrong = {one: near for one in strangers if (near := nearest(one, candidates_of(schema))) is not None}
    assert not wrong


def test_unknown_fields_are_named(http):
    answer = http.post(CHAT, json=GOOD[CHAT] | {"shoe_size": 44, "größe": 1, 'a\r\nset-cookie: "x", y': 2})
    assert answer.status_code == 200
    assert told(answer) == (None, "shoe_size, gr%C3%B6%C3%9Fe, a%0D%0Aset-cookie%3A%20%22x%22%2C%20y")
    assert "set-cookie" not in answer.headers
    streamed = http.post(MESSAGES, json=GOOD[MESSAGES] | {"stream": True, "shoe_size": 44})
    assert streamed.status_code == 200 and told(streamed) == (None, "shoe_size")


def test_an_error_tells_of_them_too(http):
    answer = http.post(CHAT, json=GOOD[CHAT] | {"shoe_size": 44, "model": "nobody"})
    assert answer.status_code == 404 and told(answer) == (None, "shoe_size")


def test_strict_fields():
    with scripted(strict_fields=True) as server, server.client() as http:
        error = refused(http.post(CHAT, json=GOOD[CHAT] | {"shoe_size": 44}))
        assert (error["param"], error["code"]) == ("shoe_size", "unknown_parameter")
        error = refused(http.post(CHAT, json={"messages": [{**USER[0], "mood": "good"}]}))
        assert error["param"] == "messages[0].mood"
        assert http.post(CHAT, json=GOOD[CHAT] | {"store": True, "shoe_size": None}).status_code == 200


class TestHostile:
    def test_very_many_unknown_fields(self, running):
        body = {f"field_{number:06}": 1 for number in range(MAX_FIELDS - 10)} | GOOD[CHAT]
        with running.client() as http:
            started = time.perf_counter()
            answer = http.post(CHAT, content=json.dumps(body))
            assert answer.status_code == 200 and time.perf_counter() - started < 30
            header = answer.headers["x-headlong-unknown"]
            assert len(header) < MAX_HEADER_CHARS + 30 and header.endswith(
                f"and {MAX_FIELDS - 10 - MAX_NOTED} more"
            )
            body |= {f"more_{number}": 1 for number in range(10)}
            assert "has 10" in refused(http.post(CHAT, content=json.dumps(body)))["message"]

    def test_long_names(self, http):
        answer = http.post(CHAT, json=GOOD[CHAT] | {f"{number}" + "💥" * 9000: 1 for number in range(40)})
        assert answer.status_code == 200 and len(answer.headers["x-headlong-unknown"]) < MAX_HEADER_CHARS + 30

    def test_very_many_objects(self, http):
        body = '{"messages": [' + ",".join(["{}"] * 2_000_000) + "]}"
        assert "more than" in refused(http.post(CHAT, content=body))["message"]

    def test_deep_and_wrong_types(self, http):
        for value in (7, "x", [[[]]], {"type": [{"role": {}}]}, [None], [[None]]):
            for name in ("messages", "tools", "speculative", "response_format"):
                assert http.post(CHAT, json=GOOD[CHAT] | {name: value}).status_code == 400


@pytest.fixture
def written(loggers_as_before):  # noqa: ARG001
    """What the server logs, line by line."""
    stream = io.StringIO()
    logs.setup(format="json", stream=stream)
    return lambda: [json.loads(line) for line in stream.getvalue().splitlines()]


class TestLog:
    def test_once_for_each_client(self, written):
        with scripted() as server, server.client(headers={"user-agent": "one"}) as http:
            for _ in range(3):
                http.post(CHAT, json=GOOD[CHAT] | {"store": True, "shoe_size": 1})
            http.post(CHAT, json=GOOD[CHAT] | {"store": True, "seed": 1, "user": "u"})
            http.post(CHAT, json=GOOD[CHAT] | {"store": True}, headers={"user-agent": "two"})
        lines = [line for line in written() if line["message"] == "fields left out"]
        assert [(line["agent"], line.get("ignored"), line.get("unknown")) for line in lines] == [
            ("one", ["store"], ["shoe_size"]),
            ("one", ["user"], None),
            ("two", ["store"], None),
        ]
        assert all(line["client"] == "127.0.0.1" and line["level"] == "info" for line in lines)

    def test_clients_are_forgotten(self):
        with scripted() as server, server.client() as http:
            for number in range(3):
                http.post(CHAT, json=GOOD[CHAT] | {"store": True}, headers={"user-agent": str(number)})
            left_out = server.server.left_out
            assert len(left_out._told) == 3 <= MAX_CLIENTS

    def test_every_refusal_has_its_reason(self, written):
        secret = "the treasure is under the oak"
        bodies = [
            json.dumps(GOOD[CHAT] | {"temprature": 1}),
            json.dumps({"messages": secret}),
            '{"messages": ',
            json.dumps(GOOD[CHAT] | {"audio": {"voice": "ash"}}),
            json.dumps(GOOD[CHAT] | {"response_format": {"type": "json_schema"}}),
            json.dumps(
                GOOD[CHAT] | {"x" * 5000: 1, "messages": [{"role": "user", "content": "a b " * 5000}]}
            ),
        ]
        with scripted() as server, server.client() as http:
            for body in bodies:
                assert http.post(CHAT, content=body).status_code == 400
        lines = [line for line in written() if line.get("status") == 400]
        begins = [
            "temprature: is not known",
            "messages: ",
            "the body is not",
            "audio: ",
            "response_format",
            "prompt",
        ]
        assert len(lines) == len(begins)
        for line, begin in zip(lines, begins, strict=True):
            assert line["error"].startswith(begin) and len(line["error"]) <= 500
        assert secret not in json.dumps(lines)


def test_counting_takes_what_generating_takes(http):
    body = GOOD[MESSAGES] | {"stream": True, "temperature": 0.5, "metadata": {"user_id": "u"}, "n": 1}
    answer = http.post("/v1/messages/count_tokens", json=body)
    assert answer.status_code == 200, answer.text
    assert told(answer) == ("max_tokens, stream, temperature, metadata", "n")
    assert set(MessagesRequest.model_fields) <= {
        *rules_of(CountTokensRequest),
        *fields_of(CountTokensRequest),
    }


def test_the_page_in_the_docs_is_the_code_s():
    page = (Path(__file__).parents[2] / "docs" / "fields.md").read_text(encoding="utf-8")
    assert page == fields_table.page(), "run `python -m headlong.cli.fields_table`"


@pytest.mark.parametrize("schema", [*fields_table.BODIES.values(), Options])
def test_a_rule_does_not_hide_a_field(schema):
    """What a schema honours it honours, whatever its tables say; and both kinds of rule say why."""
    assert not set(fields_of(schema)) & set(rules_of(schema))
    assert all(len(rule.why) > 5 and not rule.why.endswith(".") for rule in rules_of(schema).values())
