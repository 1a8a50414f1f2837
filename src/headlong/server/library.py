"""The models that may be loaded by name: the embedded one, what lies under `model_dir`, and those in Python packages.

Turns names that came over the network into paths, and never into one outside. Knows nothing of engines.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from headlong.checkpoint.packages import PACKAGES
from headlong.checkpoint.source import EMBEDDED_NAME
from headlong.errors import ConfigError

_PART = r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}"
_NAME = re.compile(f"{_PART}(?:/{_PART})?")
_REPOSITORY = re.compile(f"{_PART}/{_PART}")
MAX_LISTED = 1000


@dataclass(frozen=True)
class Source:
    """A model's own name, and what loads it: a path, what a package or repository is called, or None for the embedded
    model."""

    id: str
    model: str | Path | None


EMBEDDED_SOURCE = Source(EMBEDDED_NAME, None)


class Library:
    """A folder of models, one level deep or two (`owner/name`). Looks at the disk every time it is asked."""

    def __init__(self, model_dir: str | None) -> None:
        self._root = None if model_dir is None else Path(model_dir).expanduser().resolve()
        if self._root is not None and not self._root.is_dir():
            raise ConfigError(f"model_dir: {self._root} is no folder; create it or correct the setting")

    def names(self) -> list[str]:
        """The names that `find` would find, sorted."""
        if self._root is None:
            return []
        found = []
        for folder in self._paths():
            name = folder.relative_to(self._root).as_posix()
            if self.find(name) is not None:
                found.append(name)
        return sorted(found)[:MAX_LISTED]

    def find(self, name: str) -> Path | None:
        """The path of a model under the root; None for anything else, wherever a link may lead."""
        if self._root is None or not _NAME.fullmatch(name):
            return None
        try:
            folder = (self._root / name).resolve(strict=True)
        except (OSError, RuntimeError):
            return None
        inside = folder.is_relative_to(self._root) and folder != self._root
        return folder if inside and _is_model(folder) else None

    def at_start(self, model: str | None) -> Source:
        """The source of the model that the operator named at start; any folder of this machine is allowed."""
        if model is None or model == EMBEDDED_NAME:
            return EMBEDDED_SOURCE
        folder = self.find(model)
        if folder is not None:
            return Source(model, folder)
        path = Path(model).expanduser()
        return Source(path.resolve().name, path) if path.exists() else Source(model, model)

    def by_name(self, name: str) -> Source | None:
        """The source of a model that a request names; None where there is no such model."""
        if name == EMBEDDED_NAME:
            return EMBEDDED_SOURCE
        folder = self.find(name)
        return None if folder is None else Source(name, folder)

    def by_admin(self, name: str) -> Source | None:
        """The source of a model that an admin names: whatever `by_name` finds, and also packages and repositories. A
        folder that happens to lie where the server was started is none."""
        found = self.by_name(name)
        fetched = name in PACKAGES or _REPOSITORY.fullmatch(name)
        if found is None and fetched and not Path(name).exists():
            return Source(name, name)
        return found

    def _paths(self) -> list[Path]:
        assert self._root is not None
        first = list(self._root.iterdir())
        outer = [path for path in first if path.is_dir() and not _is_model(path)]
        return [*first, *(inner for folder in outer for inner in folder.iterdir())]


def _is_model(path: Path) -> bool:
    """Whether a path is a model: a folder of safetensors, or a GGUF file that is not the head of another."""
    if path.suffix == ".gguf" and path.is_file():
        return not path.name.startswith("mtp-")
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))
