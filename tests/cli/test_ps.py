"""`headlong ps` against a real server."""

import http.server
import json
import re
import threading

import pytest

from headlong.server import keys
from support.command import Headlong
from support.serving import RunningServer

KEY, ADMIN = "a-user-s-key-for-tests", "an-admin-s-key-for-tests"


@pytest.fixture(scope="module")
def server():
    with RunningServer(
        served_names=("story", "tale"),
        max_rows=3,
        api_keys=(keys.hash_key(KEY),),
        admin_keys=(keys.hash_key(ADMIN),),
    ) as running:
        yield running


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split("[│┃]", line)[1:-1]]


def test_the_table(headlong: Headlong, server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADLONG_API_KEY", KEY)
    done = headlong("ps", "--url", server.url)
    assert done.code == 0
    lines = [cells(line) for line in done.out.splitlines() if "│" in line]
    pages = server.engine.state.pages.size
    (row,) = lines  # one model, whatever its names
    assert row[:5] == ["story", row[1], "4096", "on", "0 of 3"] and row[1].startswith("cpu ")
    assert re.fullmatch(rf"\d+ of {pages} pages", row[5]) and row[6] == "-", "memory is for admins"
    assert re.search(r"up for \d+ s, \d+ requests?", done.out)
    monkeypatch.setenv("HEADLONG_ADMIN_KEY", ADMIN)
    (row,) = [cells(line) for line in headlong("ps", "--url", server.url).out.splitlines() if "│" in line]
    assert re.fullmatch(r"[\d.]+ MB", row[6])


def test_json(headlong: Headlong, server: RunningServer) -> None:
    found = json.loads(headlong("ps", "--url", server.url, "--api-key", ADMIN, "--json").out)
    assert found["url"] == server.url and [model["id"] for model in found["models"]] == ["story"]
    assert found["stats"]["rows"]["max"] == 3
    assert found["models"][0]["headlong"]["memory"]["total_bytes"] > 1e6


def test_nothing_is_served(headlong: Headlong) -> None:
    with RunningServer() as empty:
        with empty.client() as http:
            assert http.post("/v1/model/unload", json={}).status_code == 200
        done = headlong("ps", "--url", empty.url)
        assert done.code == 0 and done.out == f"{empty.url} serves no model\n"


class Other(http.server.BaseHTTPRequestHandler):
    """A server that is not ours."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>")

    def log_message(self, *_: object) -> None:
        pass


def test_mistakes(headlong: Headlong, server: RunningServer) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        cases = [
            (("--url", "http://127.0.0.1:1"), "nobody answers there"),
            (("--url", "ftp://x"), "is not an address"),
            (("--url", server.url), "the server wants another one (status 401"),
            (("--url", server.url, "--api-key", "wrong-wrong-wrong"), "the server wants another one"),
            (("--url", f"http://127.0.0.1:{other.server_port}"), "is not what `headlong serve` answers"),
        ]
        for words, complaint in cases:
            done = headlong("ps", *words)
            assert done.code == 2 and complaint in done.err and done.err.count("\n") == 1, done.err
        other.shutdown()
