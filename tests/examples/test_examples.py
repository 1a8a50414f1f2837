"""The examples run as a user would run them: each in a process of its own, against a real server."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.serving import RunningServer

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def server():
    with RunningServer() as running:
        yield running


def run(server: RunningServer, name: str, *arguments: str) -> str:
    environment = os.environ | {"HEADLONG_URL": server.url, "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_chat(server):
    said = run(server, "chat.py")
    assert said.count("> ") == 2 and said.count("were drafted)") == 2


def test_structured_output(server):
    said = run(server, "structured_output.py")
    assert "a brave " in said or "a shy " in said


def test_tools(server):
    said = run(server, "tools.py")
    assert said.startswith("get_weather({'city': '") and "more days.\n" in said


def test_agent(server):
    """The small model may answer without a call; the runner's requests are what is tried."""
    history = server.server.observer.history
    history.clear()
    assert run(server, "agent.py").strip()
    assert {facts["endpoint"] for facts in history} == {"messages"}


def test_load(server):
    said = run(server, "load_test.py", "--clients", "9")
    assert said.startswith("9 clients: ") and "9 of 9 texts are those of the request alone" in said


def test_every_example_is_tried_and_listed():
    names = {path.name for path in EXAMPLES.glob("*.py")}
    tried = {f"{name.removeprefix('test_')}.py" for name in globals() if name.startswith("test_")}
    assert names - {"load_test.py"} <= tried and "load.py" in tried
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"`{name}`" in listed for name in names)
