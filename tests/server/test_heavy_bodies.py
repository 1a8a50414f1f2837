"""Bodies below the limit that cost far more to read than to send: refused soon, and nobody else waits for them."""

import http.client
import json
import os
import resource
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import get_args, get_origin

import pytest

from headlong.checkpoint.source import EMBEDDED
from headlong.errors import RequestError
from headlong.server import body as body_module
from headlong.server.app import ENDPOINTS
from headlong.server.schemas.base import Strict
from headlong.server.sifting import most_of
from headlong.server.weighing import MAX_COST, cost
from headlong.text.tokenizer import MANY_CHARS, Tokenizer
from support.heavy_bodies import AT_THE_BOUNDS, CHAT, GOOD, LISTS, SLOW_GRAMMARS, TEXTS, USER
from support.heavy_work import ANSWERS, STRINGS
from support.serving import RunningServer

HEAVY = LISTS | TEXTS


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer.from_folder(Path(EMBEDDED))
    assert found is not None
    return found


@contextmanager
def ticking():
    """The longest time, in seconds, for which another thread of this process stood still."""
    longest, stop = [0.0], threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not stop.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            longest[0], last = max(longest[0], now - last), now

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        yield longest
    finally:
        stop.set()
        thread.join()


class TestTokenizing:
    def test_other_threads_run_meanwhile(self, tokenizer):
        text = "hello, world. " * 60_000
        with ticking() as longest:
            started = time.perf_counter()
            tokens = tokenizer.encode(text)
            seconds = time.perf_counter() - started
        assert len(tokens) > 100_000 and seconds > 0.1
        assert longest[0] < seconds / 2, "encoding keeps the interpreter's lock"
        with ticking() as longest:
            started = time.perf_counter()
            assert tokenizer.decode(tokens * 2).startswith("hello, world.")
            seconds = time.perf_counter() - started
        assert longest[0] < seconds / 2, "decoding keeps the interpreter's lock"

    @pytest.mark.parametrize("piece", ["a", "hello, world. ", "é", "\n ", "💥", "<|im_end|>"])
    def test_a_bound_refuses_what_has_more_tokens_and_nothing_else(self, tokenizer, piece):
        for text in (piece * 40, piece * 3000, "x" + piece * 20_000):
            tokens = tokenizer.encode(text)
            assert tokenizer.encode(text, most=len(tokens)) == tokens
            with pytest.raises(RequestError, match=f"more than {len(tokens) - 1} tokens"):
                tokenizer.encode(text, most=len(tokens) - 1)

    def test_a_text_far_too_long_is_not_read_to_its_end(self, tokenizer, monkeypatch):
        read = []
        encoding = tokenizer._encoding
        monkeypatch.setattr(
            tokenizer, "_encoding", lambda text, special: read.append(len(text)) or encoding(text, special)
        )
        with pytest.raises(RequestError, match="more than 1000 tokens"):
            tokenizer.encode("hello " * 1_000_000, most=1000)
        assert sum(read) < 1000 * MANY_CHARS * 20


class TestWeighing:
    def test_marks_in_strings_cost_nothing(self):
        assert cost(json.dumps({"text": "[{,:" * 100_000}).encode()) < 40
        assert cost(json.dumps({"text": '\\",[{:' * 100_000}).encode()) < 40
        assert cost(('{"text":"' + "é💥\\u0022,\\\\" * 100_000 + '"}').encode()) < 40

    @pytest.mark.parametrize("size", [10, 5000, 200_000])
    def test_values_are_counted_wherever_slices_end(self, size):
        items = [("a,[" * (number % 7), number) for number in range(size)]
        text = json.dumps([{key: value} for key, value in items]).encode()
        assert cost(text) == 26 * size + 2 if size < 40_000 else cost(text) > MAX_COST
        assert cost(b"[" + b"1," * size + b"1]") == size + 3

    def test_a_million_ids_are_read_and_two_are_not(self):
        assert cost(json.dumps({"prompt": list(range(1 << 20))}).encode()) <= MAX_COST
        assert cost(json.dumps({"prompt": list(range(1 << 21))}).encode()) > MAX_COST


def schemas_of(annotation: object, found: dict[type[Strict], None]) -> None:
    """Adds the schemas inside of a type."""
    if isinstance(annotation, type) and issubclass(annotation, Strict) and annotation not in found:
        found[annotation] = None
        for info in annotation.model_fields.values():
            schemas_of(info.annotation, found)
    for one in get_args(annotation):
        if not isinstance(one, str):
            schemas_of(one, found)


def lists_of(annotation: object) -> bool:
    """Whether a value of this type may be a list, or an object whose values are of one kind."""
    if get_origin(annotation) is list:
        return True
    if get_origin(annotation) is dict:
        return "Any" not in str(get_args(annotation)[1])
    return any(lists_of(one) for one in get_args(annotation))


def test_every_list_of_every_body_has_a_bound():
    found: dict[type[Strict], None] = {}
    for endpoint in ENDPOINTS:
        schemas_of(endpoint.body, found)
    assert len(found) > 30
    unbounded = [
        f"{schema.__name__}.{name}"
        for schema in found
        for name, info in schema.model_fields.items()
        if lists_of(info.annotation)
        and str(getattr(info.validation_alias, "choices", [info.validation_alias or name])[0])
        not in most_of(schema)
    ]
    assert unbounded == []


@pytest.fixture(scope="module")
def running():
    with RunningServer() as server:
        yield server
        with server.client() as http:
            assert http.post(CHAT, content=f"{{{GOOD}}}").status_code == 200
        server.engine.check_integrity()


def test_the_work_happens_off_the_event_loop(running, monkeypatch):
    """Reading a large body, and all tokenizing, belong in other threads."""
    loop = running.server_thread
    where: dict[str, set[str]] = {"read": set(), "encode": set()}

    def spy(name, function):
        def spying(*args, **kwargs):
            where[name].add(threading.current_thread().name)
            return function(*args, **kwargs)

        return spying

    monkeypatch.setattr(body_module, "_read", spy("read", body_module._read))
    monkeypatch.setattr(Tokenizer, "_encoding", spy("encode", Tokenizer._encoding))
    with running.client() as http:
        for path, make in TEXTS.values():
            assert http.post(path, content=make(100_000)).status_code == 400
        for path, make in (LISTS["parts"], LISTS["banned tokens"]):
            assert http.post(path, content=make()).status_code == 400
    assert where["encode"] and loop not in where["encode"]
    where["read"].clear()
    with running.client() as http:
        text = json.dumps({"messages": [{"role": "user", "content": "a" * 40_000}]})
        assert http.post(CHAT, content=text).status_code == 400
    assert where["read"] and loop not in where["read"]


@pytest.mark.parametrize("name", ["banned tokens", "parts", "unknown keys", "ids", "letters to /tokenize"])
def test_heavy_bodies_are_refused_in_a_sentence(running, name):
    path, make = HEAVY[name]
    body = make()
    with running.client() as http:
        started = time.perf_counter()
        answer = http.post(path, content=body)
        assert time.perf_counter() - started < 10
    assert answer.status_code == 400 and len(answer.content) < 1000
    assert len(answer.json()["error"]["message"]) > 10


def test_the_first_fault_is_told_without_the_others(running):
    """A list of faults is not looked through to its end, and what is repeated of it is short."""
    with running.client() as http:
        many = json.dumps({"messages": json.loads(f"[{USER}]"), "bad_token_ids": [-1] * 60_000})
        error = http.post(CHAT, content=many).json()["error"]
        assert error["param"] == "bad_token_ids[0]"
        long = json.dumps({"messages": json.loads(f"[{USER}]"), "seed": [[["x" * 5000] * 50] * 50]})
        assert len(http.post(CHAT, content=long).content) < 1000


def attack(port: int, path: str, body: str) -> tuple[int, float]:
    """The status and the seconds until it came, asked by another process so that this one's threads go on."""
    script = (
        "import http.client,sys,time\n"
        "body=sys.stdin.buffer.read(); c=http.client.HTTPConnection('127.0.0.1',int(sys.argv[1]),timeout=60)\n"
        "t=time.perf_counter(); c.request('POST',sys.argv[2],body); r=c.getresponse(); r.read()\n"
        "print(r.status,time.perf_counter()-t)"
    )
    command = [sys.executable, "-c", script, str(port), path]
    done = subprocess.run(
        command, input=body.encode(), capture_output=True, timeout=120, check=True, env=os.environ
    )
    status, seconds = done.stdout.split()
    return int(status), float(seconds)


class Heart:
    """Asks `/health` a hundred times a second on one connection, and has a story streamed on another. `longest` is the
    longest wait for either since it was reset; `beats` counts the pieces of the stories."""

    def __init__(self, port: int) -> None:
        self._port, self._stop, self.longest, self.beats = port, threading.Event(), 0.0, 0
        self._threads = [threading.Thread(target=self._ask), threading.Thread(target=self._listen)]

    def __enter__(self) -> "Heart":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        while not self._stop.is_set():
            started = time.perf_counter()
            connection.request("GET", "/health")
            assert connection.getresponse().read()
            self.longest = max(self.longest, time.perf_counter() - started)
            time.sleep(0.01)

    def _listen(self) -> None:
        """Between stories nothing is measured."""
        story = {"messages": [{"role": "user", "content": "Tell me a long story."}], "max_tokens": 1500}
        body = json.dumps(story | {"ignore_eos": True, "stream": True, "speculative": {"mtp": "off"}})
        while not self._stop.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
            connection.request("POST", CHAT, body)
            answer, last = connection.getresponse(), None
            while not self._stop.is_set() and (line := answer.readline()):
                assert b'"error"' not in line, line
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    self.longest = max(self.longest, now - (last or now))
                    self.beats, last = self.beats + 1, now
            connection.close()


@pytest.mark.slow
@pytest.mark.serial
def test_no_body_stops_the_others(tmp_path):
    """Each is answered within seconds and a few hundred MB, and neither `/health` nor another's stream ever waits for
    longer than a tenth of a second."""
    log = (tmp_path / "log").open("w")
    script = "from headlong.cli.main import main; main()"
    server = subprocess.Popen(
        [sys.executable, "-c", script, "serve", EMBEDDED.as_posix(), "--port", "0"],
        stdout=log,
        stderr=log,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30)),
    )
    try:
        port = port_of(tmp_path / "log")
        attack(port, CHAT, f"{{{GOOD}}}")
        base = peak_mb(server.pid)
        slow = {}
        with Heart(port) as heart:
            for name, (path, make) in (HEAVY | AT_THE_BOUNDS | STRINGS | SLOW_GRAMMARS | ANSWERS).items():
                body = make()
                served = (200, 400, 503) if name in SLOW_GRAMMARS | ANSWERS else (400, 404, 413, 422)
                for _ in range(3):  # whatever else this machine does may take its time too
                    heart.longest, heart.beats = 0.0, 0
                    status, seconds = attack(port, path, body)
                    assert status in served, (name, status)
                    assert seconds < 1 or heart.beats, f"{name}: the stream stood still"
                    pause = 1000 * heart.longest
                    if pause < 100:
                        break
                slow[name] = round(pause), round(seconds, 2), round(peak_mb(server.pid) - base)
        print(slow)
        assert {name: one for name, one in slow.items() if one[0] > 100} == {}
        assert {
            name: one for name, one in slow.items() if one[1] > 10 and name not in SLOW_GRAMMARS | ANSWERS
        } == {}
        assert peak_mb(server.pid) - base < 600
    finally:
        server.terminate()
        server.wait(30)
        log.close()


def port_of(log: Path) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        text = log.read_text()
        if "http://127.0.0.1:" in text:
            return int(text.split("http://127.0.0.1:")[1].split("/")[0].split()[0])
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def peak_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
