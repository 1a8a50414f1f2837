"""Where the Ray of `headlong deploy` keeps its files on this machine, who may use it, and how others find it.

Imports no Ray, which reads its environment when it is imported.
"""

import contextlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nobody is told how often Headlong is used
    "GRPC_VERBOSITY": "ERROR",
    "GRPC_ENABLE_FORK_SUPPORT": "0",  # else gRPC logs whenever another process is started
}
"""What the environment says to Ray and gRPC where it says nothing else."""


@dataclass(frozen=True)
class Local:
    """A cluster of this machine's own, which ends with the process that started it."""

    pid: int
    address: str
    folder: str


def be_quiet() -> None:
    """Keeps Ray and gRPC from saying more than they must, here and in the processes they start."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def own_folder() -> Iterator[str]:
    """A folder for Ray's files as long as the block lasts, with a token that whoever uses this Ray must have. Its name
    is short: the paths of Ray's sockets may have no more than a hundred characters."""
    be_quiet()
    root = _root()
    root.mkdir(mode=0o700, exist_ok=True)
    folder = tempfile.mkdtemp(prefix="", dir=root)
    try:
        token = Path(folder) / "token"
        token.touch(0o600)
        token.write_text(secrets.token_hex(32), encoding="ascii")
        _stay_local(folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def noted(address: str, folder: str) -> Iterator[None]:
    """Lets other commands of this user find this process's cluster as long as the block lasts."""
    file = _root() / f"{os.getpid()}.json"
    file.write_text(json.dumps(asdict(Local(os.getpid(), address, folder))), encoding="utf-8")
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def on_this_machine() -> list[Local]:
    """The clusters of this user on this machine, the latest first. What a killed process left is removed."""
    found: list[tuple[float, Local]] = []
    for file in _root().glob("*.json"):
        try:
            one = Local(**json.loads(file.read_text(encoding="utf-8")))
            when = file.stat().st_mtime
        except (OSError, ValueError, TypeError):
            continue
        if _lives(one.pid):
            found.append((when, one))
        else:
            file.unlink(missing_ok=True)
            shutil.rmtree(one.folder, ignore_errors=True)
    return [one for _, one in sorted(found, key=lambda pair: -pair[0])]


def meant(address: str | None) -> str:
    """The cluster that is meant where nobody says: the latest that was started here, or the one this machine is in."""
    own = on_this_machine()
    if address is not None or not own:
        return address or "auto"
    _stay_local(own[0].folder)
    return own[0].address


def _root() -> Path:
    uid = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"headlong-{uid}"


def _stay_local(folder: str) -> None:
    """Keeps a Ray of this machine's own to loopback and to this user. By itself it would listen on every interface, and
    keep its token in the user's home. Whoever says in the environment how Ray is to authenticate is obeyed."""
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # Ray's word for one that others may join
    os.environ.setdefault("RAY_worker_niceness", "0")  # else replicas get what all others leave
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(Path(folder) / "token")}


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
