"""Weights are laid out from the file where it lies; what serves then is the engine's own."""

import os
import shutil

import pytest

from headlong import LLM, SamplingParams
from headlong.checkpoint import load
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.source import EMBEDDED
from headlong.config import EngineConfig
from headlong.convert.to_gguf import to_gguf
from headlong.engine.service import Service
from headlong.errors import CheckpointError
from headlong.models import registry


def place(folder, stored):
    """The embedded model as `stored`; gives its path and the file with its weights."""
    if stored == "safetensors":
        shutil.copytree(EMBEDDED, folder)
        return folder, max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    path = folder.with_suffix(".gguf")
    to_gguf(Checkpoint.open(EMBEDDED), path, type=stored)
    return path, path


@pytest.mark.parametrize("stored", ["safetensors", "f16", "q8_0"])
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_file_that_is_written_over_changes_nothing(tmp_path, stored, dtype):
    path, _ = place(tmp_path / "model", stored)
    llm = LLM(path, device="cpu", dtype=dtype, max_rows=2, draft_tokens=2)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    before = llm.generate("Once upon a time", params)
    for info in registry.names_of(Checkpoint.open(path)).sources.values():
        with info.file.open("r+b") as file:
            file.seek(info.start)
            file.write(b"\x3b" * info.nbytes)
    assert llm.generate("Once upon a time", params).token_ids == before.token_ids


@pytest.mark.parametrize("stored", ["safetensors", "f16", "q8_0"])
def test_a_file_that_shrinks_under_a_server_is_an_error_and_no_signal(tmp_path, stored, monkeypatch):
    """A mapping would end the process with SIGBUS if the file shrank while its pages are read, so none is made."""
    monkeypatch.setattr(load, "map_tensor", lambda info: pytest.fail(f"{info.name} was mapped"))
    path, weights = place(tmp_path / "model", stored)
    size, told = weights.stat().st_size, []

    def shrink(*report: object) -> None:
        told.append(report)
        if len(told) == 2:
            os.truncate(weights, size // 3)

    with pytest.raises(CheckpointError, match=f"{weights.name}.*ends inside it"):
        Service.load(path, EngineConfig(device="cpu", map_files=False), shrink)
    assert len(told) >= 2
