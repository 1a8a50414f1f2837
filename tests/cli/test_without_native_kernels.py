"""What commands say on a machine where no compiler built the native kernels."""

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headlong.cli.main import main
from headlong.ops import native
from headlong.ops.reference_backend import ReferenceBackend
from headlong.ops.registry import NO_LIBRARY, choose_backend, shortfall

CPU = torch.device("cpu")


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(native, "staleness", lambda: None)
    monkeypatch.delenv("HEADLONG_NATIVE", raising=False)


@pytest.mark.usefixtures("no_library")
@pytest.mark.parametrize("command", ["run", "chat", "bench"])
def test_one_line_says_what_it_costs(
    command: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    (tmp_path / "prompts.txt").write_text("Hello\n")
    rest = {
        "run": ["Hello"],
        "chat": [],
        "bench": ["--draft-tokens", "0", "--rounds", "1", "--prompts", str(tmp_path / "prompts.txt")],
    }
    assert main([command, *rest[command], "--max-tokens", "2"]) == 0
    assert [line for line in capsys.readouterr().err.splitlines() if "slower" in line] == [NO_LIBRARY]
    assert "install gcc" in NO_LIBRARY and "pip install" in NO_LIBRARY


@pytest.mark.usefixtures("no_library")
def test_nobody_is_told_what_they_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shortfall(choose_backend(torch.float32, CPU)) == NO_LIBRARY
    assert shortfall(ReferenceBackend(torch.float64, CPU)) is None, "native kernels take no float64"
    monkeypatch.setenv("HEADLONG_NATIVE", "0")
    assert shortfall(choose_backend(torch.float32, CPU)) is None


OTHER_LIBRARIES = {
    "older": "void headlong_rms_norm(void) {}",
    "of other sources": "\n".join(
        [
            *(f"void {name}(void) {{}}" for name in native._SIGNATURES),
            'char *headlong_sources(void) { return "0"; }',
        ]
    ),
}


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("source", OTHER_LIBRARIES.values(), ids=OTHER_LIBRARIES)
def test_a_library_of_another_version_is_left_alone(source: str, tmp_path: Path) -> None:
    """The reference serves, and one sentence says so and what to do."""
    built = tmp_path / "other.so"
    (tmp_path / "other.c").write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", built, tmp_path / "other.c"], check=True)
    done = subprocess.run(
        [sys.executable, "-m", "headlong.cli.main", "run", "Hello", "--max-tokens", "2"],
        env=os.environ | {"HEADLONG_NATIVE": str(built)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "slower" in line]
    assert str(built) in line and "pip install -e ." in line


@pytest.mark.skipif(native.library() is None, reason="native kernels are not built or turned off")
def test_nothing_is_said_where_they_serve() -> None:
    assert shortfall(choose_backend(torch.float32, CPU)) is None
