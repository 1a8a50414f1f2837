"""`headlong serve` and `headlong keys`: a real process, its line, its logs, its end."""

import io
import json
import re
import signal
import socket
import sys
import threading
import time

import pytest
import torch
from safetensors.torch import save_file

from headlong.checkpoint.source import EMBEDDED
from headlong.server import keys
from headlong.server.settings import OPTIONS
from support.command import Headlong
from support.serve_command import PATIENCE, Serving, serving

KEY, ADMIN = "a-user-s-key-for-tests", "an-admin-s-key-for-tests"
STORY = {
    "messages": [{"role": "user", "content": "Tell me a secret story."}],
    "ignore_eos": True,
    "temperature": 0,
}


pytestmark = pytest.mark.usefixtures("loggers_put_back")


def until(true) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


class Answer(threading.Thread):
    """One request in a thread."""

    def __init__(self, server: Serving, max_tokens: int, **headers: str) -> None:
        super().__init__(daemon=True)
        self.result: tuple[int, dict] | None = None
        self._call = lambda: server.ask("/v1/chat/completions", STORY | {"max_tokens": max_tokens}, **headers)
        self.start()

    def run(self) -> None:
        self.result = self._call()


def test_keys_requests_and_a_clean_end(tmp_path) -> None:
    """Keys from two sources, a log without secrets, and a drain that lets the running request finish."""
    config = tmp_path / "config.yml"
    config.write_text(f"admin_keys: ['{keys.hash_key(ADMIN)}']\nmax_queue: 7\nserved_names: [story]\n")
    flags = ("--config", str(config), "--draft-tokens", "2", "--drain-timeout", "600")
    with serving(*flags, HEADLONG_API_KEY=KEY, HEADLONG_PROT="1") as server:
        assert re.fullmatch(
            r"headlong serves story at http://127\.0\.0\.1:\d+ · MTP on: up to 2 drafts per step, at most 8\n",
            server.line,
        )
        assert server.ask("/health")[0] == 200
        for headers in ({}, {"authorization": "Bearer wrong-wrong-wrong"}, {"x_api_key": keys.hash_key(KEY)}):
            status, body = server.ask("/v1/models", **headers)
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        assert server.ask("/v1/model/unload", {}, x_api_key=KEY)[0] == 403
        status, body = server.ask("/v1/stats", x_admin_key=ADMIN)
        assert status == 200 and body["rows"]["queue_limit"] == 7

        running = Answer(server, 400, x_api_key=KEY)
        until(lambda: server.ask("/v1/stats", x_api_key=KEY)[1]["rows"]["running"] == 1)
        server.signal(signal.SIGTERM)
        until(lambda: server.ask("/health")[0] == 503)
        status, body = server.ask("/v1/chat/completions", STORY | {"max_tokens": 1}, x_api_key=KEY)
        assert (status, body["error"]["code"]) == (503, "draining")
        code, entries = server.wait()
        running.join(PATIENCE)
    assert code == 0
    assert running.result is not None and running.result[0] == 200
    assert running.result[1]["usage"]["completion_tokens"] == 400 and running.result[1]["model"] == "story"
    assert any(
        entry["message"]
        == "sampling where a request does not say: temperature 0.7, top_p 0.9, repetition_penalty 1.15"
        for entry in entries
    )
    assert any("HEADLONG_PORT" in entry["message"] for entry in entries)
    assert not [entry for entry in entries if "exception" in entry]
    (done,) = [entry for entry in entries if entry.get("completion_tokens") == 400]
    assert (
        done["caller"] == keys.fingerprint(keys.digest(KEY))
        and done["model"] == "story"
        and done["request_id"]
    )
    text = json.dumps(entries)
    for secret in (KEY, ADMIN, "wrong-wrong-wrong", "secret story"):
        assert secret not in text
    for key in (KEY, ADMIN):
        assert keys.digest(key).hex() not in text


def test_an_open_server_says_so_and_a_second_signal_does_not_wait(tmp_path) -> None:
    """Its model has an adapter beside it, which is told at the start, too."""
    for file in EMBEDDED.iterdir():
        (tmp_path / file.name).symlink_to(file)
    save_file({"lora": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    with serving(str(tmp_path), "--host", "0.0.0.0", "--drain-timeout", "600") as server:
        server.url = server.url.replace("0.0.0.0", "127.0.0.1")
        assert server.ask("/v1/models")[0] == 200
        status, body = server.ask("/v1/model/unload", {})
        assert status == 403 and "admin_keys" in body["error"]["message"]
        running = Answer(server, 4000)
        until(lambda: server.ask("/v1/stats")[1]["rows"]["running"] == 1)
        server.signal(signal.SIGINT)
        until(lambda: server.ask("/health")[0] == 503)
        server.signal(signal.SIGINT)
        entries = assert_cancelled(server, running)
    warnings = [entry["message"] for entry in entries if entry["level"] == "warning"]
    for said in (
        "no API key",
        "admin_keys",
        "adapter_model.safetensors: an adapter (LoRA) that is not applied",
    ):
        assert any(said in text for text in warnings), said


def test_draining_has_an_end_and_slow_kernels_are_told() -> None:
    without = "from headlong.ops import native; native.library = lambda: None"
    with serving("--drain-timeout", "0.3", before=without) as server:
        running = Answer(server, 4000)
        until(lambda: server.ask("/v1/stats")[1]["rows"]["running"] == 1)
        server.signal(signal.SIGTERM)
        entries = assert_cancelled(server, running)
    (warning,) = [entry["message"] for entry in entries if entry["level"] == "warning"]
    assert "no native CPU kernels" in warning and "install gcc" in warning


def assert_cancelled(server: Serving, running: Answer) -> list[dict]:
    """The process ends well, and the client is told why its answer did not come."""
    code, entries = server.wait()
    running.join(PATIENCE)
    assert code == 0
    assert running.result is not None and running.result[0] == 503
    assert "closed" in running.result[1]["error"]["message"]
    assert "CancelledError" not in json.dumps(entries)
    return entries


def test_a_port_in_use_is_known_before_anything_is_loaded(headlong: Headlong) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = headlong("serve", "--port", str(taken.getsockname()[1]))
    assert done.code == 2
    assert re.fullmatch(
        r"headlong serve: port: \d+ on 127\.0\.0\.1 cannot be used \(.*\); choose another.*\n", done.err
    )


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--port eighty", "--port must be a whole number, not 'eighty'"),
        ("--mtp maybe", "--mtp must be one of auto, on, off"),
        ("--max-num-seqs 0", "--max-rows: max_rows must be a whole number from 1"),
        ("--config nowhere.yml", "nowhere.yml: cannot be read"),
        ("--speculative-config {}x", "--speculative-config must be a JSON object"),
        ("--api-key short", "--api-keys must hold keys of 8 to 512"),
        ("--host no.such.host.invalid", "is no address of this machine"),
        ("--model-dir nowhere", "model_dir: "),
        ("no-such-model", "'no-such-model' is neither an existing folder"),
        ("--bogus 1", "unrecognized arguments: --bogus"),
    ],
)
def test_mistakes_are_one_sentence(headlong: Headlong, words: str, complaint: str) -> None:
    done = headlong("serve", "--port", "0", *words.split())
    assert done.code == 2
    sentences = [line for line in done.err.splitlines() if not line.startswith("{")]
    assert len(sentences) == 1 and sentences[0].startswith("headlong serve: ") and complaint in sentences[0]


def test_every_setting_has_its_flag(headlong: Headlong) -> None:
    page = headlong("serve", "--help").out
    for name in OPTIONS:
        assert f"--{name.replace('_', '-')}" in page or name == "model"


def test_keys(headlong: Headlong, monkeypatch: pytest.MonkeyPatch) -> None:
    made = json.loads(headlong("keys", "--json").out)
    assert made["hash"] == keys.hash_key(made["key"])
    assert made["name"] == keys.fingerprint(keys.digest(made["key"]))
    plain = dict(line.split() for line in headlong("keys").out.splitlines())
    assert plain["hash"] == keys.hash_key(plain["key"]) and plain["key"] != made["key"]
    monkeypatch.setattr(sys, "stdin", io.StringIO(made["key"] + "\n"))
    again = headlong("keys", "--stdin", "--json").out
    assert json.loads(again) == {"hash": made["hash"], "name": made["name"]} and made["key"] not in again


def test_a_key_that_cannot_be_one(headlong: Headlong, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("two words\n"))
    done = headlong("keys", "--stdin")
    assert done.code == 2 and "visible ASCII" in done.err and "two words" not in done.err
