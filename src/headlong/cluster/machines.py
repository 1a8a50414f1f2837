"""Starts Ray on this machine or joins a running cluster, and says whether there is room for the replicas."""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError

from headlong.cluster.app import QUIET, Placement
from headlong.env import available_cores, available_memory
from headlong.errors import ConfigError

STORE_BYTES = 80 << 20
"""Ray's object store on this machine: replicas and front pass nothing through it but small values."""
log = logging.getLogger(__name__)
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
    may_grow: bool = False
    """Whether others may add machines to it."""


@contextlib.contextmanager
def connected(address: str | None, folder: str | None = None) -> Iterator[Room]:
    """Ray as long as the block lasts: the cluster at this address, or where there is a folder one of this process's
    own, which keeps its files there."""
    try:
        if folder is not None:
            ray.init(
                "local",
                _temp_dir=folder,
                num_cpus=available_cores(),
                include_dashboard=False,
                object_store_memory=STORE_BYTES,
                **QUIETLY,
            )
        else:
            _join(address or "auto")
        yield _room("the cluster" if folder is None else "this machine")
    finally:
        ray.shutdown()


def _join(address: str) -> None:
    try:
        ray.init(address, **QUIETLY)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        line = next(iter(str(error).splitlines()), "")
        raise ConfigError(f"address: no Ray cluster answers at {address!r} ({line})") from error


def _room(where: str) -> Room:
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    serve.start(proxy_location="Disabled", logging_config=QUIET)
    have = ray.cluster_resources()
    return Room(
        where=where,
        address=ray.get_runtime_context().gcs_address,
        cpus=have.get("CPU", 0.0),
        gpus=have.get("GPU", 0.0),
        memory=have.get("memory") if where == "the cluster" else available_memory(),
        may_grow=where == "the cluster",
    )


def left(room: Room) -> Room:
    """What others have not taken of it."""
    have = ray.available_resources()
    return replace(
        room, where=f"what is left of {room.where}", cpus=have.get("CPU", 0.0), gpus=have.get("GPU", 0.0)
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
    """Refuses replicas that could never all run, before anything is started. A cluster that others may add machines to
    is waited for, and that is told."""
    try:
        _check_room(room, placement, weight_bytes)
    except ConfigError as error:
        if not room.may_grow:
            raise
        log.warning("waiting until the cluster grows: %s", error)


def _check_room(room: Room, placement: Placement, weight_bytes: int) -> None:
    count = placement.min_replicas if room.may_grow else placement.max_replicas
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
