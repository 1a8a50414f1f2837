"""Tiny models on disk, written once: a target with a head, and others that could draft for it."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from support import tiny, tiny_llama


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    """`hybrid` has recurrent layers and a head, as has `forgetful`, whose next token depends on the last alone: its
    greedy text runs in circles. The others have no head."""
    folder = tmp_path_factory.mktemp("drafting")
    folders = {name: folder / name for name in ("hybrid", "forgetful", "llama", "recurrent", "other")}
    tiny.make(folders["hybrid"])
    tiny.make(folders["forgetful"], seed=8)
    tiny_llama.make(folders["llama"], seed=3, head=False)
    tiny.make(folders["recurrent"], seed=5, head=False)
    tiny_llama.make(folders["other"], seed=4, head=False, vocab_size=96)
    weights = load_file(folders["forgetful"] / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "out_proj.weight")):
            weight.zero_()
    save_file(weights, folders["forgetful"] / "model.safetensors")
    return folders
