"""Tools of `/v1/responses` that are not functions, and what Codex sends: its own request, replayed over a socket."""

import json
from pathlib import Path

import openai
import pytest

CODEX = Path(__file__).parents[1] / "data" / "clients" / "codex" / "responses.json"
FUNCTION = {
    "type": "function",
    "name": "look",
    "parameters": {"type": "object", "properties": {"at": {"enum": ["sea", "sky"]}}, "required": ["at"]},
}
NAMESPACE = {"type": "namespace", "name": "eyes", "description": "To see with.", "tools": [FUNCTION]}
CUSTOM = {"type": "custom", "name": "patch", "description": "Takes a patch.", "format": {"type": "text"}}
GIVEN = {"model": "tale-20m", "input": "Look.", "max_output_tokens": 200, "parallel_tool_calls": False}
SEED = {"seed": 3}


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_a_namespace_is_offered_as_functions(client):
    called = client.responses.create(**GIVEN, tools=[NAMESPACE], tool_choice="required", extra_body=SEED)
    (call,) = called.output
    assert (call.type, call.name, call.namespace) == ("function_call", "look", "eyes")
    assert json.loads(call.arguments)["at"] in ("sea", "sky")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "It is blue."}
    texts = set()
    for before in (
        {"input": [{"role": "user", "content": "Look."}, call.to_dict(), result]},
        {"input": [result], "previous_response_id": called.id},
    ):
        answer = client.responses.create(
            **GIVEN | before, tools=[NAMESPACE], tool_choice="none", extra_body=SEED
        )
        assert answer.output_text
        texts.add(answer.output_text)
    assert len(texts) == 1, "going on by id is sending everything"


@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_tool_takes_text(client, stream):
    given = GIVEN | {"tools": [CUSTOM], "tool_choice": "required", "extra_body": SEED | {"temperature": 0.5}}
    if stream:
        events = list(client.responses.create(**given, stream=True))
        called = events[-1].response
        said = [event for event in events if event.type.startswith("response.custom_tool_call_input")]
        assert said[-1].input == "".join(event.delta for event in said[:-1]) == called.output[0].input
        assert not any("function_call" in event.type for event in events)
    else:
        called = client.responses.create(**given)
    (call,) = called.output
    assert (call.type, call.name) == ("custom_tool_call", "patch") and isinstance(call.input, str)
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    told = [{"role": "user", "content": "Look."}, call.to_dict(), result]
    after = client.responses.create(**GIVEN | {"input": told}, tools=[CUSTOM], tool_choice="none")
    assert after.output_text


def test_hosted_tools_are_left_out_and_named(client):
    raw = client.responses.with_raw_response.create(**GIVEN, tools=[FUNCTION, {"type": "web_search"}])
    assert "tools[web_search]" in raw.headers["x-headlong-ignored"]
    assert [tool.type for tool in raw.parse().tools] == ["function", "web_search"]


@pytest.mark.parametrize(
    ("tools", "told"),
    [
        ([{"type": "telepathy"}], "tools[0]"),
        ([NAMESPACE, {"type": "web_search"}, NAMESPACE], "tools[2].tools[0].name: 'eyes__look' is taken"),
        ([{"type": "web_search"}, FUNCTION | {"parameters": {"type": "string"}}], "tools[1].parameters.type"),
    ],
)
def test_refusals_name_the_place(client, tools, told):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**GIVEN, tools=tools, tool_choice="required")
    assert told in f"{caught.value.param} {caught.value}"


def test_codex(server):
    """Its request as it was recorded (codex-cli 0.169.0, `codex exec`), but for its words."""
    body = json.loads(CODEX.read_text())
    with (
        server.client() as http,
        http.stream("POST", "/v1/responses", json=body | SEED | {"max_output_tokens": 8}) as told,
    ):
        assert told.status_code == 200
        events = [json.loads(line[6:]) for line in told.iter_lines() if line.startswith("data: ")]
    assert events[0]["type"] == "response.created" and events[-1]["type"] == "response.incomplete"
    assert "tools[web_search]" in told.headers["x-headlong-ignored"]
    offered = [tool["type"] for tool in events[-1]["response"]["tools"]]
    assert offered.count("namespace") == 1 and offered.count("function") == 7
