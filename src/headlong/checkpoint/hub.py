"""Models on Hugging Face: the local cache, downloads into it, and errors that say what to do next.

The one file that talks to `huggingface_hub`, which is imported late because that takes half a second that
local folders need not pay. Knows nothing of paths a user may pass; `source.py` decides between the two.
"""

import inspect
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from headlong.errors import CheckpointError
from headlong.progress import ProgressFn

CONFIG = "config.json"
ALLOW = [
    CONFIG,
    "generation_config.json",
    "model.safetensors.index.json",
    "*.safetensors",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
]
IGNORE = ["*/*", "consolidated*"]
"""Files that are not fetched: subfolders hold other formats, `consolidated` files repeat the weights under other
names."""


def cached(repo: str, revision: str | None) -> Path | None:
    """The cached snapshot of `repo`, complete or not, or None. A snapshot without a config is none."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, CONFIG, revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def snapshots() -> Iterator[tuple[str, Path]]:
    """Every cached model as (repo id, snapshot folder): `main` where it is there, else the newest."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        if repo.repo_type == "model" and repo.revisions:
            best = max(repo.revisions, key=lambda rev: ("main" in rev.refs, rev.last_modified))
            yield repo.repo_id, Path(best.snapshot_path)


def download(repo: str, revision: str | None, progress: ProgressFn) -> Path:
    """Downloads what is missing of `repo` into the cache and returns its snapshot folder."""
    try:
        return _download(repo, revision, progress)
    except CheckpointError:
        raise
    # The exception types of the library and of the HTTP client under it change from release to release;
    # the only thing they have in common is that the files did not arrive.
    except Exception as error:
        raise CheckpointError(_explain(repo, revision, error)) from error


def _download(repo: str, revision: str | None, progress: ProgressFn) -> Path:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    info = HfApi().model_info(repo, revision=revision, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or [] if _is_wanted(file.rfilename)}
    if not any(name.endswith(".safetensors") for name in sizes):
        raise CheckpointError(f"{repo!r} has no .safetensors files; choose a repository that has them")
    # The config comes last, with the snapshot: `cached` looks for it, so an interrupted download is never
    # taken for a whole one.
    for name in sorted(sizes.keys() - {CONFIG}):
        label, size = f"download {name}", max(sizes[name], 1)
        progress(label, 0, size)
        bars: dict[str, Any] = {}
        if "tqdm_class" in inspect.signature(hf_hub_download).parameters:  # newer than our oldest release
            bars["tqdm_class"] = _reporter(label, size, progress)
        hf_hub_download(repo, name, revision=info.sha, **bars)
        progress(label, size, size)
    quiet = _reporter("", 0, None)
    folder = snapshot_download(
        repo, revision=revision, allow_patterns=ALLOW, ignore_patterns=IGNORE, tqdm_class=quiet
    )
    return Path(folder)


def _is_wanted(name: str) -> bool:
    return any(fnmatch(name, p) for p in ALLOW) and not any(fnmatch(name, p) for p in IGNORE)


def _reporter(label: str, size: int, progress: ProgressFn | None) -> type:
    """A bar class that draws nothing and passes the bytes of one file on; None keeps it silent."""
    from huggingface_hub.utils.tqdm import tqdm

    class Reporter(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._bytes = int(kwargs.get("initial") or 0)  # an interrupted file resumes where it stopped
            kwargs["disable"] = True
            super().__init__(*args, **kwargs)

        def update(self, n: float | None = 1) -> None:
            self._bytes += int(n or 0)
            # The full size is reported by the caller, once the file is in its place.
            if progress is not None and self._bytes < size:
                progress(label, self._bytes, size)

    return Reporter


def _explain(repo: str, revision: str | None, error: Exception) -> str:
    """The error for a failed download of `repo`: one sentence that says what is wrong and what to do."""
    from huggingface_hub import errors

    by_hand = f"run `hf download {repo}` on a connected machine, copy that folder here and pass its path"
    if isinstance(error, errors.GatedRepoError):
        page = f"https://huggingface.co/{repo}"
        return (
            f"{repo!r} is gated: accept its terms at {page}, set HF_TOKEN to a token of yours and try again"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo!r} has no revision {revision!r} on Hugging Face: correct or drop the revision"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.RepositoryNotFoundError) or status == 401:
        return (
            f"Hugging Face has no model {repo!r} that you may see: check the spelling, "
            "or set HF_TOKEN if it is private"
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return (
            f"{repo!r} is not complete in the local cache and HF_HUB_OFFLINE forbids fetching it: "
            f"unset HF_HUB_OFFLINE, or {by_hand}"
        )
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{repo!r} could not be fetched from Hugging Face ({reason}): check the network, or {by_hand}"
