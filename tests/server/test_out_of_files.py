"""A server that has no file left for a connection: it says so once a second, and serves again when there is one."""

import errno
import io
import json
import logging
import socket
import time

import pytest

from headlong.server import logs
from headlong.server.loop_errors import LoopErrors
from support.serve_command import serving

pytestmark = pytest.mark.usefixtures("loggers_as_before")
FILES = 64
FEW_FILES = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({FILES}, {FILES}))
"""


def test_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, clock = io.StringIO(), [100.0]
    logs.setup(format="json", stream=stream)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    handle = LoopErrors()
    full = {
        "message": "socket.accept() out of system resource",
        "exception": OSError(errno.EMFILE, "Too many"),
    }
    for step in range(1000):
        clock[0] = 100 + step / 400
        handle(None, full)  # type: ignore[arg-type]
    entries = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [entry["attempts"] for entry in entries] == [1, 400, 400]
    assert all("ulimit -n" in entry["message"] and "exception" not in entry for entry in entries)


def test_other_errors_are_told_in_full() -> None:
    stream = io.StringIO()
    logs.setup(format="json", stream=stream)
    handle = LoopErrors()
    handle(None, {"message": "it broke", "exception": ValueError("bad")})  # type: ignore[arg-type]
    handle(None, {"message": "never retrieved"})  # type: ignore[arg-type]
    logging.getLogger("asyncio").error("a word of its own")
    first, second, third = (json.loads(line) for line in stream.getvalue().splitlines())
    assert "it broke" in first["message"] and "ValueError: bad" in first["exception"]
    assert "never retrieved" in second["message"] and third["message"] == "a word of its own"


@pytest.mark.slow
def test_more_connections_than_files() -> None:
    with serving("--log-format", "json", before=FEW_FILES) as server:
        host, port = server.url.removeprefix("http://").split(":")
        crowd = [socket.create_connection((host, int(port))) for _ in range(2 * FILES)]
        time.sleep(3.5)
        for one in crowd:
            one.close()
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                assert server.ask("/health")[0] == 200
                break
            except OSError:
                time.sleep(0.2)
        server.signal(15)
        code, entries = server.wait()
        told = [entry for entry in entries if "no connection can be accepted" in entry["message"]]
        assert code == 0 and 1 <= len(told) <= 8
        assert not [entry for entry in entries if "exception" in entry]
