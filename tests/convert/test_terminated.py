"""A command that writes and is told to end leaves nothing half written."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headlong.checkpoint.leftovers import OLD, clear_leftovers
from headlong.checkpoint.source import EMBEDDED
from headlong.cli.main import main

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


@contextmanager
def half_way(folder: Path, words: str) -> Iterator[subprocess.Popen[str]]:
    """A command that has written half of what it writes, and waits."""
    command, *rest = words.split()
    with subprocess.Popen(
        [sys.executable, "-c", HALF_WAY, command, str(EMBEDDED), *rest],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        yield process


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGTERM, "quantize --format int4 -o out"), (signal.SIGHUP, "convert -o out.gguf")],
)
def test_a_signal_leaves_nothing(tmp_path: Path, words: str, number: signal.Signals) -> None:
    with half_way(tmp_path, words) as process:
        assert any(tmp_path.iterdir()), "there is something to put back"
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    ["convert -o out.gguf", pytest.param("quantize --format int4 -o out", marks=pytest.mark.slow)],
)
def test_what_a_killed_run_left_is_removed_by_the_next(
    tmp_path: Path, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """But not what another run is writing, nor what belongs to another name."""
    out = words.split()[-1]
    (tmp_path / ".out.other.12345678.partial").touch()
    with half_way(tmp_path, words) as process:
        (left,) = (file for file in tmp_path.iterdir() if file.name != ".out.other.12345678.partial")
        assert clear_leftovers(tmp_path / out) == [] and left.exists(), "it is being written"
        process.kill()
    assert left.exists()
    monkeypatch.chdir(tmp_path)
    command, *rest = words.split()
    assert main([command, str(EMBEDDED), *rest]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert f"{left.name} was removed: a run that was killed had left it half written" in said
    assert {file.name for file in tmp_path.iterdir()} == {out, ".out.other.12345678.partial"}


def test_a_model_that_a_killed_run_had_moved_away_is_put_back(tmp_path: Path) -> None:
    """It was killed in the moment in which one folder takes the place of another."""
    partial = tmp_path / ".out.abcd1234.partial"
    partial.mkdir()
    (tmp_path / (partial.name + OLD)).mkdir()
    (tmp_path / (partial.name + OLD) / "config.json").write_text("{}")
    said = clear_leftovers(tmp_path / "out")
    assert len(said) == 2 and any("put back" in one for one in said)
    assert os.listdir(tmp_path) == ["out"] and os.listdir(tmp_path / "out") == ["config.json"]
    partial.mkdir()
    (tmp_path / (partial.name + OLD)).mkdir()
    clear_leftovers(tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"] and os.listdir(tmp_path / "out") == ["config.json"]
