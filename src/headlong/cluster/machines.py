"""Starts Ray on this machine or joins a running cluster, and says whether there is room for the replicas.

Ray's files stay in one folder with a short name: the paths of its sockets may have no more than a hundred characters.
"""

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import serve

from headlong.cluster.app import QUIET, Placement
from headlong.env import available_cores, available_memory
from headlong.errors import ConfigError

STORE_BYTES = 80 << 20
"""Ray's object store on this machine: replicas and front pass nothing through it but small values."""
QUIETLY: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


@dataclass(frozen=True)
class Room:
    """What all machines together have."""

    where: str
    address: str
    """Where the cluster answers."""
    cpus: float
    gpus: float
    memory: float | None
    """Bytes; None where nobody knows."""


def runtime_folder() -> Path:
    """Where Ray's files of this user lie on this machine."""
    uid = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"headlong-{uid}"


def connected(address: str | None) -> contextlib.AbstractContextManager[Room]:
    """Ray as long as the block lasts: the cluster at this address, or one of this machine's own without an address."""
    # Nobody is told how often Headlong is used.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    return _started() if address is None else _joined(address)


@contextlib.contextmanager
def _started() -> Iterator[Room]:
    root = runtime_folder()
    root.mkdir(mode=0o700, exist_ok=True)
    folder = tempfile.mkdtemp(prefix="", dir=root)
    try:
        ray.init(
            "local",
            num_cpus=available_cores(),
            include_dashboard=False,
            object_store_memory=STORE_BYTES,
            _temp_dir=folder,
            **QUIETLY,
        )
        yield _room(None)
        with contextlib.suppress(Exception):  # what is left ends with Ray
            serve.shutdown()
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _joined(address: str) -> Iterator[Room]:
    try:
        ray.init(address, **QUIETLY)
    except (ConnectionError, RuntimeError, ValueError) as error:
        line = next(iter(str(error).splitlines()), "")
        raise ConfigError(f"address: no Ray cluster answers at {address!r} ({line})") from error
    try:
        yield _room(address)
    finally:
        ray.shutdown()


def _room(address: str | None) -> Room:
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    serve.start(proxy_location="Disabled", logging_config=QUIET)
    have = ray.cluster_resources()
    memory = available_memory() if address is None else have.get("memory")
    return Room(
        where="this machine" if address is None else "the cluster",
        address=ray.get_runtime_context().gcs_address,
        cpus=have.get("CPU", 0.0),
        gpus=have.get("GPU", 0.0),
        memory=memory,
    )


def placed(room: Room, placement: Mapping[str, float | None], device: str) -> Placement:
    """The placement with what was left open: a share of the CPUs, and a GPU each where there are GPUs and the device
    does not say otherwise."""
    given = {name: value for name, value in placement.items() if value is not None}
    if "gpus" not in given:
        given["gpus"] = 1.0 if room.gpus and device.partition(":")[0] in ("auto", "cuda") else 0.0
    if "cpus" not in given:
        given["cpus"] = max(1.0, room.cpus // given["max_replicas"])
    return Placement(**given)  # type: ignore[arg-type]


def check_room(room: Room, placement: Placement, weight_bytes: int) -> None:
    """Refuses replicas that could never all run, before anything is started."""
    count = placement.max_replicas
    for what, each, flag in (("CPUs", placement.cpus, "cpus"), ("GPUs", placement.gpus, "gpus")):
        have = getattr(room, flag)
        if count * each > have:
            fits = int(have // each)
            smaller = f"--replicas {fits}" if fits else f"--{flag}-per-replica {have:g}"
            share = f" or --cpus-per-replica {have / count:.2g}" if flag == "cpus" and have else ""
            raise ConfigError(
                f"{_replicas(count)} of {each:g} {what} each need {count * each:g}, and {room.where} has {have:g}: "
                f"use {smaller}{share}"
            )
    if not placement.gpus and room.memory is not None and count * weight_bytes > room.memory:
        fits = int(room.memory // weight_bytes)
        raise ConfigError(
            f"{_replicas(count)} of {weight_bytes / 1e9:.1f} GB of weights each need {count * weight_bytes / 1e9:.1f} "
            f"GB, and {room.where} has {room.memory / 1e9:.1f} GB of memory: use "
            + (f"--replicas {fits}" if fits else "a smaller model")
        )


def _replicas(count: int) -> str:
    return "1 replica" if count == 1 else f"{count} replicas"
