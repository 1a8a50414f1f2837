"""Weights are laid out from the file where it lies; what serves then is the engine's own."""

import shutil

import pytest

from headlong import LLM, SamplingParams
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.source import EMBEDDED
from headlong.convert.to_gguf import to_gguf
from headlong.models import registry


@pytest.mark.parametrize("stored", ["safetensors", "f16", "q8_0"])
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_file_that_is_written_over_changes_nothing(tmp_path, stored, dtype):
    if stored == "safetensors":
        path = tmp_path / "model"
        shutil.copytree(EMBEDDED, path)
    else:
        path = tmp_path / "model.gguf"
        to_gguf(Checkpoint.open(EMBEDDED), path, type=stored)
    llm = LLM(path, device="cpu", dtype=dtype, max_rows=2, draft_tokens=2)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    before = llm.generate("Once upon a time", params)
    for info in registry.names_of(Checkpoint.open(path)).sources.values():
        with info.file.open("r+b") as file:
            file.seek(info.start)
            file.write(b"\x3b" * info.nbytes)
    assert llm.generate("Once upon a time", params).token_ids == before.token_ids
