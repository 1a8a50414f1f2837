"""Folders of models for tests: the embedded one under other names."""

import shutil
from pathlib import Path

from headlong.checkpoint.source import EMBEDDED


def place_model(folder: Path) -> Path:
    """The embedded model as another folder: small files copied, weights linked."""
    folder.mkdir(parents=True)
    for file in EMBEDDED.iterdir():
        if file.suffix == ".safetensors":
            (folder / file.name).symlink_to(file)
        else:
            shutil.copy(file, folder / file.name)
    return folder
