"""`headlong deploy` with real replicas in processes of their own, of which one is killed while it streams."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from support.mixed_bodies import bodies, seen
from support.serve_command import Serving, serving
from support.serving import RunningServer

FLAGS = ("--replicas", "2", "--cpus-per-replica", "0.5", "--max-rows", "8", "--max-context", "1024")
PATIENCE = 60


def replicas(server: Serving) -> list[psutil.Process]:
    found = psutil.Process(server.process.pid).children(recursive=True)
    return [
        one for one in found if "ServeReplica" in one.name() or "ServeReplica" in "".join(one.cmdline()[:1])
    ]


def ask(client: httpx.Client, path: str, body: dict) -> object:
    with client.stream("POST", path, json=body) as answer:
        return seen(answer)


@pytest.mark.serial
def test_a_killed_replica_is_not_noticed(tmp_path):
    """Streams, tools, schemas, log-probabilities, several choices and prompts: each answer is what it gives alone on a
    server without replicas, though the replica that had it was killed."""
    asked = bodies(12, 200)
    with (
        RunningServer(max_rows=8, max_context=1024, generation_config="auto") as alone,
        alone.client() as client,
    ):
        truth = [ask(client, path, body) for path, body in asked]
    short = tmp_path / "t"
    short.mkdir()
    with (
        serving(*FLAGS, command="deploy", HOME=str(short)) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE, trust_env=False) as client,
        ThreadPoolExecutor(len(asked)) as threads,
    ):
        listed = client.get("/v1/stats").json()["replicas"]
        assert len(listed) == 2 and len(replicas(server)) == 2
        answers = [threads.submit(ask, client, path, body) for path, body in asked]
        _wait(lambda: all(_streams(one) for one in client.get("/v1/stats").json()["replicas"]))
        os.kill(replicas(server)[0].pid, signal.SIGKILL)
        for (path, body), answer, wanted in zip(asked, answers, truth, strict=True):
            assert answer.result(PATIENCE) == wanted, (path, body)
        told = client.get("/v1/stats").json()["replicas"]
        assert sum(one["taken_over"] for one in told) > 0, told
        assert [one["state"] for one in told].count("lost") == 1
        assert 'replica="' in client.get("/metrics").text
        with client.stream("POST", "/v1/completions", json=asked[0][1] | {"max_tokens": 900}) as answer:
            next(answer.iter_lines())
        # Whoever leaves is noticed on the replica.
        _wait(lambda: not any(one.get("running") for one in client.get("/v1/stats").json()["replicas"]))
        family = psutil.Process(server.process.pid).children(recursive=True)
        server.signal(signal.SIGTERM)
        code, log = server.wait()
    assert code == 0 and not psutil.wait_procs(family, 20)[1], "all ended"
    assert not any(entry["level"] in ("error", "critical") for entry in log)
    assert not list(short.iterdir()), "nothing was written into the home folder"


def _streams(replica: dict) -> bool:
    return replica["running"] > 2 and replica["completion_tokens"] > 100


def _wait(happened) -> None:
    end = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.serial
def test_a_model_that_cannot_be_loaded_is_told_of_once():
    words = [
        "deploy",
        "--device",
        "cuda",
        "--gpus-per-replica",
        "0",
        "--cpus-per-replica",
        "0.5",
        "--port",
        "0",
    ]
    code = "import sys; from headlong.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=200)
    said = "headlong deploy: a replica could not load its model: device 'cuda' was asked for, but torch sees no CUDA"
    assert done.returncode == 2 and said in done.stderr
    assert done.stderr.count("headlong deploy:") == 1 and "Traceback" not in done.stderr
