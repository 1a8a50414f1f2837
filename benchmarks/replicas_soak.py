"""Clients before replicas of which one is killed again and again: none lost, none wrong, and how long the pauses are.

    python benchmarks/replicas_soak.py [--replicas 3] [--clients 64] [--minutes 5] [--kill-every 20] [--kinds 48]
                                       [--length 120] [--cpus-per-replica 0.5] [MODEL]

A Ray of its own on loopback, and `headlong deploy --address` in front. Requests are drawn from a set whose every truth
is known: what each gives alone on a server without replicas. First replicas are killed with SIGKILL, each time another
one; then all are replaced by others with other settings, under the same load, and then by one replica less; then the
front itself ends and begins again, and clients that were cut off ask once more. Ends in one JSON line, with exit
code 1 if a request was lost or wrong.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from headlong.cluster.runtime import own_folder
from support.mixed_bodies import Body, bodies, events, gathered
from support.serve_command import Serving
from support.serving import RunningServer

ROWS, CONTEXT = 8, 1024
PHASE_SECONDS = 60.0
"""How long the load goes on in each phase after the first."""
TIMEOUT = 300.0
Asked = tuple[str, Body]


@dataclass(frozen=True)
class Request:
    """One request as its client saw it."""

    began: float
    ended: float
    longest_gap: float
    outcome: str
    """`right`, `wrong`, `lost`, or `cut` where the front ended and it was asked again."""


@dataclass
class Load:
    """Clients that ask one request after the other until they are told to stop."""

    asked: list[Asked]
    truth: list[Any]
    url: str
    retries: bool = False
    """Whether a client that was cut off asks again."""
    done: list[Request] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def start(self, clients: int) -> list[threading.Thread]:
        threads = [
            threading.Thread(target=self._ask_on, args=(number,), daemon=True) for number in range(clients)
        ]
        for thread in threads:
            thread.start()
        return threads

    def _ask_on(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self.stop.is_set():
            number = rng.randrange(len(self.asked))
            while self._ask(number) == "cut":
                time.sleep(0.5)

    def _ask(self, number: int) -> str:
        path, body = self.asked[number]
        began, last, gap = time.monotonic(), time.monotonic(), 0.0
        outcome, parts = "lost", []
        try:
            with (
                httpx.Client(base_url=self.url, timeout=TIMEOUT, trust_env=False) as client,
                client.stream("POST", path, json=body) as answer,
            ):
                if answer.status_code != 200:
                    raise OSError(f"{answer.status_code}: {answer.read()!r}")
                for part in _parts(answer):
                    gap, last = max(gap, time.monotonic() - last), time.monotonic()
                    parts.append(part)
            outcome = "right" if gathered(parts) == self.truth[number] else "wrong"
        except (OSError, AssertionError, httpx.HTTPError) as error:
            if self.retries:
                outcome = "cut"
            else:
                self.complaints.append(f"request {number}: {error!r}"[:500])
        if outcome == "wrong":
            self.complaints.append(f"request {number} ({path}) is not what it gives alone")
        self.done.append(Request(began, time.monotonic(), gap, outcome))
        return outcome


def _parts(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    if answer.headers["content-type"].startswith("text/event-stream"):
        yield from events(answer.iter_lines())
    else:
        answer.read()
        yield answer.json()


def replicas() -> list[psutil.Process]:
    """The processes of replicas of this process's Ray."""
    found = psutil.Process().children(recursive=True)
    return [one for one in found if "ServeReplica" in one.name()]


@dataclass
class Seen:
    """Every replica that the front told of, as it was told of last, and how long others took to take its place."""

    replicas: dict[str, dict[str, Any]] = field(default_factory=dict)
    starts: list[float] = field(default_factory=list)

    def look(self, url: str, killed: float) -> None:
        """`killed` is when one was killed last, in seconds since 1970."""
        stats = httpx.get(f"{url}/v1/stats", timeout=30, trust_env=False).json()
        for one in stats["replicas"]:
            if one["id"] not in self.replicas and one["started"] > killed > 0:
                self.starts.append(one["started"] - killed)
            self.replicas[one["id"]] = one

    @property
    def resumed(self) -> int:
        """Streams that replicas took over from others."""
        return sum(one["taken_over"] for one in self.replicas.values())


def kill_on(seconds: float, every: float, load: Load, seen: Seen) -> list[float]:
    """Kills a replica now and then. Returns when."""
    rng, kills, end, killed = random.Random(0), [], time.monotonic() + seconds, 0.0
    while time.monotonic() + every <= end:
        time.sleep(every)
        seen.look(load.url, killed)
        alive = replicas()
        if alive:
            victim = rng.choice(alive)
            os.kill(victim.pid, signal.SIGKILL)
            kills.append(time.monotonic())
            killed = time.time()
            counts = Counter(one.outcome for one in load.done)
            print(
                f"killed {victim.pid}, {len(alive) - 1} are left; {dict(counts)}; load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    return kills


def summary(done: list[Request], kills: list[float]) -> dict[str, Any]:
    """Counts, and the longest gap of every request that ran when a replica was killed beside those of all others."""
    met = [one for one in done if any(one.began < at < one.ended for at in kills)]
    others = [one.longest_gap for one in done if one.outcome == "right" and one not in met]
    return {
        "requests": dict(Counter(one.outcome for one in done)),
        "killed": len(kills),
        "met_a_kill": len(met),
        "pause": _quantiles([one.longest_gap for one in met]),
        "pause_of_others": _quantiles(others),
    }


def _quantiles(values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": round(cuts[49], 3), "p99": round(cuts[98], 3), "max": round(max(values), 3)}


def front(address: str, args: argparse.Namespace, *more: str, port: int = 0) -> Serving:
    flags = ("--address", address, "--cpus-per-replica", str(args.cpus_per_replica))
    flags += ("--max-context", str(CONTEXT), "--port", str(port), "--max-connections", "4096", *more)
    model = () if args.model is None else (args.model,)
    return Serving(*flags, *model, command="deploy")


def ended(server: Serving) -> None:
    server.signal(signal.SIGTERM)
    try:
        server.process.wait(90)
    except subprocess.TimeoutExpired:
        server.process.kill()


def run(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    from headlong.cluster.machines import connected

    asked = bodies(args.kinds, args.length)
    given = {"max_rows": ROWS, "max_context": CONTEXT, "generation_config": "auto", "model": args.model}
    with RunningServer(**given) as alone, alone.client() as client:
        truth = []
        for path, body in asked:
            with client.stream("POST", path, json=body) as answer:
                truth.append(gathered(_parts(answer)))
    print(f"{len(truth)} truths", flush=True)
    with connected(None, folder) as room:
        count = ("--replicas", str(args.replicas))
        server = front(room.address, args, *count, "--max-rows", str(ROWS))
        load = Load(asked, truth, server.url)
        threads = load.start(args.clients)
        found: dict[str, Any] = {"replicas": args.replicas, "clients": args.clients}
        seen = Seen()
        kills = kill_on(args.minutes * 60, args.kill_every, load, seen)
        seen.look(load.url, 0.0)
        found["kills"] = summary(load.done, kills)
        found["kills"] |= {"resumed": seen.resumed, "seconds_to_start": _quantiles(seen.starts)}
        print(json.dumps(found["kills"]), flush=True)

        fewer = ("--replicas", str(max(1, args.replicas - 1)))
        for name, flags in (("rolling_update", count), ("scaled_down", fewer)):
            before, load.done = len(replicas()), []
            other = front(room.address, args, *flags, "--max-rows", str(ROWS + 1))
            time.sleep(PHASE_SECONDS / 2)
            found[name] = summary(load.done, []) | {"replicas_before": before, "after": len(replicas())}
            print(json.dumps(found[name]), flush=True)
            ended(other)

        load.retries, load.done = True, []
        port = int(server.url.rpartition(":")[2])
        ended(server)
        server = front(room.address, args, *fewer, "--max-rows", str(ROWS + 1), port=port)
        time.sleep(PHASE_SECONDS / 2)
        load.stop.set()
        for thread in threads:
            thread.join(TIMEOUT)
        load.complaints += ["a request never ended" for thread in threads if thread.is_alive()]
        found["front_restarted"] = summary(load.done, [])
        ended(server)
    found["complaints"] = load.complaints[:20]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--kill-every", type=float, default=20.0)
    parser.add_argument("--kinds", type=int, default=48)
    parser.add_argument("--length", type=int, default=120)
    parser.add_argument("--cpus-per-replica", type=float, default=0.5)
    args = parser.parse_args()
    with own_folder() as folder:
        found = run(args, folder)
    print(json.dumps(found))
    phases = [found[name] for name in ("kills", "rolling_update", "scaled_down", "front_restarted")]
    bad = sum(phase["requests"].get(outcome, 0) for phase in phases for outcome in ("wrong", "lost"))
    return 1 if bad or found["complaints"] else 0


if __name__ == "__main__":
    sys.exit(main())
