"""`headlong bench serve` as a command: what it sends and writes, its limits, its complaints, and Ctrl-C."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from dialects import DialectServer, record

from support.command import Headlong


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEADLONG_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server() -> Iterator[DialectServer]:
    with DialectServer() as running:
        yield running


def test_what_is_sent(headlong: Headlong, server: DialectServer, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    file.write_text("\n".join(json.dumps(line) for line in ({"prompt": "Hello"}, {"messages": talk})))
    extra = '{"top_k": 5, "temperature": null}'
    asked = (
        "bench",
        "serve",
        "--url",
        server.url + "/v1/",
        "--requests",
        "2",
        "--warmup",
        "0",
        "--max-tokens",
        "9",
    )
    done = headlong(*asked, "--prompts", str(file), "--body", extra)
    # Without a name, the first model that is listed.
    assert [body["model"] for body in server.bodies] == ["plain", "plain"]
    assert [body["messages"] for body in server.bodies] == [[{"role": "user", "content": "Hello"}], talk]
    assert all(
        body["top_k"] == 5 and "temperature" not in body and body["max_tokens"] == 9 for body in server.bodies
    )
    assert record(done)["body"] == {"top_k": 5, "temperature": None} and record(done)["prompts"] == 2
    refused = headlong(*asked, "--prompts", str(file), "--endpoint", "completions")
    assert refused.code == 2 and "--endpoint completions sends texts" in refused.err
    assert headlong(*asked, "--endpoint", "completions").code == 0
    assert isinstance(server.bodies[-1]["prompt"], str) and "messages" not in server.bodies[-1]


def test_record_and_plot(headlong: Headlong, server: DialectServer, tmp_path: Path) -> None:
    picture = tmp_path / "load.svg"
    asked = (
        "--model",
        "drafting",
        "--concurrency",
        "2,1",
        "--mtp",
        "2,off",
        "--rounds",
        "1",
        "--api-key",
        "secret",
    )
    done = headlong("bench", "serve", "--url", server.url, *asked, "--plot", str(picture), "--json")
    (line,) = done.out.splitlines()
    assert "secret" not in line and "--api-key" not in line
    found = json.loads(line)
    assert found["server"]["software"] == "dialects" and found["server"]["version"] == {"version": "9.8.7"}
    assert found["server"]["model"]["id"] == "drafting" and found["interrupted"] is False
    assert found["command"].startswith(f"headlong bench serve --url {server.url} --model drafting")
    assert [(cell["concurrency"], cell["mtp"]) for cell in found["results"]] == [
        *((1, 2), (1, "off"), (2, 2), (2, "off"))
    ]
    tree = ElementTree.fromstring(picture.read_text())
    texts = [element.text for element in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert {"mtp 2", "mtp off", "tokens/s, all streams", "1", "2"} <= set(texts)
    # Throughput, then median and p99 of two latencies, for two settings.
    assert len(list(tree.iter("{http://www.w3.org/2000/svg}polyline"))) == 5 * 2


def test_keys(headlong: Headlong, monkeypatch: pytest.MonkeyPatch) -> None:
    with DialectServer(key="right") as server:
        asked = ("bench", "serve", "--url", server.url, "--model", "plain", "--requests", "1")
        for words, complaint in (
            ((), "the server wants a key"),
            (("--api-key", "wrong"), "refuses this key"),
        ):
            done = headlong(*asked, *words)
            assert done.code == 2 and complaint in done.err and "Incorrect API key" in done.err
        assert headlong(*asked, "--api-key", "right").code == 0
        monkeypatch.setenv("OPENAI_API_KEY", "right")
        assert headlong(*asked).code == 0
        monkeypatch.setenv("HEADLONG_API_KEY", "wrong")
        assert headlong(*asked).code == 2


def test_nobody_there_and_no_such_model(headlong: Headlong, server: DialectServer) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        done = headlong("bench", "serve", "--url", f"127.0.0.1:{taken.getsockname()[1]}")
    assert done.code == 2 and "no server answers there" in done.err and done.err.count("\n") == 1
    done = headlong("bench", "serve", "--url", server.url, "--model", "nonsense")
    assert done.code == 2 and "--model nonsense" in done.err and "does not exist" in done.err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--url ftp://x", "is not an address"),
        ("--url http://user:word@127.0.0.1", "leave user and password out"),
        ("--concurrency 0", "must be at least 1"),
        ("--concurrency 2000", "must be at most 1024"),
        ("--concurrency 1,2,3,4,5,6,7,8,9,10", "9 can be compared"),
        ("--requests 3 --concurrency 4", "too few for --concurrency 4"),
        ("--requests 200000", "more than 100000"),
        ("--duration nan", "must be above 0 and at most 3600"),
        ("--duration 1e9", "must be above 0 and at most 3600"),
        ("--rate -1", "--rate"),
        ("--mtp off,0", "must be of auto, on, off and numbers from 1, not '0'"),
        ("--mtp some", "not 'some'"),
        ("--temperature -1", "must be at least 0"),
        ("--body [1]", "must be a JSON object"),
        ("--plot x.png", "only SVG"),
        ("--plot /no/such/folder/x.svg", "no such folder"),
        ("--prompts no-such-file", "cannot be read"),
        ("extra", "unrecognized arguments: extra"),
    ],
)
def test_mistakes_are_one_sentence(headlong: Headlong, words: str, complaint: str) -> None:
    done = headlong("bench", "serve", *words.split())
    assert done.code == 2
    assert done.err.startswith("headlong bench serve: ") and complaint in done.err
    assert done.err.count("\n") == 1 and not done.out


def test_help_needs_no_http_client() -> None:
    script = (
        "import sys\nfrom headlong.cli.main import main\n"
        "try: main(['bench', 'serve', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'rich', 'httpx', 'asyncio'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: headlong bench serve")
    assert max(len(line) for line in done.stdout.splitlines()) <= 110


def test_ctrl_c_prints_what_was_measured(server: DialectServer) -> None:
    words = [sys.executable, "-m", "headlong.cli.main", "bench", "serve", "--url", server.url]
    words += ["--model", "steady", "--duration", "60", "--mtp", "off,on"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # Whoever runs the tests in the background ignores the signal, and children inherit that.
    heard = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    with subprocess.Popen(words, **pipes, **heard) as process:
        deadline = time.monotonic() + 30
        while len(server.bodies) < 5 and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and not err
    found = json.loads(out.splitlines()[-1])
    (result,) = found["results"]
    assert found["interrupted"] is True and result["complete"] is False
    assert result["completed"] >= 2 and result["errors"] == {} and "interrupted" in out
