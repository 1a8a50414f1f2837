"""`headlong doctor`: what it finds, and what it says is missing."""

import json
from pathlib import Path

import pytest
import torch

from headlong.checkpoint.source import EMBEDDED_NAME
from headlong.cli import machine
from headlong.env import available_cores
from headlong.ops import native
from support.command import Headlong


def test_the_page(headlong: Headlong) -> None:
    done = headlong("doctor")
    assert done.code == 0 and not done.err
    for name in (
        "Python",
        "PyTorch",
        "cores",
        "instructions",
        "native kernels",
        "C compiler",
        "GPU",
        "Triton",
    ):
        assert any(line.startswith(name) for line in done.out.splitlines()), name
    assert torch.__version__ in done.out and EMBEDDED_NAME in done.out and "Qwen/Qwen3.5-0.8B" in done.out


def test_json(headlong: Headlong) -> None:
    found = json.loads(headlong("doctor", "--json").out)
    facts = {one["name"]: one["found"] for one in found["findings"]}
    assert facts["cores"] == str(available_cores())
    models = {one["name"]: one for one in found["models"]}
    assert models[EMBEDDED_NAME]["local"] and models[EMBEDDED_NAME]["fits"]
    assert found["free_bytes"] == pytest.approx(machine.free_memory(), rel=0.5)
    for one in models.values():
        assert one["fits"] == (one["nbytes"] * machine.OVERHEAD <= found["free_bytes"]) or (
            0.5 < one["nbytes"] / found["free_bytes"] < 2  # memory comes and goes meanwhile
        )


def test_what_is_missing_is_advised(headlong: Headlong, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(native, "staleness", lambda: None)
    monkeypatch.setattr("shutil.which", lambda name: None)  # noqa: ARG005
    monkeypatch.delenv("HEADLONG_NATIVE", raising=False)
    page = headlong("doctor").out
    assert "native kernels  not built" in page and page.count("install gcc") >= 2
    monkeypatch.setenv("HEADLONG_NATIVE", "0")
    assert "unset HEADLONG_NATIVE" in headlong("doctor").out


def test_instructions(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor: 0\nflags\t\t: fpu sse2 avx2 fma avx512f amx_bf16\nbugs: none\n")
    assert machine.instructions(file) == ["avx2", "fma", "avx512f", "amx_bf16"]
    file.write_text("processor: 0\nFeatures\t: fp asimd i8mm\n")
    assert machine.instructions(file) == ["asimd", "i8mm"]
    assert len(machine.instructions(tmp_path / "none")) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory is the GPU's here")
def test_free_memory_is_the_least_bound(tmp_path: Path) -> None:
    assert machine.free_memory(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 400 kB\n")
    assert machine.free_memory(tmp_path) == 400 * 1024


def test_nobody_knows_how_much_memory_there_is(headlong: Headlong, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda: None)
    assert {one.fits for one in machine.fits()} == {None}
    page = headlong("doctor").out
    assert "unknown" in page
