"""People's own clients, as their packages come: `make clients` installs them and runs these tests.

Each flow is a program of its own, run in its client's environment with nothing of this one's but where the server is.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from installed import HERE, INSTALLED

from support.eager import EagerServer

SECONDS = 90
PATH = os.pathsep.join([str(Path(shutil.which("node") or "/bin/sh").parent), "/usr/bin", "/bin"])
Run = Callable[..., str]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.clients)


@pytest.fixture(scope="session")
def server():
    with EagerServer(draft_tokens=3, prefix_cache=False) as running:
        yield running


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a client's program in an empty home, away from anybody's settings and keys."""

    def run(*command: str | Path, **variables: str) -> str:
        home = tmp_path / "home"
        home.mkdir(exist_ok=True)
        environment = {"PATH": PATH, "HOME": str(home), "NO_PROXY": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [str(part) for part in command],
            env=environment | variables,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            told, complaint = process.communicate(timeout=SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):  # nothing that it started is left
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, f"{told[-2000:]}\n{complaint[-4000:]}"
        return told

    return run


@pytest.fixture
def flow(run: Run, server: EagerServer, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs one of the flows, and returns what it tells."""

    def flow(*command: str | Path) -> dict[str, Any]:
        server.bodies.clear()
        server.server.observer.history.clear()
        told = run(*command, HEADLONG_URL=server.url, LLM_USER_PATH=str(tmp_path))
        return json.loads(told.splitlines()[-1])

    return flow


@pytest.fixture(scope="session", autouse=True)
def _installed() -> None:
    assert INSTALLED.is_dir(), "the clients are not installed; run `make clients`"


@pytest.fixture(scope="session")
def node() -> Path:
    """Where the packages of npm are."""
    if shutil.which("node") is None:
        pytest.skip("node is not on this machine; install Node.js 20 or newer with npm")
    return INSTALLED / "node"
