"""A cluster on paper: does the model of `cluster_model.py` foretell what `cluster.py` measured? And then a large one.

    python benchmarks/cluster_simulator.py [--measured benchmarks/measured_cluster.json] [--users 10000]
                                           [--replicas 20,24,32,40] [--seconds 60] [--picture FILE]

The measured run says what a step and a prompt's token cost one engine. Three costs are fitted, each to the throughput
of one case: what else a prompt costs (no replicas), what passing on a chunk does (one), what goes on beside each step
on the same cores (two). Hit rates, and the throughput of three by prefix and at random, are foretold. All must agree
within 15%, else the exit code is 1 and nothing is told of large clusters. On paper a replica is the 27B model in
bfloat16 on one H200, decoding plainly, with the step times of docs/log/gpu.md; users think, ask, and read on.
Everything that is assumed is printed. Ends in one JSON line.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster_model import Cluster, Machine, Outcome, Simulation
from cluster_picture import draw
from cluster_users import Habits, Queue, Thinkers
from turns_of_many import Workload

HERE = Path(__file__).parent
PICTURE = HERE.parent / "docs" / "images" / "replicas.svg"
TOLERANCE = 0.15
FITTED = ((0, ""), (1, "prefix"), (2, "prefix"))
ENGINE = {"max_rows": 16, "chunk_tokens": 512, "cache_tokens": 65_536}
"""What `cluster.py` gives its engines."""
H200 = Machine(
    steps=((1, 0.01325), (4, 0.01408), (16, 0.01672), (64, 0.0259)),
    prompt_token_seconds=1 / 5748,
    max_rows=64,
    chunk_tokens=512,
    cache_tokens=1_000_000,
)
HABITS = Habits(
    users=10_000,
    think_seconds=45.0,
    turns=6,
    families=20,
    family_tokens=1024,
    question_tokens=128,
    answer_tokens=256,
)
WARM_UP_SECONDS = 150.0
MIN_SPEED, MAX_FIRST = 20.0, 2.0
"""Enough for most: tokens a second that nine in ten answers reach, and seconds until the first token of 99 in 100."""


@dataclass(frozen=True)
class Case:
    """A small cluster, measured and foretold."""

    replicas: int
    routing: str
    tokens_per_second: float
    foretold_tokens_per_second: float
    hit_rate: float
    foretold_hit_rate: float

    @property
    def deviation(self) -> float:
        """The larger of the two, as a share of what was measured."""
        pairs = (
            (self.foretold_tokens_per_second, self.tokens_per_second),
            (self.foretold_hit_rate, self.hit_rate),
        )
        return max(abs(foretold / measured - 1) for foretold, measured in pairs)


@dataclass(frozen=True)
class Answer:
    """What so many replicas give all users, on paper."""

    replicas: int
    routing: str
    tokens_per_second: float
    hit_rate: float
    busy: float
    """The share of the time in which a replica steps."""
    first_p50: float
    first_p99: float
    speed_p50: float
    speed_p10: float

    @property
    def enough(self) -> bool:
        return self.speed_p10 >= MIN_SPEED and self.first_p99 <= MAX_FIRST


def machine_of(measured: dict[str, Any], prompt_seconds: float, chunk_seconds: float) -> Machine:
    known = measured["machine"]
    steps = tuple((int(rows), float(seconds)) for rows, seconds in known["steps"])
    fitted = {"prompt_seconds": prompt_seconds, "chunk_seconds": chunk_seconds}
    return Machine(steps, known["prompt_token_seconds"], **fitted, **ENGINE)


def small(measured: dict[str, Any], case: Sequence[Any], machine: Machine, beside: float = 0.0) -> Outcome:
    """One of the measured cases, on as many cores as there were; 0 replicas are an engine without a front."""
    replicas, routing = case
    how: Any = "random" if routing == "random" else "prefix"
    cores = measured["cores"] if replicas else None
    cluster = Cluster(max(1, replicas), machine, how, cores, beside)
    return Simulation(cluster, Queue(Workload(**measured["workload"]))).run()


def fitted(measured: dict[str, Any]) -> tuple[Machine, float]:
    """What was not measured by itself, each by one case: what a prompt costs besides its tokens by the engine without
    replicas, what passing on a chunk costs by one replica, and what goes on beside each step by two that share."""
    wanted = {case: found(measured, *case)["tokens_per_second"] for case in FITTED}
    alone, one, two = FITTED

    def speed(case: tuple[int, str], prompt: float, chunk: float = 0.0, beside: float = 0.0) -> float:
        return small(measured, case, machine_of(measured, prompt, chunk), beside).tokens_per_second

    prompt = _where(lambda value: speed(alone, value), wanted[alone])
    chunk = _where(lambda value: speed(one, prompt, value), wanted[one])
    beside = _where(lambda value: speed(two, prompt, chunk, value), wanted[two])
    return machine_of(measured, prompt, chunk), beside


def _where(speed: Callable[[float], float], wanted: float) -> float:
    """The seconds, to a few microseconds, at which a speed that falls with them is the wanted one."""
    low, high = 0.0, 0.02
    for _ in range(12):
        middle = (low + high) / 2
        if speed(middle) > wanted:
            low = middle
        else:
            high = middle
    return low


def compare(measured: dict[str, Any], machine: Machine, beside: float) -> list[Case]:
    cases = []
    for one in measured["results"]:
        if not one["replicas"]:
            continue
        outcome = small(measured, (one["replicas"], one["routing"]), machine, beside)
        cases.append(
            Case(
                one["replicas"],
                one["routing"],
                one["tokens_per_second"],
                round(outcome.tokens_per_second, 1),
                one["hit_rate"],
                round(outcome.hit_rate, 4),
            )
        )
    return cases


def foretell(habits: Habits, replicas: int, routing: str, seconds: float) -> Answer:
    """The large case, each replica with cores of its own."""
    cluster = Cluster(replicas, H200, "random" if routing == "random" else "prefix")
    outcome = Simulation(cluster, Thinkers(habits)).run(seconds, WARM_UP_SECONDS)
    first, speeds = (statistics.quantiles(values, n=100) for values in (outcome.first, outcome.speeds))
    return Answer(
        replicas,
        routing,
        round(outcome.tokens_per_second),
        round(outcome.hit_rate, 3),
        round(outcome.busy_seconds / outcome.seconds / replicas, 3),
        round(first[49], 3),
        round(first[98], 3),
        round(speeds[49], 1),
        round(speeds[9], 1),
    )


def assumptions(habits: Habits, front_seconds: float) -> list[str]:
    """Everything that the large case takes for granted, in sentences."""
    return [
        "A replica is the 27B model in bfloat16 on one H200, decoding plainly: a step of 1, 4, 16 and 64 rows takes "
        "13.25, 14.08, 16.72 and 25.9 ms, a prompt's token 1/5748 s more; 64 rows at most, 512 prompt tokens a step.",
        f"Its cache keeps {H200.cache_tokens:,} tokens, the least recently used go first, in pages of 64.",
        f"{habits.users:,} users think {habits.think_seconds:g} s on average before they ask, conversations have "
        f"{habits.turns} turns; a question has {habits.question_tokens} tokens, an answer {habits.answer_tokens} on "
        f"average (both pauses and answers exponentially distributed); {habits.families} system prompts of "
        f"{habits.family_tokens} tokens.",
        "Nobody fails, leaves or is scaled; reports are a second old; the network takes no time; contexts do not slow "
        "a step.",
        f"Fronts are apart: at the measured {1e6 * front_seconds:.0f} µs of a core for each token, without HTTP.",
    ]


def found(measured: dict[str, Any], replicas: int, routing: str) -> dict[str, Any]:
    return next(
        one for one in measured["results"] if (one["replicas"], one["routing"]) == (replicas, routing)
    )


def show_cases(cases: Sequence[Case]) -> None:
    table = Table("replicas", "routing", "tokens/s", "foretold", "hit rate", "foretold", "off by")
    for case in cases:
        speeds = (f"{case.tokens_per_second:.0f}", f"{case.foretold_tokens_per_second:.0f}")
        rates = (f"{case.hit_rate:.1%}", f"{case.foretold_hit_rate:.1%}")
        table.add_row(str(case.replicas), case.routing, *speeds, *rates, f"{case.deviation:.1%}")
    Console().print(table)


def show_answers(answers: Sequence[Answer], front_seconds: float) -> None:
    names = (
        "replicas",
        "routing",
        "tokens/s",
        "hit rate",
        "busy",
        "first p50",
        "p99",
        "tokens/s each",
        "p10",
    )
    table = Table(*names, "front cores", "enough")
    for each in answers:
        table.add_row(
            str(each.replicas),
            each.routing,
            f"{each.tokens_per_second:,.0f}",
            f"{each.hit_rate:.1%}",
            f"{each.busy:.0%}",
            f"{each.first_p50:.2f} s",
            f"{each.first_p99:.2f} s",
            f"{each.speed_p50:.0f}",
            f"{each.speed_p10:.0f}",
            str(math.ceil(each.tokens_per_second * front_seconds)),
            "yes" if each.enough else "no",
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measured", type=Path, default=HERE / "measured_cluster.json")
    parser.add_argument("--users", type=int, default=HABITS.users)
    parser.add_argument("--replicas", default="20,24,32,40")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    args = parser.parse_args()
    measured = json.loads(args.measured.read_text())
    cases = compare(measured, *fitted(measured))
    show_cases(cases)
    if any(case.deviation > TOLERANCE for case in cases):
        raise SystemExit(f"the model is off by more than {TOLERANCE:.0%}; nothing is foretold")
    habits = replace(HABITS, users=args.users)
    front_seconds = found(measured, 1, "prefix")["front_us_per_token"] / 1e6
    counts = [int(count) for count in args.replicas.split(",")]
    cases_of_many = [(count, routing) for routing in ("prefix", "random") for count in counts]
    with ProcessPoolExecutor() as workers:
        futures = [workers.submit(foretell, habits, *case, args.seconds) for case in cases_of_many]
        answers = [future.result() for future in futures]
    for line in assumptions(habits, front_seconds):
        print(f"- {line}")
    show_answers(answers, front_seconds)
    args.picture.write_text(draw(habits.users, [asdict(each) for each in answers]), encoding="utf-8")
    print(
        json.dumps(
            {
                "benchmark": "cluster_simulator",
                "cases": [asdict(case) for case in cases],
                "habits": asdict(habits),
                "answers": [asdict(each) for each in answers],
            }
        )
    )


if __name__ == "__main__":
    main()
