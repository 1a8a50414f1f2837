"""`headlong deploy`: replicas of a model on Ray Serve with one server in front; `deploy status` and `deploy stop`.

Flags, and what is written for people; replicas are in cluster/. Imports no Ray: help must answer at once.
"""

import argparse
import contextlib
import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Any

from headlong.cli import serve as serving
from headlong.cli.terminal import note, say
from headlong.cluster.runtime import be_quiet, meant, on_this_machine, own_folder
from headlong.env import wait_passively
from headlong.errors import ConfigError
from headlong.server.settings import Settings

EPILOG = """\
Without --address Ray is started on this machine and ends with this command; with it, the replicas join a running
cluster and go on when this command ends: run it again, on any machine of the cluster, and it serves them.
All settings of `headlong serve` work as they do there.

examples:
  headlong deploy --replicas 2
  headlong deploy Qwen/Qwen3.5-0.8B --min-replicas 1 --max-replicas 8 --address auto
  headlong deploy Qwen/Qwen3.5-0.8B --replicas 4 --gpus-per-replica 1 --write serve.yaml
"""
ADDRESS = "a Ray cluster that runs: auto, or HOST:PORT"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "deploy",
        usage="headlong deploy [options] [MODEL]",
        help="serve replicas of a model on Ray Serve",
        description="Runs replicas of a model on Ray Serve, on one machine or many, with one server in front.",
        epilog=EPILOG,
    )
    group = parser.add_argument_group("replicas")

    def add(flag: str, kind: Any, metavar: str, text: str) -> None:
        group.add_argument(flag, type=kind, metavar=metavar, help=text)

    add("--replicas", int, "N", "replicas of the model (default: 1)")
    add("--min-replicas", int, "N", "with --max-replicas: as many as the work needs, at least so many")
    add("--max-replicas", int, "N", "and at most so many")
    add(
        "--target-tokens",
        int,
        "N",
        "tokens that each should have to do before there are more (default: 4096)",
    )
    add("--cpus-per-replica", float, "N", "CPUs for each (default: its share of what is there)")
    add("--gpus-per-replica", float, "N", "GPUs for each (default: 1 where there are any)")
    add(
        "--replica-drain-timeout",
        float,
        "SECONDS",
        "what a replica may take to finish before it goes (default: 30)",
    )
    add("--address", str, "ADDRESS", ADDRESS)
    add("--write", str, "FILE", "write the config that `serve deploy` takes instead, and end")
    serving.add_settings(parser)
    parser.set_defaults(execute=execute)
    _add_other(
        commands,
        "status",
        "show the replicas that run",
        "Shows the models and replicas on a cluster.",
        status,
    )
    _add_other(commands, "stop", "end them", "Ends all that `headlong deploy` started on a cluster.", stop)


def _add_other(commands: Any, name: str, text: str, description: str, execute: Any) -> None:
    parser = commands.add_parser(
        f"deploy {name}", usage=f"headlong deploy {name} [options]", help=text, description=description
    )
    parser.add_argument(
        "--address",
        metavar="ADDRESS",
        help=f"{ADDRESS} (default: what `headlong deploy` started here, or auto)",
    )
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    wait_passively()
    settings = serving.settings_of(args)
    wanted = _placement(args)
    _need_ray()
    if args.write is not None:
        return _write(args.write, settings, wanted)
    with contextlib.ExitStack() as stack:
        # Before Ray is imported.
        folder = stack.enter_context(own_folder()) if args.address is None else None
        return _serve(args, settings, wanted, folder)


def _serve(args: argparse.Namespace, settings: Settings, wanted: dict[str, Any], folder: str | None) -> int:
    from headlong.cluster.loader import ClusterEngines
    from headlong.cluster.machines import connected, placed
    from headlong.cluster.runtime import noted
    from headlong.server.run import bind, serve

    bind(settings).close()  # a port in use is told before Ray is started
    device = str(settings.engine_options.get("device", "auto"))
    with contextlib.ExitStack() as stack:
        room = stack.enter_context(connected(args.address, folder))
        if folder is not None:
            stack.enter_context(noted(room.address, folder))
        join = folder is None and not _says_how_many(args)
        loader = ClusterEngines(room, placed(room, wanted, device), join=join)
        return serve(settings, loader, loader.leave)


def status(args: argparse.Namespace) -> int:
    _need_ray()
    address = meant(args.address)
    from headlong.cluster.machines import connected
    from headlong.cluster.running import apps

    with connected(address):
        found = apps()
    if not found:
        say("nothing is deployed there")
    for app in found:
        say(f"{app.name}: {app.status.lower()}, {len(app.reports)} replicas")
        for report in app.reports:
            facts, usage = report.facts, report.stats.usage
            say(
                f"  {facts.replica} on {facts.node}: {usage.running} running, {usage.waiting} waiting, "
                f"{facts.description.device} {facts.description.dtype}, fingerprint {facts.fingerprint}"
            )
        if app.message:
            say(f"  {app.message.strip().splitlines()[-1]}")
    return 0


def stop(args: argparse.Namespace) -> int:
    _need_ray()
    if args.address is None and (own := on_this_machine()):
        for one in own:
            os.kill(one.pid, signal.SIGTERM)
            say(f"process {one.pid} finishes what it has and ends")
        return 0
    address = meant(args.address)
    from headlong.cluster.machines import connected
    from headlong.cluster.running import apps, delete

    with connected(address):
        names = [app.name for app in apps()]
        delete(names)
    say(f"ended: {', '.join(names)}" if names else "nothing is deployed there")
    return 0


def _says_how_many(args: argparse.Namespace) -> bool:
    names = ("replicas", "min_replicas", "max_replicas", "target_tokens")
    names += ("cpus_per_replica", "gpus_per_replica", "replica_drain_timeout")
    return any(getattr(args, name) is not None for name in names)


def _placement(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags say of replicas, by the names of `Placement`."""
    bounds = (args.min_replicas, args.max_replicas)
    if args.replicas is not None and bounds != (None, None):
        raise ConfigError(
            "--replicas is a number, --min-replicas and --max-replicas are bounds; use one or the other"
        )
    if args.min_replicas is not None and args.max_replicas is None:
        raise ConfigError("--min-replicas needs --max-replicas, the most that there may be")
    count = 1 if args.replicas is None else args.replicas
    least, most = (
        (args.min_replicas or 1, args.max_replicas) if args.max_replicas is not None else (count, count)
    )
    given = {
        "cpus": args.cpus_per_replica,
        "gpus": args.gpus_per_replica,
        "target_tokens": args.target_tokens,
        "drain_timeout": args.replica_drain_timeout,
    }
    return {"min_replicas": least, "max_replicas": most} | {
        name: value for name, value in given.items() if value is not None
    }


def _need_ray() -> None:
    """Called before Ray is imported, which reads its environment then."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("Ray is not installed; pip install 'headlong[ray]'")
    be_quiet()


def _write(file: str, settings: Settings, wanted: dict[str, Any]) -> int:
    import yaml

    from headlong.cluster.app import Placement, name_of, written

    device = str(settings.engine_options.get("device", "auto"))
    if "gpus" not in wanted:
        wanted["gpus"] = 1.0 if device.startswith("cuda") else 0.0
    config = written(name_of(settings.model), settings.model, settings.engine_with({}), Placement(**wanted))
    text = yaml.safe_dump(config, sort_keys=False)
    if file == "-":
        sys.stdout.write(text)
        return 0
    Path(file).write_text(text, encoding="utf-8")
    note(
        f"{file} is written. On the cluster: serve deploy {file}; then in front of it, with the same settings:"
    )
    note("headlong deploy --address auto [the same MODEL and options]")
    return 0
