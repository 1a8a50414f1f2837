"""Many streaming clients with random cancels: nothing lost, nothing changed, nothing left behind.

The default run is short; the slow one is the two minutes with 64 clients whose figures are in docs/log/server.md.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.load_clients import bodies
from support.serving import RunningServer

TESTS = Path(__file__).parents[1]


def answers_alone(running: RunningServer) -> list[str]:
    """Each request's answer with nothing else running, and without drafting."""
    texts = []
    with running.client() as http:
        for body in bodies():
            answer = http.post("/v1/chat/completions", json=body | {"speculative": {"mtp": "off"}})
            texts.append(answer.json()["choices"][0]["message"]["content"])
    return texts


def drive(running: RunningServer, clients: int, seconds: float) -> dict:
    command = [sys.executable, "-m", "support.load_clients", running.url, str(clients), str(seconds), "0"]
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    done = subprocess.run(
        command, cwd=TESTS, env=environment, capture_output=True, text=True, timeout=seconds + 180, check=True
    )
    return json.loads(done.stdout)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


@pytest.mark.serial
@pytest.mark.parametrize(
    ("clients", "seconds", "least"),
    [(24, 6.0, 4), pytest.param(64, 120.0, 1000, marks=pytest.mark.slow)],
)
def test_every_answer_is_the_one_it_gives_alone(clients, seconds, least, capsys):
    with RunningServer() as running:
        alone = answers_alone(running)
        report = drive(running, clients, seconds)
        assert report["errors"] == []
        assert len(report["finished"]) >= least and report["cancelled"] > 0
        wrong = [number for number, text in report["finished"] if text != alone[number]]
        assert wrong == []
        deadline = time.monotonic() + 60
        usage = running.server.pool.current.client.stats().usage
        while (usage.running or usage.waiting) and time.monotonic() < deadline:
            time.sleep(0.05)
            usage = running.server.pool.current.client.stats().usage
        assert (usage.running, usage.waiting, usage.pages_used, usage.slots_used) == (0, 0, 0, 0)
        running.engine.check_integrity()
    gaps = report["gaps"]
    line = {
        "clients": clients,
        "seconds": seconds,
        "finished": len(report["finished"]),
        "cancelled": report["cancelled"],
        "gap_ms": {
            name: round(percentile(gaps, share) * 1000, 1) for name, share in (("p50", 0.5), ("p99", 0.99))
        }
        | {"max": round(max(gaps) * 1000, 1)},
    }
    with capsys.disabled():
        print(f"\n{json.dumps(line)}")
