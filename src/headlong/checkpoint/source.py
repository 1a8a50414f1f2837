"""Finds the folder or the GGUF file on this machine that a user's name for a model stands for.

Decides between the embedded model, what is on this disk, a model inside a Python package and a Hugging Face repository,
and lists what is already here. Knows which files make a folder whole; nothing of what is in them.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from headlong.checkpoint import hub, packages
from headlong.checkpoint.shards import find_shards
from headlong.checkpoint.strict_json import read_object
from headlong.errors import CheckpointError
from headlong.progress import ProgressFn, silent

EMBEDDED_NAME = "tale-20m"
EMBEDDED = Path(__file__).parent.parent / "assets" / EMBEDDED_NAME

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_REPO_ID = re.compile(f"{_PART}/{_PART}")


@dataclass(frozen=True)
class LocalModel:
    """A model that needs no network. `name` is what `resolve` takes, `nbytes` the size of its weights."""

    name: str
    path: Path
    model_type: str
    nbytes: int


def resolve(model: str | Path | None, *, revision: str | None = None, progress: ProgressFn = silent) -> Path:
    """The folder or GGUF file of `model`: None for the embedded one, a path, the name of one that comes in a
    Python package (`smollm2`), or a repository id `owner/name`.

    What lies on this disk by that name comes first. A package or repository that is whole in the cache is taken from
    there without asking the network.
    """
    if model is None or (model == EMBEDDED_NAME and not Path(EMBEDDED_NAME).exists()):
        return EMBEDDED
    if not str(model).strip():
        raise CheckpointError("model: the name is empty; pass a folder or a repository id `owner/name`")
    try:
        path = Path(model).expanduser()
        exists = path.exists()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL inside, a home that is nobody's
        path, exists = Path(), False
    if exists:
        return _check_path(path)
    if isinstance(model, Path):
        raise CheckpointError(f"model: there is no folder {str(model)!r}")
    if model in packages.PACKAGES:
        return packages.fetch(model, progress)
    if not _is_repo_id(model):
        raise CheckpointError(
            f"model: {model!r} is neither an existing folder nor a Hugging Face repository id `owner/name`"
        )
    return _resolve_repo(model, revision, progress)


def names_model(text: str) -> bool:
    """Whether a word is a model's name rather than anything else a person may write: that of the embedded model or of
    a package, a path that exists and holds one, or `owner/name`. The network is not asked."""
    if text in (EMBEDDED_NAME, *packages.PACKAGES) or _is_repo_id(text):
        return True
    try:
        return (
            bool(text.strip())
            and Path(text).expanduser().exists()
            and bool(_check_path(Path(text).expanduser()))
        )
    except (CheckpointError, OSError, ValueError, RuntimeError):
        return False


def _is_repo_id(text: str) -> bool:
    return (
        bool(_REPO_ID.fullmatch(text))
        and len(text) <= 96
        and not any(bad in text for bad in ("--", ".."))
        and not text.endswith(".git")
    )


def _check_path(path: Path) -> Path:
    if path.is_file() and path.suffix == ".gguf":
        return path
    if not path.is_dir():
        raise CheckpointError(f"model: {path} is a file, but no .gguf; pass its folder, {path.parent}")
    if not (path / hub.CONFIG).exists() and not any((*path.glob("*.safetensors"), *path.glob("*.gguf"))):
        raise CheckpointError(
            f"model: {path} has neither {hub.CONFIG} nor .safetensors or .gguf files; "
            "pass the folder of a checkpoint"
        )
    return path


def _resolve_repo(repo: str, revision: str | None, progress: ProgressFn) -> Path:
    folder = hub.cached(repo, revision)
    if folder is not None and _is_whole(folder) and (folder / "tokenizer.json").exists():
        return folder
    try:
        return hub.download(repo, revision, progress)
    except CheckpointError:
        # Weights without a tokenizer still serve token ids, and not every repository has one to fetch.
        if folder is not None and _is_whole(folder):
            return folder
        raise


def _is_whole(folder: Path) -> bool:
    """True if the config and every weight file the index names are there."""
    shards = find_shards(folder)
    return (folder / hub.CONFIG).exists() and bool(shards.files) and not shards.missing()


def list_local() -> list[LocalModel]:
    """The embedded model, those of packages that were fetched, then every whole safetensors model in the Hugging Face
    cache."""
    models = [_describe(EMBEDDED_NAME, EMBEDDED)]
    models += [
        LocalModel(name, file, packages.PACKAGES[name].model_type, file.stat().st_size)
        for name, file in packages.fetched().items()
    ]
    models += [_describe(name, folder) for name, folder in hub.snapshots()]
    return [model for model in models if model is not None]


def _describe(name: str, folder: Path) -> LocalModel | None:
    """The listing of one folder, or None where it is no model that could be opened."""
    try:
        if not _is_whole(folder):
            return None
        model_type = read_object(folder / hub.CONFIG).get("model_type")
        shards = find_shards(folder)
        nbytes = sum((folder / file).stat().st_size for file in (*shards.files, *shards.sidecars))
    except (CheckpointError, OSError):  # one damaged entry must not hide the others
        return None
    return LocalModel(name, folder, model_type, nbytes) if isinstance(model_type, str) else None
