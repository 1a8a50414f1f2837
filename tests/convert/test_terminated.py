"""A command that writes and is told to end leaves nothing half written."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headlong.checkpoint.source import EMBEDDED

HALF_WAY = """
import importlib, sys, time
from headlong.cli.main import main

def wait(label, done, total):
    if 2 * done > total:
        print("half", flush=True)
        time.sleep(120)

importlib.import_module(f"headlong.cli.{sys.argv[1]}").default_progress = lambda: wait
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGTERM, "quantize --format int4 -o out"), (signal.SIGHUP, "convert -o out.gguf")],
)
def test_a_signal_leaves_nothing(tmp_path: Path, words: str, number: signal.Signals) -> None:
    command, *rest = words.split()
    with subprocess.Popen(
        [sys.executable, "-c", HALF_WAY, command, str(EMBEDDED), *rest],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        assert any(tmp_path.iterdir()), "there is something to put back"
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "Traceback" not in said
    assert list(tmp_path.iterdir()) == []
