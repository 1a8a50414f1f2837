"""The Serve application: replicas of one model as one deployment, and where they are placed.

`headlong deploy` runs it; `build` makes the same of the arguments in a config that `serve deploy` takes.
"""

import gc
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.schema import LoggingConfig

from headlong import tracing
from headlong.cluster.autoscaling import TokenPolicy
from headlong.cluster.replica import Replica
from headlong.config import EngineConfig
from headlong.engine.local import LocalEngines
from headlong.errors import ConfigError
from headlong.progress import silent
from headlong.version import __version__

PREFIX = "headlong-"
"""How the names of all applications begin."""
DEPLOYMENT = "replicas"
ROUTER = "headlong.cluster.router.PrefixRouter"
IMPORT_PATH = "headlong.cluster.app:build"
STATS_SECONDS = 1.0
HEALTH_SECONDS = 1.0
"""How soon a replica that died is noticed by whoever starts another one."""
HEALTH_PATIENCE_SECONDS = 30.0
MAX_ONGOING = 10_000
"""Calls that a replica takes at a time: whoever waits does so in its engine's queue, where priorities count."""
QUIET = LoggingConfig(log_level="WARNING", enable_access_log=False)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How many replicas there are, and what each takes of the machines."""

    min_replicas: int = 1
    max_replicas: int = 1
    cpus: float = 1.0
    gpus: float = 0.0
    """Whole ones where the model is split between several, once it can be."""
    target_tokens: int = 4096
    """Tokens that each replica should have to read and to generate; with more, there will be more replicas."""
    drain_timeout: float = 30.0
    """Seconds that a replica which has to go may take for what it has; streams that are left go on elsewhere."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas <= 1024:
            raise ConfigError(
                f"replicas must be from 1 to 1024, the least before the most, not {self.min_replicas} to "
                f"{self.max_replicas}"
            )
        if self.cpus <= 0 or self.gpus < 0:
            raise ConfigError(
                f"a replica needs CPUs above 0 and GPUs from 0 on, not {self.cpus:g} and {self.gpus:g}"
            )


class ServedReplica(Replica):
    """A replica that loads its own engine. Ray Serve makes one in each replica's process."""

    def __init__(
        self, model: str | None, options: Mapping[str, Any], version: str, placement: Placement
    ) -> None:
        tracing.start("headlong-replica")
        engine = LocalEngines().load(model, EngineConfig(**options, map_files=False), silent)
        gc.collect()
        gc.freeze()  # to look for garbage among all modules takes long, and nothing else runs meanwhile
        super().__init__(engine, serve.get_replica_context().replica_id.unique_id, version, repr(placement))


def application(model: str | None, options: Mapping[str, Any], placement: Placement) -> Application:
    """Replicas of a model with these engine options. Deployed again, it replaces all of them, one after the other."""
    deployment: Any = serve.deployment(
        ServedReplica,
        name=DEPLOYMENT,
        ray_actor_options={"num_cpus": placement.cpus, "num_gpus": placement.gpus},
        max_ongoing_requests=MAX_ONGOING,
        graceful_shutdown_timeout_s=placement.drain_timeout,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=HEALTH_PATIENCE_SECONDS,
        max_constructor_retry_count=1,  # a model that cannot be loaded cannot be loaded twice either
        logging_config=QUIET,
        request_router_config={
            "request_router_class": ROUTER,
            "request_routing_stats_period_s": STATS_SECONDS,
        },
        **_how_many(placement),
    )
    return deployment.bind(model, dict(options), version_of(model, options), placement)


def _how_many(placement: Placement) -> dict[str, Any]:
    if placement.min_replicas == placement.max_replicas:
        return {"num_replicas": placement.min_replicas}
    policy = AutoscalingPolicy(
        policy_function=TokenPolicy, policy_kwargs={"target_tokens": placement.target_tokens}
    )
    bounds = AutoscalingConfig(
        min_replicas=placement.min_replicas, max_replicas=placement.max_replicas, policy=policy
    )
    return {"autoscaling_config": bounds}


def build(args: Mapping[str, Any]) -> Application:
    """What `serve deploy` calls, with the `args` that `headlong deploy --write` wrote."""
    known = {field.name for field in fields(Placement)}
    given = dict(args)
    model, options = given.pop("model", None), given.pop("engine", {})
    if unknown := sorted(given.keys() - known):
        raise ConfigError(
            f"args: there is no {unknown[0]!r}; there are model, engine, {', '.join(sorted(known))}"
        )
    return application(model, options, Placement(**given))


def written(name: str, model: str | None, options: Mapping[str, Any], placement: Placement) -> dict[str, Any]:
    """The config that `serve deploy` takes."""
    args = {"model": model, "engine": dict(options)} | asdict(placement)
    app = {"name": name, "route_prefix": None, "import_path": IMPORT_PATH, "args": args}
    return {"proxy_location": "Disabled", "applications": [app]}


def name_of(model: str | None) -> str:
    """The application's name for a model."""
    last = "tale-20m" if model is None else re.split(r"[/\\]", str(model).rstrip("/\\"))[-1]
    return f"{PREFIX}{re.sub(r'[^A-Za-z0-9.-]+', '-', last).strip('-') or 'model'}"


def version_of(model: str | None, options: Mapping[str, Any]) -> str:
    """Names what replicas are made of: those with another version are replaced."""
    facts = json.dumps([__version__, model, dict(options)], sort_keys=True, default=str)
    return hashlib.sha256(facts.encode()).hexdigest()[:16]
