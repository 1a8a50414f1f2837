"""What commands say on a machine where no compiler built the native kernels."""

import io
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


@pytest.mark.skipif(native.library() is None, reason="native kernels are not built or turned off")
def test_nothing_is_said_where_they_serve() -> None:
    assert shortfall(choose_backend(torch.float32, CPU)) is None
