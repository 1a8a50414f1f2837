"""Faults as clients and those who watch the server see them: one request fails, an engine that begins anew, an engine
that stays down."""

import json

import pytest

from headlong.engine.faults import MAX_IN_A_ROW
from headlong.engine.loop import MAX_RESTARTS
from headlong.engine.row import FAULT
from support.serving import RunningServer

BODY = {
    "messages": [{"role": "user", "content": "Hi"}],
    "ignore_eos": True,
    "max_tokens": 8,
    "temperature": 0,
}
MARKED = {"role": "user", "content": "This one breaks the kernel, I am afraid."}


@pytest.fixture
def running():
    with RunningServer(max_rows=4) as server:
        yield server


def break_when(running: RunningServer, broken) -> list[int]:
    """The model's pass raises where `broken(batch)`; gives a list that grows with every fault."""
    real, raised = running.engine.runner.forward, []

    def forward(batch, context):
        if broken(batch):
            raised.append(len(raised))
            raise RuntimeError("an illegal memory access was encountered")
        return real(batch, context)

    running.engine.runner.forward = forward
    return raised


def count_restarts(running: RunningServer) -> list[int]:
    """A list that grows each time the engine begins anew."""
    real, restarts = running.engine.restart, []

    def restart():
        restarts.append(len(restarts))
        real()

    running.engine.restart = restart
    return restarts


def test_a_fault_is_told_to_the_request_that_has_it(running):
    with running.client() as http:
        good = http.post("/v1/chat/completions", json=BODY).json()["choices"][0]["message"]["content"]
        long = BODY | {"messages": [MARKED]}
        length = http.post("/v1/chat/completions", json=long | {"max_tokens": 1}).json()["usage"][
            "prompt_tokens"
        ]
        raised = break_when(running, lambda batch: length in batch.rows.query_lens)

        answer = http.post("/v1/chat/completions", json=long | {"seed": 1})
        assert answer.status_code == 500
        error = answer.json()["error"]
        assert error["type"] == "server_error" and error["code"] == "engine_fault"
        assert error["message"] == f"{FAULT}: RuntimeError: an illegal memory access was encountered"
        assert 1 < len(raised) <= 5

        with http.stream("POST", "/v1/chat/completions", json=long | {"stream": True, "seed": 2}) as stream:
            events = [line[6:] for line in stream.iter_lines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]" and json.loads(events[-2])["error"]["code"] == "engine_fault"

        again = http.post("/v1/chat/completions", json=BODY)
        assert again.json()["choices"][0]["message"]["content"] == good
        assert http.get("/health").json()["status"] == "ok"
    running.engine.check_integrity()


def test_an_engine_begins_anew_a_few_times_and_then_stays_down(running):
    with running.client() as http:
        good = http.post("/v1/chat/completions", json=BODY).json()["choices"][0]["message"]["content"]
        raised, restarts = break_when(running, lambda _: True), count_restarts(running)
        for _ in range(MAX_IN_A_ROW * (MAX_RESTARTS + 1)):
            if http.get("/health").status_code != 200:
                break
            # The first to fail alone is told so; once nothing else works either, everybody is.
            assert http.post("/v1/chat/completions", json=BODY | {"n": 3}).status_code in (500, 503)
            assert 0 < len(raised) <= (MAX_IN_A_ROW + 1) * (len(restarts) + 1), "faults in a row are bounded"
            assert len(restarts) <= MAX_RESTARTS
        assert len(restarts) == MAX_RESTARTS

        health = http.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "error"
        assert "an illegal memory access" in health.json()["reason"]
        assert f"{MAX_RESTARTS} restarts" in health.json()["reason"]
        refused = http.post("/v1/chat/completions", json=BODY)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_unavailable"
        assert int(refused.headers["retry-after"]) > 0

        assert http.post("/v1/model/load", json={"model_name": "tale-20m"}).status_code == 200
        assert http.get("/health").json()["status"] == "ok", "loaded again, it is well"
        mended = http.post("/v1/chat/completions", json=BODY).json()
        assert mended["choices"][0]["message"]["content"] == good


def test_an_engine_that_begins_anew_serves_the_same(running):
    with running.client() as http:
        good = http.post("/v1/chat/completions", json=BODY).json()["choices"][0]["message"]["content"]
        real = running.engine.runner.forward
        break_when(running, lambda _: True)
        while http.post("/v1/chat/completions", json=BODY).status_code != 503:
            pass
        running.engine.runner.forward = real
        mended = http.post("/v1/chat/completions", json=BODY)
        assert mended.json()["choices"][0]["message"]["content"] == good
        assert http.get("/health").status_code == 200
    running.engine.check_integrity()
