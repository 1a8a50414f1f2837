"""What `headlong deploy` left for other commands of the same user: which clusters it runs on this machine, and who
ends them; and what a cluster runs.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from ray import serve

from headlong.cluster.app import DEPLOYMENT
from headlong.cluster.machines import runtime_folder
from headlong.cluster.ray_fleet import RayFleet
from headlong.cluster.wire import Report

PREFIX = "headlong-"


@dataclass(frozen=True)
class Local:
    """A cluster of this machine's own, which ends with the process that started it."""

    pid: int
    address: str


@dataclass(frozen=True)
class App:
    """One model on a cluster, as Serve and its replicas tell of it."""

    name: str
    status: str
    message: str
    reports: tuple[Report, ...]


@contextlib.contextmanager
def noted(address: str) -> Iterator[None]:
    """Lets others find this process's cluster as long as the block lasts."""
    file = runtime_folder() / f"{os.getpid()}.json"
    file.write_text(json.dumps(asdict(Local(os.getpid(), address))), encoding="utf-8")
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def on_this_machine() -> list[Local]:
    """The clusters of this user on this machine, the latest first. What a killed process left is removed."""
    found: list[tuple[float, Local]] = []
    for file in runtime_folder().glob("*.json"):
        try:
            one = Local(**json.loads(file.read_text(encoding="utf-8")))
            when = file.stat().st_mtime
        except (OSError, ValueError, TypeError):
            continue
        if _lives(one.pid):
            found.append((when, one))
        else:
            file.unlink(missing_ok=True)
    return [one for _, one in sorted(found, key=lambda pair: -pair[0])]


def apps() -> list[App]:
    """The models that the connected cluster runs."""
    found = []
    for name, told in serve.status().applications.items():
        if name.startswith(PREFIX):
            reports = ()
            if told.status == "RUNNING":
                reports = tuple(RayFleet(serve.get_deployment_handle(DEPLOYMENT, name)).reports())
            found.append(App(name, str(told.status.value), told.message, reports))
    return found


def delete(names: list[str]) -> None:
    """Ends models; replicas finish what they have, within their time."""
    for name in names:
        serve.delete(name)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
