"""A server whose engine hangs: clients are told, /health says so, and the process ends with the documented status."""

import re
import threading
import time
import urllib.error
from pathlib import Path

from headlong.server.hung import EXIT_HUNG
from support.serve_command import serving

ROOT = Path(__file__).parents[2]
BLOCKING = """
import os, time
import headlong.engine.engine as engine
real = engine.Engine.step
def step(self):
    while os.path.exists(os.environ["GATE"]):
        time.sleep(0.05)
    return real(self)
engine.Engine.step = step
"""
BODY = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
CHAT = "/v1/chat/completions"


def test_a_stepper_that_blocks(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    flags = ("--log-format", "json", "--step-timeout", "1.5")
    with serving(*flags, before=BLOCKING, GATE=str(gate)) as server:
        assert server.ask(CHAT, BODY)[0] == 200
        assert server.ask("/health")[0] == 200
        gate.touch()
        answers: list[tuple[int, dict]] = []
        asking = threading.Thread(target=lambda: answers.append(server.ask(CHAT, BODY)))
        asking.start()
        asking.join(30)
        ((status, body),) = answers
        assert status == 503 and "hangs" in body["error"]["message"]
        status, health = server.ask("/health")
        assert status == 503 and health["status"] == "error" and "hangs" in health["reason"]
        assert server.ask(CHAT, BODY)[0] == 503
        started = time.monotonic()
        code, entries = server.wait()
        assert code == EXIT_HUNG and time.monotonic() - started < 20
        told = [entry["message"] for entry in entries if entry["level"] == "critical"]
        assert "in step" in told[0] and f"status {EXIT_HUNG}" in told[1], "where it hangs, and what follows"


def test_a_shutdown_that_hangs(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    flags = ("--step-timeout", "1.5", "--drain-timeout", "0.5", "--log-format", "json")
    with serving(*flags, before=BLOCKING, GATE=str(gate)) as server:
        gate.touch()
        asking = threading.Thread(target=lambda: _ask_in_vain(server))
        asking.start()
        time.sleep(0.5)
        server.signal(15)
        code, _ = server.wait()
        asking.join(30)
        assert code in (0, EXIT_HUNG), "it ends, whoever is quicker"


def _ask_in_vain(server) -> None:
    try:
        server.ask(CHAT, BODY)
    except (OSError, urllib.error.URLError):
        return


def test_supervisors_restart_on_it() -> None:
    unit = (ROOT / "release/headlong.service").read_text()
    assert re.search(r"^Restart=on-failure$", unit, re.MULTILINE)
    prevented = re.search(r"^RestartPreventExitStatus=(.*)$", unit, re.MULTILINE)
    assert prevented is None or str(EXIT_HUNG) not in prevented[1].split()
    assert "restart: unless-stopped" in (ROOT / "compose.yaml").read_text()
    assert f"`{EXIT_HUNG}`" in (ROOT / "docs/server.md").read_text()
