"""No request keeps others waiting: how long a thread runs without letting another one run, and how long the event loop
is busy with one thing, in processor time, which a busy machine does not change."""

import gc
import json
import sys
import threading
import time

import pytest

from headlong.errors import HeadlongError
from headlong.server import body, run
from headlong.server.app import ENDPOINTS
from headlong.server.prompting import _check_arguments
from headlong.server.responses import as_chat
from headlong.server.schemas.chat import ChatRequest
from headlong.server.schemas.responses import ResponsesRequest
from headlong.server.writing import written
from headlong.text.messages import prepare_messages
from support import pieces
from support.heavy_bodies import AT_THE_BOUNDS, CHAT, GOOD, LISTS, RESPONSES, TEXTS
from support.heavy_work import ANSWERS, STRINGS
from support.serving import RunningServer

MOST = 0.1
"""The longest that anybody may wait for another's request, in seconds."""
SCHEMAS = {endpoint.path: endpoint.body for endpoint in ENDPOINTS}
READ = {**AT_THE_BOUNDS, **STRINGS}
CHEAP = (
    "lists in arguments",
    "a duration",
    "a grammar of one word",
    "long numbers in arguments",
    "a million ids",
)


@pytest.fixture(scope="module", autouse=True)
def _server_like():
    with pieces.modules_set_aside():
        yield


def work_of(path: str, text: str) -> None:
    """What is done with a body before its prompt is written."""
    schema = SCHEMAS[path]
    assert schema is not None
    read, _ = body._read(text.encode(), schema, False)
    if isinstance(read, ResponsesRequest):
        read = as_chat(read)
    if isinstance(read, ChatRequest):
        if read.structured_outputs is not None:
            read.structured_outputs.as_grammar()
        _check_arguments(read.messages)
        prepare_messages([message.model_dump(exclude_none=True) for message in read.messages])


@pytest.mark.parametrize("name", [n if n in CHEAP else pytest.param(n, marks=pytest.mark.slow) for n in READ])
def test_reading_is_made_of_short_pieces(name):
    path, make = READ[name]
    text = make()
    with pieces.here() as longest:
        try:
            work_of(path, text)
        except HeadlongError as error:
            assert len(str(error)) < 1000
    assert longest.seconds < MOST, longest


def test_a_piece_that_is_long_is_noticed():
    text = f"[{'[],' * 1_000_000}1]"
    gc.disable()  # who looks on while garbage is collected would cut the piece in two
    try:
        with pieces.here() as longest:
            json.loads(text)
    finally:
        gc.enable()
    assert longest.seconds > 0.02 and "decode" in longest.where


def test_answers_are_written_in_short_pieces():
    token = {"token": "a", "logprob": -0.5, "bytes": [97]}
    logprobs = {"choices": [{"logprobs": {"content": [token | {"top_logprobs": [token] * 20}] * 100}}]}
    vectors = {"data": [{"embedding": [0.5] * 384, "index": place} for place in range(12)]}
    keys = {
        "tools": [{"parameters": {f"k{number}": number for number in range(2100)}}],
        "none": None,
        "é": "💥",
    }
    with pieces.here() as longest:
        written(logprobs)
    assert longest.seconds < MOST / 10, longest
    for data in (logprobs, vectors, keys, [], {}, "", [[]] * 2100, {"a": ()}, [1, [2] * 2100, {}]):
        assert written(data) == json.dumps(data, ensure_ascii=False, separators=(",", ":"))


@pytest.fixture(scope="module")
def running():
    with RunningServer() as server:
        with server.client() as http:
            assert http.post(CHAT, content=f"{{{GOOD}}}").status_code == 200
        yield server
        server.engine.check_integrity()


def small(name: str) -> tuple[str, str]:
    """A smaller request of the same kind, for which the event loop would be busy too long if it did the work."""
    path, make = (STRINGS | ANSWERS)[name]
    given = json.loads(make())
    if "input" in given and isinstance(given["input"], list):
        given["input"] = given["input"][: 512 if name == "vectors" else 6000]
    if "max_output_tokens" in given:
        given["max_output_tokens"] = min(given["max_output_tokens"], 250)
    return path, json.dumps(given)


@pytest.mark.parametrize("name", ["instructions", "vectors", "log-probabilities of a streamed response"])
def test_the_event_loop_is_never_busy_for_long(running, name):
    path, text = small(name)
    with running.client() as http, pieces.on_the_loop(running.server_thread) as longest:
        assert http.post(path, content=text).status_code == (200 if name in ANSWERS else 400)
    assert longest.seconds < MOST / 2, longest


def test_stored_responses_are_no_objects(running):
    """What is kept for later is text, which the garbage collector does not look through."""
    with running.client() as http:
        answer = http.post(RESPONSES, json={"input": "Hi", "max_output_tokens": 2}).json()
        stored = running.server.responses.get(answer["id"], "anonymous")
        assert isinstance(stored.response, str) and all(
            isinstance(one, str) for one in (*stored.given, *stored.made)
        )
        assert http.get(f"{RESPONSES}/{answer['id']}").json() == answer


def test_a_server_lets_its_threads_run_by_turns():
    """Garbage is not looked for among modules, and a thread that computes does not keep the interpreter's lock for
    long: whoever streams asks for it many times a token."""
    interval = sys.getswitchinterval()
    try:
        gc.unfreeze()
        run._let_others_run()
        assert gc.get_freeze_count() > 50_000 and sys.getswitchinterval() <= 0.001
        started = time.thread_time()
        gc.collect()
        assert time.thread_time() - started < MOST / 4
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.slow
class TestAll:
    def test_the_event_loop_is_never_busy_for_long(self, running):
        longest_of = {}
        with running.client(), pieces.on_the_loop(running.server_thread) as longest:
            self.ask_all(running, longest, longest_of)
        assert {name: one for name, one in longest_of.items() if one[0] > 1000 * MOST} == {}

    def test_threads_work_in_short_pieces(self):
        """All threads that take part, but those of the engine and of the grammar library, which let others run."""
        own = ("headlong-engine", "headlong-grammar", "headlong-mask")
        longest_of = {}
        with pieces.in_threads(lambda name: not name.startswith(own)) as longest, RunningServer() as server:
            self.ask_all(server, longest, longest_of)
        assert {name: one for name, one in longest_of.items() if one[0] > 1000 * MOST} == {}

    def ask_all(
        self, server: RunningServer, longest: pieces.Longest, found: dict[str, tuple[int, str]]
    ) -> None:
        """Each up to three times: now and then a thread's clock goes on while it does not run."""
        with server.client() as http:
            http.timeout = 300
            for name, (path, make) in (LISTS | TEXTS | AT_THE_BOUNDS | STRINGS | ANSWERS).items():
                text = make()
                for _ in range(3):
                    longest.reset()
                    status = http.post(path, content=text).status_code
                    assert (status == 200) == (name in ANSWERS), (name, status)
                    told = round(1000 * longest.seconds), longest.where
                    found[name] = min(found.get(name, told), told)
                    if longest.seconds < MOST:
                        break
        print(threading.active_count(), found)
