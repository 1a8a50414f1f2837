"""JSON files in the user's cache folder: what was measured or counted once, for the engines that start later."""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

from headlong.env import cache_folder
from headlong.errors import ConfigError
from headlong.small_files import read_text

log = logging.getLogger(__name__)
T = TypeVar("T")


def place(kind: str, key: str) -> Path:
    """Raises ConfigError where nothing can be kept."""
    return cache_folder() / kind / f"{key}.json"


def load(
    find: Callable[[], Path],
    max_bytes: int,
    made_for: Mapping[str, Any],
    parse: Callable[[Any], T],
    again: str,
) -> T | None:
    """What was written to the file that `find` names, parsed; None if nothing was. A file that is damaged, or whose
    fields say that it was not `made_for` this, is ignored; the log says so, and which command writes it `again`."""
    try:
        file = find()
    except ConfigError:  # there is no place for it
        return None
    try:
        data = json.loads(read_text(file, max_bytes))
        if any(data[name] != value for name, value in made_for.items()):
            raise ValueError("it was written for something else")
        return parse(data)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        log.warning("%s is ignored (%s); `headlong %s` writes it anew", file, error or type(error), again)
        return None


def write(file: Path, data: Any) -> None:
    """Writes a file whole or not at all: a reader never sees half of one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, suffix=".tmp", delete=False) as temporary:
        try:
            json.dump(data, temporary, indent=1)
            temporary.close()
            Path(temporary.name).replace(file)
        except BaseException:
            Path(temporary.name).unlink(missing_ok=True)
            raise
