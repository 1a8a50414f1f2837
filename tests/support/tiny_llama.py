"""Random tiny Llama checkpoints on disk, each with the transformers model that wrote it and a head like it."""

from pathlib import Path
from typing import Any

from support import tiny


def make(folder: Path, **sizes: Any) -> tiny.Tiny:
    return tiny.make(folder, "llama", **sizes)
