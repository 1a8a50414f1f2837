"""What `headlong bench serve` measures, over real sockets: a server of many dialects, llama.cpp, and our own."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
from dialects import WORDS, DialectServer, only, record

from support.command import Headlong


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEADLONG_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server() -> Iterator[DialectServer]:
    with DialectServer() as running:
        yield running


@pytest.mark.parametrize(
    ("dialect", "tokens", "counted_by"),
    [
        ("plain", len(WORDS), "chunks"),
        ("untidy", 9, "usage"),
        ("byte_by_byte", 4, "usage"),
        ("lingering", 5, "usage"),
    ],
)
def test_dialects(
    headlong: Headlong, server: DialectServer, dialect: str, tokens: int, counted_by: str
) -> None:
    begun = time.perf_counter()
    done = headlong(
        "bench", "serve", "--url", server.url, "--model", dialect, "--requests", "2", "--warmup", "0"
    )
    assert done.code == 0
    result = only(done)
    assert (result["requests"], result["completed"], result["errors"]) == (2, 2, {})
    assert result["output_tokens"] == 2 * tokens
    assert result["tokens_counted_by"] == {counted_by: 2}
    assert result["finish_reasons"] == {"stop": 2}
    assert ("chunks were counted" in done.out) == (counted_by == "chunks")
    assert 0 < result["ttft_ms"]["p50"] <= result["e2e_ms"]["p50"] <= 1000 * (time.perf_counter() - begun)
    # An answer ends with [DONE], however long the server keeps the body open after it.
    assert result["e2e_ms"]["max"] < 900
    assert "acceptance not reported" in done.out and result["acceptance"] is None


def test_times_and_throughput(headlong: Headlong, server: DialectServer) -> None:
    done = headlong(
        *(
            "bench",
            "serve",
            "--url",
            server.url,
            "--model",
            "steady",
            "--concurrency",
            "1,3",
            "--requests",
            "6",
        )
    )
    assert done.code == 0
    one, three = record(done)["results"]
    for result in (one, three):
        # The role comes after 50 ms and is no token; the first word comes 20 ms later, then one every 20 ms.
        assert result["ttft_ms"]["p50"] >= 69 and result["itl_ms"]["p50"] >= 19
        assert result["gap_ms"]["p50"] >= 15 and result["gap_ms"]["p99"] <= result["gap_ms"]["max"]
        assert result["e2e_ms"]["p50"] >= 180
        assert result["tokens_per_second"] == pytest.approx(30 / result["seconds"], rel=1e-3)
        assert result["prompt_tokens"] == 42
    assert server.most_at_once == 3
    assert one["seconds"] >= 6 * 0.18 and three["seconds"] < one["seconds"]
    assert len(server.bodies) == 6 + 6 + 1
    body = server.bodies[-1]
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
    assert body["temperature"] == 0 and body["max_tokens"] == 128
    assert "speculative" not in body and "seed" not in body


@pytest.mark.parametrize(
    ("dialect", "source", "drafted", "accepted", "tokens_per_step"),
    [
        ("drafting", "timings", 6, 4, 8 / 4),
        ("measuring", "metrics.speculative_decoding", 12, 3, 7 / 4),
        ("predicting", "accepted_prediction_tokens", 8, 2, 5 / 3),
        ("counting", "/metrics counters", 4, 2, 4 / 2),
    ],
)
def test_acceptance(
    headlong: Headlong,
    server: DialectServer,
    dialect: str,
    source: str,
    drafted: int,
    accepted: int,
    tokens_per_step: float,
) -> None:
    done = headlong("bench", "serve", "--url", server.url, "--model", dialect, "--requests", "3")
    found = only(done)["acceptance"]
    assert (found["source"], found["drafted"], found["accepted"]) == (source, 3 * drafted, 3 * accepted)
    assert found["rate"] == pytest.approx(accepted / drafted, abs=1e-4)
    assert found["tokens_per_step"] == pytest.approx(tokens_per_step, abs=1e-4)
    assert f"acceptance from {source}" in done.out


def test_settings_take_turns_on_the_same_requests(headlong: Headlong, server: DialectServer) -> None:
    words = ("--mtp", "off,3", "--rounds", "2", "--requests", "4", "--seed", "5", "--warmup", "0")
    done = headlong("bench", "serve", "--url", server.url, "--model", "steady", *words)
    asked = [(body["speculative"]["mtp"], body["seed"], body["messages"]) for body in server.bodies]
    blocks = [
        (mtp, [rest for _, *rest in group]) for mtp, group in groupby(asked, key=lambda entry: entry[0])
    ]
    # The second round begins with the other setting.
    assert [mtp for mtp, _ in blocks] == ["off", 3, "off"]
    first, both, last = (sent for _, sent in blocks)
    assert [seed for seed, _ in first] == [5, 6] and both == first + last
    off, three = record(done)["results"]
    assert (off["mtp"], three["mtp"]) == ("off", 3) and off["ratio"] is None
    ratio = three["ratio"]
    # Off is written four times as slowly.
    assert ratio["to"] == "off" and 1.2 < ratio["min"] <= ratio["median"] <= ratio["max"]
    assert "in the same round" in done.out


def test_a_server_that_drafts_regardless_is_found_out(headlong: Headlong, server: DialectServer) -> None:
    asked = ("bench", "serve", "--url", server.url, "--requests", "3", "--model")
    assert "ignores the field" in headlong(*asked, "measuring", "--mtp", "off,2").out
    assert "ignores the field" not in headlong(*asked, "drafting", "--mtp", "off,2").out


@pytest.mark.parametrize(
    ("dialect", "kind", "message"),
    [
        ("complaining", "error in stream", "out of\\x1b[31m pages"),
        ("cut", "cut off", ""),
        ("hanging", "timeout", "no end after 0.4 s"),
        ("single", "not a stream", "no events"),
        ("dead", "connection", "disconnected"),
    ],
)
def test_failures_are_counted_by_kind(
    headlong: Headlong, server: DialectServer, dialect: str, kind: str, message: str
) -> None:
    asked = ("bench", "serve", "--url", server.url, "--model", dialect, "--requests", "2", "--timeout", "0.4")
    done = headlong(*asked, "--warmup", "0")
    assert done.code == 1
    result = only(done)
    assert (result["requests"], result["completed"], result["errors"]) == (2, 0, {kind: 2})
    assert result["output_tokens"] == 0 and result["ttft_ms"] is None
    assert f"2 x {kind}: " in done.out and message in done.out and "\x1b" not in done.out
    refused = headlong(*asked)
    assert refused.code == 2 and "the first request failed" in refused.err and kind in refused.err


def test_a_busy_server(headlong: Headlong, server: DialectServer) -> None:
    done = headlong(
        "bench", "serve", "--url", server.url, "--model", "busy", "--requests", "6", "--warmup", "0"
    )
    assert done.code == 0
    result = only(done)
    assert (result["requests"], result["completed"], result["errors"]) == (6, 3, {"429": 3})
    assert "3 x 429: queue full" in done.out


def test_a_kept_connection_that_was_closed(headlong: Headlong, server: DialectServer) -> None:
    done = headlong("bench", "serve", "--url", server.url, "--model", "rude", "--requests", "3")
    assert done.code == 0
    result = only(done)
    # Warm-up and the second leave a connection behind; the requests after them find it closed.
    assert (result["completed"], result["errors"], result["resent"]) == (3, {}, 2)
    assert "2 sent again" in done.out


def test_stream_options_and_speculative_may_be_refused(headlong: Headlong, server: DialectServer) -> None:
    asked = ("bench", "serve", "--url", server.url, "--model", "fussy", "--requests", "2")
    done = headlong(*asked)
    assert done.code == 0 and only(done)["tokens_counted_by"] == {"chunks": 2}
    done = headlong(*asked, "--mtp", "off")
    assert done.code == 2 and "--mtp off: the server refuses the field `speculative`" in done.err


def test_arrivals_do_not_wait_for_the_server(headlong: Headlong, server: DialectServer) -> None:
    asked = ("--rate", "40", "--requests", "12", "--seed", "1", "--warmup", "0")
    done = headlong("bench", "serve", "--url", server.url, "--model", "steady", *asked)
    result = only(done)
    assert done.code == 0 and (result["completed"], result["ratio"]) == (12, None)
    assert server.most_at_once > 2
    # One stream cannot keep up; the wait is part of the latency.
    held = only(
        headlong("bench", "serve", "--url", server.url, "--model", "steady", *asked, "--concurrency", "1")
    )
    assert held["completed"] == 12
    assert held["ttft_ms"]["max"] > result["ttft_ms"]["max"] + 500


def test_duration_ends_a_run(headlong: Headlong, server: DialectServer) -> None:
    asked = (
        "bench",
        "serve",
        "--url",
        server.url,
        "--model",
        "steady",
        "--duration",
        "0.5",
        "--concurrency",
        "2",
    )
    result = only(headlong(*asked))
    assert result["seconds"] >= 0.5 and 4 <= result["completed"] == result["requests"] <= 10
    result = only(headlong(*asked, "--rate", "100", "--warmup", "0"))
    assert result["errors"].keys() == {"not sent"} and result["completed"] >= 2


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[str]:
    """Our own server, as a user starts it; its address."""
    log = tmp_path / "serve.log"
    words = [sys.executable, "-m", "headlong.cli.main", "serve", "--port", "0"]
    with log.open("w") as file:
        process = subprocess.Popen(words, stdout=file, stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1"})
        try:
            deadline = time.monotonic() + 60
            while not (found := re.search(r"http://127\.0\.0\.1:[1-9]\d*", log.read_text())):
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            yield found[0]
        finally:
            process.terminate()
            assert process.wait(timeout=30) == 0, log.read_text()


def test_headlong_serve(headlong: Headlong, own_server: str) -> None:
    asked = ("--concurrency", "1,2", "--max-tokens", "24", "--mtp", "off,3", "--rounds", "1")
    done = headlong("bench", "serve", "--url", own_server, *asked)
    assert done.code == 0, done.err
    for result in record(done)["results"]:
        assert result["errors"] == {} and result["tokens_counted_by"] == {"usage": result["requests"]}
        drafts = result["acceptance"]
        if result["mtp"] == "off":
            assert drafts["drafted"] == 0 and drafts["tokens_per_step"] == 1.0
        else:
            assert drafts["source"] == "metrics.speculative_decoding"
            assert drafts["tokens_per_step"] > 1.5 and result["ratio"]["to"] == "off"
    assert record(done)["server"]["version"]["version"]


def test_headlong_serve_completions(headlong: Headlong, own_server: str) -> None:
    asked = (
        "--endpoint",
        "completions",
        "--requests",
        "4",
        "--max-tokens",
        "16",
        "--temperature",
        "0.7",
        "--seed",
        "3",
    )
    done = headlong("bench", "serve", "--url", own_server, *asked, "--body", '{"ignore_eos": true}')
    assert done.code == 0, done.err
    assert only(done)["output_tokens"] == 4 * 16 and only(done)["finish_reasons"] == {"length": 4}
    refused = headlong("bench", "serve", "--url", own_server, "--model", "nonsense")
    assert refused.code == 2 and "--model nonsense" in refused.err
    refused = headlong("bench", "serve", "--url", own_server, "--body", '{"temprature": 1}')
    assert refused.code == 2 and "http 400" in refused.err and "temprature" in refused.err
