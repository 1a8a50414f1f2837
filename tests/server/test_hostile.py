"""Input made to break things. No answer is a 500, every refusal is a sentence, and the server goes on serving."""

import json
import re
import socket
import threading
import time

import pytest

from headlong.server import compilers
from headlong.text import grammar_cost
from support.serving import RunningServer

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
GOOD = {"messages": USER, "max_tokens": 2}
TEXT = json.dumps(GOOD).encode()


def nested(opening: str, closing: str, depth: int) -> str:
    return opening * depth + "1" + closing * depth


BROKEN_JSON = [
    *[TEXT[:end] for end in range(0, len(TEXT), 2)],
    *[TEXT.replace(b'"', quote) for quote in (b"'", b"\xe2\x80\x9c", b"")],
    *[TEXT + tail for tail in (b",", b"}", b"{}", b"\x00", b"garbage")],
    *[b"\xef\xbb\xbf" + TEXT, TEXT.decode().encode("utf-16"), TEXT.decode().encode("utf-32")],
    *[
        b"null",
        b"true",
        b"3",
        b'"text"',
        b"[]",
        b"[{}]",
        b"NaN",
        b"{}",
        b"\xff\xfe",
        b"\x80" * 64,
        b" " * 4096,
    ],
    *[
        b'{"messages": %s}' % bad
        for bad in (b"NaN", b"Infinity", b"undefined", b"0x10", b"01", b"+1", b"1.", b".5")
    ],
    *[nested("[", "]", depth).encode() for depth in (100, 1000, 100_000)],
    *[nested('{"a":', "}", depth).encode() for depth in (100, 1000, 100_000)],
    b'{"messages": [{"role": "user", "content": "\xff\xff"}]}',
    b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": "\\u12"}]}',
    b'{"messages": [{"role": "user", "content": "a\nb"}]}',
    b'{"messages": [{"role": "user", "content": "\\x41"}]}',
]
NUMBERS = [
    "1e400",
    "-1e400",
    "1" * 5000,
    "-" + "1" * 400,
    "1e-400",
    "9223372036854775808",
    "-1",
    "0.5",
    '"1"',
    "[]",
]
NUMERIC = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "max_tokens",
    "max_completion_tokens",
    "n",
    "min_tokens",
    "top_logprobs",
]
FIELDS = [
    "messages",
    "tools",
    "stop",
    "logit_bias",
    "response_format",
    "stream",
    "speculative",
    "tool_choice",
    "model",
]
VALUES = [7, -1.5, True, "x", [], {}, [[]], [None], {"a": {"b": []}}, "\u0000", "💥" * 1000]
SCHEMAS = [
    {"type": "nonsense"},
    {"type": ["string", 3]},
    {"$ref": "#/nowhere"},
    {"$ref": "http://127.0.0.1:1/schema.json"},
    {"$ref": "#"},
    {"properties": 3},
    {"type": "string", "minLength": 10**12},
    {"type": "string", "pattern": "("},
    {"type": "string", "pattern": "(a{1000}){1000}"},
    {"type": "array", "minItems": 10**9},
    {"enum": []},
    {"enum": [str(number) for number in range(20_000)]},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"not": {}},
    {"type": "number", "minimum": 5, "maximum": 1},
    {"type": "object", "patternProperties": {"(": {}}},
    json.loads(nested('{"items":', "}", 100).replace("1", "{}")),
    {"type": "object", "properties": {str(n): {"type": "string"} for n in range(3000)}},
]
PATTERNS = [
    "(",
    "[",
    "a{2,1}",
    "(?<=a)b",
    r"\1",
    "(a*)*" * 50,
    "((((a{99}){99}){99}){99})",
    "(?R)",
    "\\",
    "a" * 200_000,
]
GRAMMARS = [
    "",
    "start:",
    "start: start",
    "start: x",
    'start: "a" "',
    "a: b\nb: a",
    "%import x",
    "start: /(/",
    "💥",
    *[
        f"start: A\nA: {joint.join(f'/([ab]{{{count}}})*/' for count in counts)}"
        for joint in (" & ", " & ~")
        for counts in ((101, 103, 107, 109), (9973, 9967), (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37))
    ],
    "start: A\nA: /(([ab]{50}){50}){50}/ & /(([ab]{49}){49}){49}/",
    "start: A\nA: ~/(.|\\n)*a(.|\\n){300}/ & ~/(.|\\n)*b(.|\\n){299}/",
    'start: s\ns: "a" | s s | s s s',
    "start: s+\ns: /[a-z]*/ /[a-z]*/ /[a-z]*/ | s s",
    "start: "
    + " | ".join(f"r{n}" for n in range(300))
    + "".join(f"\nr{n}: /[a-z]*{n}[a-z]*/" for n in range(300)),
    "start: r0" + "".join(f"\nr{n}: r{n + 1} r{n + 1}" for n in range(60)) + '\nr60: "a"',
]
PATHS = [
    "/static/../../../etc/passwd",
    "/static/%2e%2e/%2e%2e/etc/passwd",
    "/static/..%2f..%2fsettings.py",
    "/static//etc/passwd",
    "/static/%00",
    "/v1/models/..%2f..%2fetc",
    "/v1/models/%00%0a%0d",
    "/v1/models/" + "a" * 4000,
    "/v1/models/%F0%9F%92%A5",
    "/v1/chat",
    "/v1//chat/completions",
    "/%",
    "/v1/stats?x=" + "y" * 2000,
]


@pytest.fixture(scope="module")
def running():
    with RunningServer(max_body_bytes=1 << 20, body_timeout=1.0, header_timeout=1.0) as server:
        yield server
        with server.client() as http:
            assert http.post(CHAT, json=GOOD).status_code == 200
        usage = server.server.pool.current.client.stats().usage
        assert (usage.running, usage.waiting, usage.pages_used) == (0, 0, 0)
        server.engine.check_integrity()


@pytest.fixture(scope="module")
def http(running):
    with running.client() as client:
        yield client


def post(http, body: bytes, path: str = CHAT):
    return http.post(path, content=body, headers={"content-type": "application/json"})


def assert_refused(answer) -> None:
    assert 400 <= answer.status_code < 500, (answer.status_code, answer.text[:300])
    error = answer.json()["error"]
    assert len(error["message"]) > 5 and "Traceback" not in error["message"]
    assert len(answer.content) < 4000, "an error repeats little of what was sent"


def test_there_are_enough():
    cases = len(BROKEN_JSON) + len(NUMBERS) * len(NUMERIC) + len(FIELDS) * len(VALUES)
    cases += len(SCHEMAS) + len(PATTERNS) + len(GRAMMARS) + len(PATHS) + len(RAW)
    assert cases >= 300


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"])
def test_broken_json(http, path):
    for body in BROKEN_JSON:
        answer = post(http, body, path)
        assert 400 <= answer.status_code < 500, (body[:80], answer.status_code)
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize("field", NUMERIC)
def test_numbers(http, field):
    for number in NUMBERS:
        fields = {name: json.dumps(value) for name, value in GOOD.items()} | {field: number}
        body = "{" + ",".join(f'"{name}": {value}' for name, value in fields.items()) + "}"
        answer = post(http, body.encode())
        if answer.status_code != 200:
            assert_refused(answer)


@pytest.mark.parametrize("field", FIELDS)
def test_wrong_types(http, field):
    for value in VALUES:
        answer = post(http, json.dumps(GOOD | {field: value}).encode())
        if answer.status_code != 200:
            assert_refused(answer)
            if answer.status_code == 400:
                assert field in answer.json()["error"]["message"]


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_schemas(http, number):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS[number]}}
    started = time.monotonic()
    answer = post(http, json.dumps(GOOD | {"response_format": form}).encode())
    assert time.monotonic() - started < 60
    if answer.status_code != 200:
        assert_refused(answer)


def test_patterns_and_grammars(http, monkeypatch):
    monkeypatch.setattr(grammar_cost, "MAX_CPU_SECONDS", 0.3)
    forms = [{"type": "regex", "pattern": pattern} for pattern in PATTERNS]
    forms += [{"type": "grammar", "grammar": grammar} for grammar in GRAMMARS]
    refused = 0
    for form in forms:
        answer = post(http, json.dumps(GOOD | {"response_format": form}).encode())
        if answer.status_code != 200:
            assert_refused(answer)
            refused += 1
    assert refused > len(forms) // 2


def test_plain_requests_do_not_wait_for_grammars(running, monkeypatch):
    """Whoever finds all compilers busy is told when to come back; whoever asks for no grammar notices nothing."""
    monkeypatch.setattr(grammar_cost, "MAX_CPU_SECONDS", 0.1)
    monkeypatch.setattr(compilers, "MAX_WAITING", 3)
    answers = []

    def ask(number: int) -> None:
        lark = f"start: A\nA: /([ab]{{{101 + number}}})*/ & /([ab]{{103}})*/ & /([ab]{{107}})*/ & /([ab]{{109}})*/"
        form = {"type": "grammar", "grammar": lark}
        with running.client() as own:
            answers.append(own.post(CHAT, json=GOOD | {"response_format": form}))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    slowest = 0.0
    with running.client() as http:
        while any(thread.is_alive() for thread in threads):
            started = time.monotonic()
            assert http.post(CHAT, json=GOOD).status_code == 200
            slowest = max(slowest, time.monotonic() - started)
    for thread in threads:
        thread.join()
    assert slowest < 3
    statuses = {answer.status_code for answer in answers}
    assert statuses == {400, 503}
    for answer in answers:
        assert_refused(answer) if answer.status_code == 400 else assert_busy(answer)


def assert_busy(answer) -> None:
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
    assert "again later" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
def test_paths(running, path):
    with socket.create_connection(("127.0.0.1", running.port), timeout=10) as raw:
        raw.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        answer = read_all(raw)
    status = int(answer.split(b" ", 2)[1])
    assert (status == 200 and path.startswith("/v1/stats")) or 400 <= status < 500, answer[:200]
    assert b"root:" not in answer and b"Settings" not in answer


def test_bodies_too_large(http):
    assert_refused(post(http, b'{"messages": "' + b"x" * (1 << 21) + b'"}'))

    def endless():
        for _ in range(64):
            yield b"x" * 65536

    answer = http.post(CHAT, content=endless())
    assert answer.status_code == 413


def test_many_messages_and_tools(http):
    many = {"messages": USER * 20_000}
    assert_refused(post(http, json.dumps(many).encode()))
    tools = [{"type": "function", "function": {"name": f"f{n}"}} for n in range(129)]
    assert_refused(post(http, json.dumps(GOOD | {"tools": tools}).encode()))


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
RAW = {
    "garbage": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    "no_host": b"GET /health HTTP/1.1\r\n\r\n",
    "other_host": b"GET /health HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n",
    "version": b"GET /health HTTP/9.9\r\nhost: localhost\r\n\r\n",
    "old": b"GET /health\r\n\r\n",
    "negative_length": HEAD + b"content-length: -5\r\n\r\n",
    "two_lengths": HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
    "huge_length": HEAD + b"content-length: 99999999999999999999\r\n\r\n{}",
    "both_lengths": HEAD + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "bad_chunk": HEAD + b"transfer-encoding: chunked\r\n\r\nZZ\r\n{}\r\n",
    "huge_chunk": HEAD + b"transfer-encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\n{}",
    "header_bytes": b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: \x00\x01\r\n\r\n",
    "header_flood": b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"x: y\r\n" * 100_000 + b"\r\n",
    "long_header": b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 200_000 + b"\r\n\r\n",
    "long_target": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "method": b"BREW /health HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "upgrade": b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
    "slow_body": HEAD + b"content-length: 50\r\n\r\n{",
    "slow_header": b"GET /health HTTP/1.1\r\nho",
    "nothing": b"",
    "pipelined": b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n" * 40 + b"GET /nothing HTTP/1.0\r\n\r\n",
}


def read_all(raw: socket.socket) -> bytes:
    answer = b""
    try:
        while part := raw.recv(65536):
            answer += part
    except (TimeoutError, ConnectionResetError):
        pass
    return answer


@pytest.mark.parametrize("half_close", [False, True])
@pytest.mark.parametrize("name", RAW)
def test_raw_bytes(running, name, half_close):
    with socket.create_connection(("127.0.0.1", running.port), timeout=3) as raw:
        try:
            raw.sendall(RAW[name])
            if half_close:
                raw.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError):
            pass
        answer = read_all(raw)
    statuses = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]
    assert all(status < 500 or status == 505 for status in statuses), answer[:300]
    with running.client() as http:
        assert http.get("/health").status_code == 200


def test_connections_that_say_nothing(running):
    """A hundred idle connections, and the next client is served at once."""
    idle = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(100)]
    try:
        started = time.monotonic()
        with running.client() as http:
            assert http.post(CHAT, json=GOOD).status_code == 200
        assert time.monotonic() - started < 30
    finally:
        for raw in idle:
            raw.close()


@pytest.mark.parametrize("path", ["/v1/stats/stream", "/v1/stats", "/health", "/metrics", "/v1/models"])
def test_the_head_alone_ends(running, path):
    """Also where the answer itself would be a stream without end."""
    with socket.create_connection(("127.0.0.1", running.port), timeout=5) as raw:
        raw.sendall(f"HEAD {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        answer = b""
        while part := raw.recv(65536):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ") and body == b""


@pytest.mark.parametrize("penalty", [1e-45, 1e-38, 1e-3, 0.01, 100])
def test_penalties_lift_no_ban(http, penalty):
    """Dividing by next to nothing makes logits infinite, and infinity less infinity is allowed."""
    text = http.post("/v1/completions", json={"prompt": "a a a", "max_tokens": 8, "temperature": 0}).json()
    tokens = http.post("/v1/token/encode", json={"text": "a a a" + text["choices"][0]["text"]}).json()[
        "tokens"
    ]
    asked = {"prompt": "a a a", "max_tokens": 24, "temperature": 0, "bad_token_ids": tokens, "logprobs": 0}
    asked["ignore_eos"] = True
    answer = http.post("/v1/completions", json=asked | {"repetition_penalty": penalty})
    if answer.status_code != 200:
        assert_refused(answer)
        assert penalty < 0.01 and answer.json()["error"]["param"] == "repetition_penalty"
        return
    found = http.post("/v1/token/encode", json={"text": answer.json()["choices"][0]["text"]}).json()["tokens"]
    assert len(found) > 10
    words = {http.post("/v1/token/decode", json={"tokens": [token]}).json()["text"] for token in tokens}
    assert not words & set(answer.json()["choices"][0]["logprobs"]["tokens"])
