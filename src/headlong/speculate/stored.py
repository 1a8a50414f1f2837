"""JSON files in the user's cache folder: what was measured or counted once, for the engines that start later."""

import json
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from headlong.env import cache_folder


def place(kind: str, key: str) -> Path:
    """Raises ConfigError where nothing can be kept."""
    return cache_folder() / kind / f"{key}.json"


def read(file: Path, max_bytes: int) -> Any:
    """Raises OSError or ValueError; what is inside is the caller's to check."""
    if file.stat().st_size > max_bytes:
        raise ValueError(f"it is larger than {max_bytes} bytes")
    return json.loads(file.read_text(encoding="utf-8"))


def write(file: Path, data: Any) -> None:
    """Whole or not at all: a reader never sees half a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, suffix=".tmp", delete=False) as temporary:
        try:
            json.dump(data, temporary, indent=1)
            temporary.close()
            Path(temporary.name).replace(file)
        except BaseException:
            Path(temporary.name).unlink(missing_ok=True)
            raise
