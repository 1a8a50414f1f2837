"""Makes a server's engines out of replicas: each model is a Serve application, which is updated in place."""

import asyncio
import threading
import time
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import ray
from ray import serve

from headlong.checkpoint import source
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.cluster import fingerprint
from headlong.cluster.app import DEPLOYMENT, Placement, application, name_of, version_of
from headlong.cluster.board import Board
from headlong.cluster.client import ClusterEngine
from headlong.cluster.fleet import Fleet
from headlong.cluster.machines import Room, check_room, left
from headlong.cluster.ray_fleet import RayFleet
from headlong.cluster.trouble import reason
from headlong.cluster.wire import Facts
from headlong.config import EngineConfig
from headlong.engine.texts import Texts, recommended_params
from headlong.errors import ConfigError, HeadlongError
from headlong.progress import ProgressFn

FIRST_WORD_SECONDS = 30.0
"""How long replicas that run may take to say what they are."""


class ClusterEngines:
    """Deploys models and connects to their replicas. An application ends with the last use of its model, but not with
    the server."""

    def __init__(self, room: Room, placement: Placement, *, join: bool) -> None:
        """With `join` replicas that run are taken however they are placed, if they are of the wanted model and
        settings."""
        self._room, self._placement, self._join = room, placement, join
        self._lock = threading.Lock()
        self._users: Counter[str] = Counter()
        self._left = False

    def load(self, model: str | Path | None, config: EngineConfig, progress: ProgressFn) -> "DeployedEngine":
        folder = source.resolve(model, progress=progress)
        checkpoint = Checkpoint.open(folder)
        texts, identity = Texts.read(checkpoint, config), fingerprint.of_model(folder)
        recommended_params(texts.recommended, folder)  # a wrong file is refused here, not with every request
        told = _absolute(model)
        name, count = name_of(told), self._placement.min_replicas
        options = options_of(config)
        wanted = _Wanted(version_of(told, options))
        if not self._join:
            wanted = _Wanted(wanted.version, repr(self._placement), identity)
        if not _runs(name, wanted):
            room = self._room if name in serve.status().applications else left(self._room)
            check_room(room, self._placement, weight_bytes(folder))
            progress("replicas", 0, count)
            _run(name, application(told, options, self._placement))
            progress("replicas", count, count)
        fleet = RayFleet(serve.get_deployment_handle(DEPLOYMENT, name))
        board = Board(fleet)
        board.start()
        try:
            facts = _first_word(board, identity, folder)
        except HeadlongError:
            board.close()
            raise
        with self._lock:
            self._users[name] += 1
        return DeployedEngine(self, name, fleet, board, facts, str(folder), texts)

    def reclaim(self) -> None:
        """Replicas end with their application."""

    def leave(self) -> None:
        """The server ends. Where Ray goes on without it, so do the replicas; else they end with Ray."""
        self._left = True

    def let_go(self, name: str) -> None:
        """One user less of an application. The last one ends it."""
        with self._lock:
            self._users[name] -= 1
            last = not self._users[name] and not self._left
        if last and ray.is_initialized():
            serve.delete(name)


class DeployedEngine(ClusterEngine):
    """The replicas of an application that ends with its last user."""

    def __init__(
        self,
        owner: ClusterEngines,
        name: str,
        fleet: Fleet,
        board: Board,
        facts: Facts,
        folder: str,
        texts: Texts,
    ) -> None:
        super().__init__(fleet, board, facts, folder, texts)
        self._owner: ClusterEngines | None = owner
        self._name = name

    async def close(self) -> None:
        await super().close()
        owner, self._owner = self._owner, None
        if owner is not None:
            await asyncio.to_thread(owner.let_go, self._name)


def options_of(config: EngineConfig) -> dict[str, Any]:
    """What of a config differs from the defaults, as keywords for another."""
    pairs = ((field.name, getattr(config, field.name), field.default) for field in fields(config))
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value, default in pairs
        if value != default and name != "map_files"
    }


def weight_bytes(folder: Path) -> int:
    """Bytes of a model's weights, as they are stored."""
    files = [folder] if folder.is_file() else [*folder.glob("*.safetensors"), *folder.glob("*.gguf")]
    return sum(file.stat().st_size for file in files)


def _absolute(model: str | Path | None) -> str | None:
    """The model as replicas find it, whatever folder they run in."""
    if model is None:
        return None
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else str(model)


@dataclass(frozen=True)
class _Wanted:
    """What replicas must be so that they need not be replaced; None is anything."""

    version: str
    placement: str | None = None
    model: str | None = None
    """The files that they loaded: others may lie there now, under the same name."""

    def is_met(self, facts: Facts) -> bool:
        return (
            facts.version == self.version
            and self.placement in (None, facts.placement)
            and self.model in (None, facts.model)
        )


def _runs(name: str, wanted: _Wanted) -> bool:
    """Whether the application runs as it is wanted, or is about to. Replicas that are busy or that begin anew are
    waited for: to deploy again would replace them all."""
    end = time.monotonic() + FIRST_WORD_SECONDS
    while time.monotonic() < end:
        told = serve.status().applications.get(name)
        if told is None or told.status not in ("RUNNING", "UNHEALTHY", "DEPLOYING"):
            return False
        reports = RayFleet(serve.get_deployment_handle(DEPLOYMENT, name)).reports()
        alike = [wanted.is_met(one.facts) for one in reports]
        if alike and len(set(alike)) == 1:
            return alike[0]
        time.sleep(0.2)
    return False


def _run(name: str, app: serve.Application) -> None:
    """Deploys, and waits until all replicas serve; what one of them could not do is told once."""
    try:
        serve.run(app, name=name, route_prefix=None)
    except RuntimeError as error:
        told = serve.status().applications.get(name)
        messages = [] if told is None else [one.message for one in told.deployments.values()]
        why = reason("\n".join([str(error), *messages]))
        serve.delete(name)
        raise ConfigError(f"a replica could not load its model: {why}") from error


def _first_word(board: Board, identity: str, folder: Path) -> Facts:
    end = time.monotonic() + FIRST_WORD_SECONDS
    while time.monotonic() < end:
        if known := board.facts(identity):
            return known[-1]
        if board.has_any:
            raise ConfigError(
                f"the files in {folder} are not those that the replicas loaded; give both machines the same model"
            )
        time.sleep(0.1)
    raise HeadlongError(f"no replica said what it is within {FIRST_WORD_SECONDS:.0f} s")
