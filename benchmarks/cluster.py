"""What replicas on Ray Serve give: throughput of 1, 2, 3 of one thread each, prefix routing beside random routing, the
cost of the front.

    python benchmarks/cluster.py [--replicas 1,2,3] [--conversations 24] [--turns 4] [--clients 8] [--rounds 3]
                                 [--reference]

The embedded model, decoding plainly, one thread for each engine. An engine in this process answers conversations of
many turns first: its tokens are the truth, and its hit rate is what routing is measured by. Then the same conversations
go through `headlong deploy`'s own parts, by prefix for each number of replicas, at random for the largest. Reported is
the fastest of the rounds, each with conversations of its own; hit rates are the mean of all. The front's cost is the
processor's time of this process for each token: with replicas, all it does is to route, pass on and count. More
replicas than there are cores left beside the front share them, and the ratios show it. The embedded model's steps are
so short that what surrounds them counts as much; with `--reference` they are more like a large model's. If a token
differs, nothing is reported and the exit code is 1. Ends in one JSON line.
"""

import argparse
import asyncio
import json
import os
import pickle
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from headlong.cluster.runtime import own_folder
from headlong.config import EngineConfig
from headlong.engine.client import EngineClient
from headlong.engine.local import LocalEngines
from headlong.env import available_cores
from headlong.progress import silent
from turns_of_many import Run, Workload, drive

ROWS = (1, 2, 4, 8, 16)
OPTIONS = {"draft_tokens": 0, "max_rows": 16, "max_context": 1024, "cache_tokens": 65_536, "device": "cpu"}


@dataclass(frozen=True)
class Result:
    """The fastest of the rounds, since other work on the machine only slows; hit rates are the mean of all."""

    replicas: int
    """0 for an engine in this process."""
    routing: str
    tokens_per_second: float
    hit_rate: float
    strayed: float
    """The share of later turns that came to a replica without the turn before."""
    front_us_per_token: float
    """Microseconds of the processor in this process, of which the engine is a part where it has one."""
    busy_cores: float
    """Cores that all processes together kept busy."""
    first_ms: float
    pause_ms: float
    pause_p99_ms: float


def measure(client: EngineClient, workload: Workload, rounds: int) -> list[Run]:
    """Runs with conversations of their own each, after one that warms up."""
    asyncio.run(drive(client, replace(workload, conversations=workload.clients, turns=1, seed=-1)))
    return [asyncio.run(drive(client, replace(workload, seed=number))) for number in range(rounds)]


def costs(client: EngineClient, rounds: int) -> dict[str, Any]:
    """What the simulator wants to know of one engine: seconds of a step by rows, and of a prompt's token."""
    steps, prompts = [], []
    for rows in ROWS:
        work = Workload(rows, 1, rows, 0, 64, 0, 64, rows)
        found = [asyncio.run(drive(client, replace(work, seed=1000 + number))) for number in range(rounds)]
        # Other work on the machine makes steps longer, never shorter.
        steps.append((rows, min(run.step_seconds / run.steps for run in found)))
    for number in range(rounds):
        long = Workload(1, 1, 1, 0, 512, 0, 1, 1, seed=2000 + number)
        prompts.append(asyncio.run(drive(client, long)).first[0])
    return {"steps": steps, "prompt_token_seconds": (min(prompts) - steps[0][1]) / 512}


def result(replicas: int, routing: str, runs: list[Run], turns: int) -> Result:
    fastest = max(runs, key=lambda run: run.tokens_per_second)
    later = len(fastest.answers) * (turns - 1) / turns
    return Result(
        replicas,
        routing,
        round(fastest.tokens_per_second, 1),
        round(statistics.mean(run.hit_rate for run in runs), 4),
        round(statistics.mean(run.strayed for run in runs) / max(1, later), 4),
        round(min(1e6 * run.front_seconds / run.tokens for run in runs), 1),
        round(fastest.all_seconds / fastest.seconds, 3),
        round(1e3 * statistics.median(fastest.first), 2),
        round(1e3 * fastest.pause(50), 2),
        round(1e3 * fastest.pause(99), 2),
    )


@contextmanager
def alone() -> Iterator[EngineClient]:
    client = LocalEngines().load(None, EngineConfig(**OPTIONS, map_files=False), silent)
    try:
        yield client
    finally:
        asyncio.run(client.close())


@contextmanager
def replicated(count: int, routing: str) -> Iterator[EngineClient]:
    """Replicas on a Ray of this process's own, as `headlong deploy` starts it."""
    with own_folder() as folder:
        import headlong.cluster.app as app_module  # Ray reads how it is to authenticate when it is imported
        from headlong.cluster.loader import ClusterEngines
        from headlong.cluster.machines import connected

        router = "random_router.RandomRouter" if routing == "random" else app_module.ROUTER
        with connected(None, folder) as room, mock.patch.object(app_module, "ROUTER", router):
            cpus = room.cpus / (2 * count)
            placement = app_module.Placement(min_replicas=count, max_replicas=count, cpus=cpus)
            client = ClusterEngines(room, placement, join=False).load(None, EngineConfig(**OPTIONS), silent)
            try:
                yield client
            finally:
                asyncio.run(client.close())


def in_another_process(count: int, routing: str, given: list[str]) -> list[Run]:
    """Measures one case in a process of its own: where Serve knew an application before, it keeps its router."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "runs"
        case = ["--in-process", f"{count},{routing},{file}"]
        subprocess.run([sys.executable, __file__, *given, *case], check=True)
        return pickle.loads(file.read_bytes())


def same_answers(results: dict[tuple[int, str], list[Run]]) -> bool:
    truths = [run.answers for run in results[0, ""]]
    return all([run.answers for run in runs] == truths for runs in results.values())


def with_one_thread(reference: bool) -> None:
    """Starts anew where the environment, which replicas inherit, does not ask for one thread."""
    wanted = {"OMP_NUM_THREADS": "1"} | ({"HEADLONG_NATIVE": "0"} if reference else {})
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.environ |= wanted
        os.execv(sys.executable, [sys.executable, *sys.argv])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", default="1,2,3")
    parser.add_argument("--conversations", type=int, default=Workload.conversations)
    parser.add_argument("--turns", type=int, default=Workload.turns)
    parser.add_argument("--clients", type=int, default=Workload.clients)
    parser.add_argument("--answer-tokens", type=int, default=Workload.answer_tokens)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--reference", action="store_true", help="no native kernels: long steps")
    parser.add_argument("--in-process", help="used by itself")
    args = parser.parse_args()
    with_one_thread(args.reference)
    workload = Workload(
        conversations=args.conversations,
        turns=args.turns,
        clients=args.clients,
        answer_tokens=args.answer_tokens,
    )
    if args.in_process:
        count, routing, file = args.in_process.split(",")
        with replicated(int(count), routing) as client:
            Path(file).write_bytes(pickle.dumps(measure(client, workload, args.rounds)))
        return
    counts = [int(count) for count in args.replicas.split(",")]
    measured: dict[tuple[int, str], list[Run]] = {}
    with alone() as client:
        machine = costs(client, args.rounds)
        measured[0, ""] = measure(client, workload, args.rounds)
    for count, routing in [*((count, "prefix") for count in counts), (counts[-1], "random")]:
        measured[count, routing] = in_another_process(count, routing, sys.argv[1:])
    if not same_answers(measured):
        raise SystemExit("tokens differ; nothing is reported")
    results = [result(count, routing, runs, workload.turns) for (count, routing), runs in measured.items()]
    report(results, workload, machine)


def report(results: list[Result], workload: Workload, machine: dict[str, Any]) -> None:
    names = (
        "replicas",
        "routing",
        "tokens/s",
        "ratio",
        "hit rate",
        "front, µs a token",
        "first, ms",
        "pause, ms",
    )
    table = Table(*names, "p99, ms", title=f"{workload.clients} clients, {available_cores()} cores")
    fewest = next(each.tokens_per_second for each in results if each.replicas)
    for each in results:
        count = "in this process" if not each.replicas else str(each.replicas)
        ratio = f"{each.tokens_per_second / fewest:.2f}"
        table.add_row(
            count,
            each.routing,
            f"{each.tokens_per_second:.0f}",
            ratio,
            f"{each.hit_rate:.1%}",
            f"{each.strayed:.1%}",
            f"{each.front_us_per_token:.0f}",
            f"{each.busy_cores:.2f}",
            *(f"{value:.1f}" for value in (each.first_ms, each.pause_ms, each.pause_p99_ms)),
        )
    Console().print(table)
    conditions = {
        "cpu": platform.processor(),
        "cores": available_cores(),
        "torch": torch.__version__,
        "workload": asdict(workload),
        "machine": machine,
        "reference": os.environ.get("HEADLONG_NATIVE") == "0",
    }
    print(json.dumps({"benchmark": "cluster"} | conditions | {"results": [asdict(each) for each in results]}))


if __name__ == "__main__":
    main()
