"""What Claude Code sends: its own request, replayed on the real engine. `make clients` runs the program itself."""

import json
from pathlib import Path

import pytest

from headlong.checkpoint.source import EMBEDDED
from support.serving import RunningServer, model_with_template

RECORDED = Path(__file__).parents[1] / "data" / "clients" / "claude-code" / "messages.json"
LIMIT = {"seed": 3, "max_tokens": 8}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The embedded weights with a longer context: the schemas of its tools alone are twice the usual one."""
    template = (Path(EMBEDDED) / "chat_template.jinja").read_text()
    folder = model_with_template(tmp_path_factory.mktemp("models") / "tale-20m", template)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16384}))
    with RunningServer(model=str(folder), max_rows=1) as running:
        yield running


@pytest.fixture(scope="module")
def body():
    """As it was recorded (claude-code 2.1.197, `claude -p`, after a tool's result), but for its words."""
    return json.loads(RECORDED.read_text())


def test_its_request_is_answered(server, body):
    with (
        server.client() as http,
        http.stream("POST", "/v1/messages?beta=true", json=body | LIMIT) as told,
    ):
        text = told.read().decode()
        assert told.status_code == 200, text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"
    assert {"context_management", "metadata"} <= set(told.headers["x-headlong-ignored"].split(", "))
    assert "x-headlong-unknown" not in told.headers


def test_any_of_its_tools_can_be_called(server, body):
    """All of its schemas are enforced together."""
    with server.client() as http:
        told = http.post(
            "/v1/messages", json=body | LIMIT | {"stream": False, "tool_choice": {"type": "any"}}
        )
    assert told.status_code == 200, told.text


def test_counting_it(server, body):
    with server.client() as http:
        counted = http.post("/v1/messages/count_tokens", json=body)
        told = http.post("/v1/messages", json=body | LIMIT | {"stream": False})
    usage = told.json()["usage"]
    assert counted.json()["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
