"""What `headlong deploy --write` writes is taken by Ray's own `serve deploy`, and a front finds what it deployed."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from headlong.cli.main import main
from headlong.cluster.runtime import own_folder
from support.serve_command import serving

WORDS = ("--replicas", "2", "--cpus-per-replica", "0.5", "--max-rows", "4", "--max-context", "512")
PATIENCE = 120


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    """A Ray cluster on loopback that others than this process started. Gives the addresses of its control store and of
    its dashboard, which `serve deploy` talks to."""
    pytest.importorskip("ray.serve", reason="needs headlong[ray]")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2] / "src")]))
    port, dashboard = _free_port(), _free_port()
    with own_folder() as folder:
        flags = [
            "--head",
            "--block",
            "--node-ip-address",
            "127.0.0.1",
            "--port",
            str(port),
            "--num-cpus",
            "2",
        ]
        flags += ["--temp-dir", folder, "--dashboard-host", "127.0.0.1", "--dashboard-port", str(dashboard)]
        ray = subprocess.Popen(
            [_command("ray"), "start", *flags], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
        )
        try:
            yield f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}"
        finally:
            ray.send_signal(signal.SIGTERM)
            ray.wait(PATIENCE)


@pytest.mark.slow
@pytest.mark.serial
def test_what_is_written_is_deployed(cluster, tmp_path):
    address, dashboard = cluster
    file = tmp_path / "serve.yaml"
    assert main(["deploy", *WORDS, "--write", str(file)]) == 0
    end = time.monotonic() + PATIENCE
    while (done := _serve("deploy", str(file), "--address", dashboard)).returncode:
        assert time.monotonic() < end, done.stdout + done.stderr
        time.sleep(1.0)
    while "status: RUNNING" not in (told := _serve("status", "--address", dashboard).stdout):
        assert time.monotonic() < end and "DEPLOY_FAILED" not in told, told
        time.sleep(1.0)
    # The same model and settings, and no word of replicas: what runs is taken as it is.
    with serving("--address", address, "--max-rows", "4", "--max-context", "512", command="deploy") as server:
        replicas = httpx.get(f"{server.url}/v1/stats").json()["replicas"]
        assert [one["state"] for one in replicas] == ["ready", "ready"]
        body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE)
        assert answer.json()["usage"]["completion_tokens"] == 8
        server.signal(signal.SIGTERM)
        assert server.wait()[0] == 0
    assert "status: RUNNING" in _serve("status", "--address", dashboard).stdout, (
        "replicas go on without their front"
    )


def _serve(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([_command("serve"), *words], capture_output=True, text=True, timeout=PATIENCE)


def _command(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
