"""Coming, waiting, leaving: disconnects, full queues, time limits, draining. Each test has a server of its own."""

import json
import socket
import threading
import time

import pytest

from support.serving import RunningServer

LONG = {"messages": [{"role": "user", "content": "Tell me a story."}], "ignore_eos": True, "max_tokens": 3000}
SHORT = {"messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True, "max_tokens": 4}


def wait_until(condition, what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"did not happen in {seconds} s: {what}"
        time.sleep(0.01)


def usage(running: RunningServer):
    return running.server.pool.current.client.stats().usage


def is_idle(running: RunningServer) -> bool:
    now = usage(running)
    return (now.running, now.waiting, now.pages_used, now.slots_used) == (0, 0, 0, 0)


class Background:
    """Requests that run in threads until they are closed."""

    def __init__(self, running: RunningServer, count: int, body: dict) -> None:
        self.running = running
        self.results: list = []
        self._threads = [threading.Thread(target=self._ask, args=(body,), daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _ask(self, body: dict) -> None:
        with self.running.client() as http:
            self.results.append(http.post("/v1/chat/completions", json=body))

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def running():
    with RunningServer(max_rows=2, max_queue=1) as server:
        yield server


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages(running, stream):
    payload = json.dumps(LONG | {"stream": stream}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(payload)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", running.port)) as raw:
        raw.sendall(head.encode() + payload)
        if stream:
            assert b"200 OK" in raw.recv(4096)
        wait_until(lambda: usage(running).running == 1, "the row runs")
    wait_until(lambda: is_idle(running), "the row is gone")
    wait_until(lambda: running.server.observer.history[0]["finish_reason"] == "cancelled", "recorded")
    assert running.server.observer.history[0]["prompt_tokens"] > 0, "it was read all the same"
    running.engine.check_integrity()


def test_a_full_queue_says_when_to_come_back(running):
    waiting = Background(running, 3, LONG | {"max_tokens": 600})
    wait_until(lambda: sum((usage(running).running, usage(running).waiting)) == 3, "two run and one waits")
    with running.client() as http:
        refused = http.post("/v1/chat/completions", json=SHORT)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        too_many = http.post("/v1/chat/completions", json=SHORT | {"n": 4})
        assert too_many.status_code == 400 and too_many.json()["error"]["param"] == "n"
    waiting.join()
    assert [answer.status_code for answer in waiting.results] == [200] * 3
    with running.client() as http:
        assert http.post("/v1/chat/completions", json=SHORT).status_code == 200
    assert is_idle(running)


def test_a_request_has_a_time_limit():
    with RunningServer(request_timeout=0.3) as running, running.client() as http:
        late = http.post("/v1/chat/completions", json=LONG)
        assert late.status_code == 504 and late.json()["error"]["code"] == "request_timeout"
        with http.stream("POST", "/v1/chat/completions", json=LONG | {"stream": True}) as answer:
            assert answer.status_code == 200
            events = [line for line in answer.iter_lines() if line.startswith("data: ")]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2][6:])["error"]["code"] == "request_timeout"
        wait_until(lambda: is_idle(running), "the rows are gone")


def test_draining_finishes_what_runs_and_takes_nothing_new():
    with RunningServer() as running:
        busy = Background(running, 1, LONG | {"max_tokens": 400})
        wait_until(lambda: usage(running).running == 1, "the row runs")
        running.server.limit.draining = True
        with running.client() as http:
            assert http.post("/v1/chat/completions", json=SHORT).status_code == 503
            assert http.get("/health").json() == {"status": "draining"}
        busy.join()
        assert busy.results[0].status_code == 200
        assert busy.results[0].json()["usage"]["completion_tokens"] == 400


def test_a_slow_reader_does_not_hold_the_others():
    with RunningServer(max_rows=2) as running:
        payload = json.dumps(LONG | {"stream": True, "speculative": {"trace": True}}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(payload)}\r\n\r\n"
        )
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.connect(("127.0.0.1", running.port))
            raw.sendall(head.encode() + payload)
            wait_until(lambda: usage(running).running == 1, "the row runs")
            with running.client() as http:
                for _ in range(3):
                    assert http.post("/v1/chat/completions", json=SHORT).status_code == 200
        wait_until(lambda: is_idle(running), "the slow reader's row is gone")
        running.engine.check_integrity()


def test_small_writes_leave_at_once(running):
    """A stream's chunks are small; held back for an acknowledgement, each kept connection would stall."""
    with running.client() as http:
        assert http.get("/health").status_code == 200
        (connection,) = running.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
