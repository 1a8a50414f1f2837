"""The seam between server and engine: the server serves any `EngineClient`, and knows no engine behind it."""

import ast
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import headlong.server
from headlong import Grammar, SamplingParams
from headlong.config import EngineConfig
from headlong.engine.local import LocalEngine
from support.scripted import MAX_LEN, MAX_ROWS, ScriptedEngine, ScriptedEngines
from support.serving import RunningServer

ROOT = Path(headlong.server.__file__).parent
ANSWER = "Once upon a time there was a shy dragon who lived in a cave by the sea"
HELLO = [{"role": "user", "content": "Hello!"}]
INTERNALS = {"service", "engine", "scheduler", "state", "faults", "runner", "proposer", "sampler"}
"""Attributes of an engine that only an engine's own code has a use for."""
STATEFUL = {"app", "request", "_request", "self", "replica"}
"""Whose `state` is no engine's: Starlette's, which applications and requests carry along, and a replica's own word."""


def files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def internals_touched(tree: ast.AST) -> list[str]:
    """Attributes in `tree` that lead into an engine."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or node.attr not in INTERNALS:
            continue
        owner = node.value
        name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        if node.attr != "state" or name not in STATEFUL:
            found.append(ast.unparse(node))
    return found


def engine_modules(tree: ast.AST) -> set[str]:
    """What `tree` imports of the engine and of the front ends that hold one."""
    names = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    whole = ("headlong.engine", "headlong.llm", "headlong.async_llm", "headlong.state", "headlong.speculate")
    return {name for name in names if name.startswith(whole)}


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_server_knows_the_protocol_alone(path):
    tree = ast.parse(path.read_text())
    assert internals_touched(tree) == []
    assert engine_modules(tree) <= {"headlong.engine.client"}


@pytest.mark.parametrize(
    "code", ["model.llm.service", "one.client.engine.max_len", "x.scheduler", "client.state.pages"]
)
def test_what_is_forbidden_is_seen(code):
    assert internals_touched(ast.parse(code))


def test_forbidden_imports_are_seen():
    tree = ast.parse("from headlong.engine.row import FAULT\nfrom headlong.engine.client import Usage")
    assert engine_modules(tree) == {"headlong.engine.row", "headlong.engine.client"}


@pytest.fixture
def engine():
    return ScriptedEngine(ANSWER)


@pytest.fixture
def running(engine):
    with RunningServer(loader=ScriptedEngines(engine), max_queue=2) as server:
        yield server


def test_chat_whole_and_streamed(running, engine):
    body = {"messages": HELLO, "max_tokens": 9, "n": 2, "seed": 5}
    with running.client() as http:
        whole = http.post("/v1/chat/completions", json=body).json()
        lines = http.post("/v1/chat/completions", json=body | {"stream": True}).text
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert texts[0] == texts[1] and ANSWER.startswith(texts[0].strip()) and len(texts[0]) > 10
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 18
    assert whole["metrics"]["speculative_decoding"]["draft_acceptance_rate"] == 1.0
    assert lines.endswith("data: [DONE]\n\n")
    first = engine.seen[0]
    assert first.params.temperature == 0.25, "what the engine recommends"
    assert first.params.max_tokens == 9 and first.seed == 5
    assert [request.choice for request in engine.seen] == [0, 1, 0, 1]
    assert not engine.open


def test_the_other_dialects(running):
    with running.client() as http:
        message = http.post("/v1/messages", json={"messages": HELLO, "max_tokens": 64, "model": "tale-20m"})
        response = http.post("/v1/responses", json={"input": "Hello!"})
        completion = http.post("/v1/completions", json={"prompt": ["Once", "Twice"], "max_tokens": 64})
        count = http.post("/v1/messages/count_tokens", json={"messages": HELLO, "model": "tale-20m"})
    assert message.json()["content"][0]["text"].strip() == ANSWER
    assert response.json()["output"][0]["content"][0]["text"].strip() == ANSWER
    assert [choice["text"].strip() for choice in completion.json()["choices"]] == [ANSWER, ANSWER]
    assert count.json()["input_tokens"] > 1


def test_description_and_statistics(running):
    with running.client() as http:
        http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 8})
        (card,) = http.get("/v1/models").json()["data"][:1]
        stats = http.get("/v1/stats").json()
        metrics = http.get("/metrics").text
    assert card["max_model_len"] == MAX_LEN
    assert card["headlong"]["max_rows"] == MAX_ROWS and card["headlong"]["device"] == "nowhere"
    assert card["headlong"]["mtp"]["default_k"] == 3 and card["headlong"]["memory"]["total_bytes"] == 1111
    assert stats["plain_tokens_per_second"] == 100.0 and stats["totals"]["completion_tokens"] == 8
    assert 'headlong:generation_tokens_total{model_name="tale-20m"} 8.0' in metrics
    assert 'headlong:kv_cache_usage_perc{model_name="tale-20m"} 0.25' in metrics


def test_errors_of_the_engine(running, engine):
    with running.client() as http:
        long = http.post("/v1/completions", json={"prompt": [5] * MAX_LEN})
        assert long.status_code == 400 and long.json()["error"]["code"] == "context_length_exceeded"
        many = http.post("/v1/completions", json={"prompt": "Once", "n": MAX_ROWS + 3})
        assert many.status_code == 400 and many.json()["error"]["param"] == "n"
        engine.failure = "the engine stopped after an error"
        assert http.get("/health").status_code == 503
        down = http.post("/v1/completions", json={"prompt": "Once"})
        assert down.status_code == 503 and down.json()["error"]["code"] == "engine_unavailable"


def until(true: Callable[[], bool]) -> bool:
    """Waits for it, for a minute at most."""
    deadline = time.monotonic() + 60
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


def test_a_client_that_leaves_closes_its_stream():
    engine = ScriptedEngine(ANSWER, pause=600)
    with RunningServer(loader=ScriptedEngines(engine)) as running, running.client() as http:
        body = {"messages": HELLO, "stream": True}
        with http.stream("POST", "/v1/chat/completions", json=body) as stream:
            lines = stream.iter_lines()  # kept: the stream ends with it
            assert next(lines)
            assert until(lambda: bool(engine.open))
        assert until(lambda: not engine.open), "long before the first token"


def test_models_come_and_go():
    engines = [ScriptedEngine(ANSWER, drafting_refusal="there is no head"), ScriptedEngine("Another answer")]
    loader = ScriptedEngines(*engines)
    with RunningServer(loader=loader, draft_tokens=2) as running, running.client() as http:
        refused = http.post("/v1/completions", json={"prompt": "Once", "speculative": {"mtp": "on"}})
        assert refused.status_code == 400 and "there is no head" in refused.json()["error"]["message"]
        assert http.post("/v1/model/load", json={"model_name": "tale-20m", "max_rows": 3}).status_code == 200
        answer = http.post("/v1/completions", json={"prompt": "Once"}).json()["choices"][0]["text"]
        assert answer.strip() == "Another answer"
    assert all(engine.closed for engine in engines)
    assert loader.reclaimed == 2
    assert [(config.draft_tokens, config.max_rows) for _, config in loader.asked] == [(2, 16), (2, 3)]


def test_values_can_be_sent_to_another_process():
    """All that goes through the protocol, but for a compiled grammar: whoever steps the engine compiles it anew."""
    local = LocalEngine.load(None, EngineConfig(max_rows=1, cache_tokens=1024))
    params = SamplingParams(max_tokens=3, grammar=Grammar("regex", "a+"))
    requests = local.prepare([local.text.encode("Once")], params, "one")
    sent = [replace(request, constraint=None) for request in requests]
    for value in (sent, local.description, local.stats()):
        assert pickle.loads(pickle.dumps(value)) == value
