"""Adaptive draft depth against plain decoding and every fixed depth, on the embedded model.

    python benchmarks/adaptive.py [--rows 1,4,16] [--workloads stories,random,lists,mixed] [--depths 1,2,3,4,6]
                                  [--max-tokens 96] [--sweep 2] [--rounds 7] [--dtype auto]

First a sweep over all contestants, in turns, beginning with another one each time: it warms up, lets the adaptive one
get to know the machine, checks that everybody gives the tokens of plain decoding (otherwise nothing is reported) and
finds the fixed depth with the best median. Then rounds of plain, that depth and adaptive alone, side by side, in turns.
A contestant's time is that of its decoding steps. Ratios are taken within a round; medians over rounds, with the
quartiles. Ends in one JSON line.
"""

import argparse
import json
import platform
import random
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from headlong import LLM, SamplingParams
from headlong.types import Request

ADAPTIVE = "adaptive"
FEWEST = 4
STORIES = (
    "Write a short story about a shy dragon who learns to share.",
    "Tell me about a girl who finds a lost kitten.",
    "Write a story about two friends and a kite.",
    "Explain rain to a child.",
)
LISTS = (
    "red, blue, green, red, blue, green, red, blue, green, red, blue,",
    "one two three four one two three four one two three four one two",
    "The cat sat. The dog ran. The cat sat. The dog ran. The cat sat.",
    "x = 1; y = 2; x = 1; y = 2; x = 1; y = 2; x = 1;",
)


@dataclass(frozen=True)
class Job:
    """What one contestant gave on one workload."""

    tokens: dict[str, tuple[int, ...]]
    num_tokens: int
    seconds: float
    drafts_per_row_step: float

    @property
    def speed(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(frozen=True)
class Result:
    """One workload at one batch size; speeds are tokens per second, medians: of the sweep, and of the rounds."""

    workload: str
    rows: int
    sweep: dict[str, float]
    best_fixed: str
    speeds: dict[str, float]
    adaptive_drafts: float
    over_plain: tuple[float, float, float]
    """Quartiles; the middle one is the median."""
    over_best: tuple[float, float, float]


def requests(llm: LLM, workload: str, rows: int, max_tokens: int) -> list[Request]:
    """Twice as many as run at a time, and a few even where that is one: of one text it is chance what suits it."""
    rng = random.Random(rows)
    made: list[Request] = []
    for number in range(max(2 * rows, FEWEST)):
        kind = ("stories", "random")[number % 2] if workload == "mixed" else workload
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=number)
        if kind == "stories":
            chat = [{"role": "user", "content": STORIES[number % len(STORIES)]}]
            prompt = llm.service.text.encode_chat(chat)
            params = replace(params, temperature=0.0 if number < len(STORIES) else 0.6)
        elif kind == "random":
            prompt = tuple(rng.randrange(3, llm.engine.model.config.vocab_size) for _ in range(24))
            params = replace(params, temperature=1.5)
        else:
            prompt = llm.service.text.encode(LISTS[number % len(LISTS)])
        made.extend(llm.service.requests(prompt, params, f"{workload}{number}"))
    return made


def contestants(depths: list[int], max_drafts: int) -> dict[str, tuple[int, bool]]:
    """By name: draft_tokens and whether they are a limit only."""
    fixed = {("plain" if depth == 0 else f"K={depth}"): (depth, False) for depth in (0, *depths)}
    return fixed | {ADAPTIVE: (max_drafts, True)}


def run(llm: LLM, requests_to_run: list[Request], rows: int, depth: int, adaptive: bool) -> Job:
    """`rows` at a time, the next one when one is done. Only steps with all of them decoding count: how a batch thins
    out at the end says nothing of a depth."""
    engine, waiting = llm.engine, list(requests_to_run)
    tokens: dict[str, tuple[int, ...]] = {request.id: () for request in requests_to_run}
    num_tokens, seconds, drafted, row_steps, running = 0, 0.0, 0, 0, 0
    while running or waiting:
        while waiting and running < rows:
            engine.add(replace(waiting.pop(0), draft_tokens=depth, adaptive=adaptive))
            running += 1
        step = engine.step()
        for output in step.rows:
            tokens[output.request.id] += output.token_ids
        if not step.num_prompt_tokens and running == rows:
            num_tokens += sum(len(output.token_ids) for output in step.rows)
            drafted += sum(output.num_drafted for output in step.rows)
            row_steps += len(step.rows)
            seconds += step.seconds
        running -= sum(output.finish_reason is not None for output in step.rows)
    return Job(tokens, num_tokens, seconds, drafted / row_steps)


class Contest:
    """One workload at one batch size."""

    def __init__(
        self, llm: LLM, workload: str, rows: int, max_tokens: int, advance: Callable[[], None]
    ) -> None:
        """`advance` is called after each run of a contestant."""
        self.llm, self.workload, self.rows = llm, workload, rows
        self.requests = requests(llm, workload, rows, max_tokens)
        self.advance = advance
        self.truth: dict[str, tuple[int, ...]] | None = None

    def run(self, names: dict[str, tuple[int, bool]], rounds: int) -> dict[str, list[Job]]:
        jobs: dict[str, list[Job]] = {name: [] for name in names}
        for turn in range(rounds):
            first = turn % len(names)
            for name in [*list(names)[first:], *list(names)[:first]]:
                job = run(self.llm, self.requests, self.rows, *names[name])
                self.truth = self.truth or job.tokens
                if job.tokens != self.truth:
                    raise SystemExit(
                        f"{self.workload}, {self.rows} rows, {name}: tokens differ; no speed is reported"
                    )
                jobs[name].append(job)
                self.advance()
        return jobs

    def result(self, names: dict[str, tuple[int, bool]], sweep: int, rounds: int) -> Result:
        found = medians(self.run(names, sweep))
        best = max((name for name in names if name != ADAPTIVE), key=lambda name: found[name])
        jobs = self.run({name: names[name] for name in dict.fromkeys(("plain", best, ADAPTIVE))}, rounds)
        return Result(
            self.workload,
            self.rows,
            found,
            best,
            medians(jobs),
            round(statistics.median(job.drafts_per_row_step for job in jobs[ADAPTIVE]), 2),
            ratios(jobs[ADAPTIVE], jobs["plain"]),
            ratios(jobs[ADAPTIVE], jobs[best]),
        )


def medians(jobs: dict[str, list[Job]]) -> dict[str, float]:
    return {name: round(statistics.median(job.speed for job in own), 1) for name, own in jobs.items()}


def ratios(own: list[Job], other: list[Job]) -> tuple[float, float, float]:
    found = [a.speed / b.speed for a, b in zip(own, other, strict=True)]
    low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
    return round(low, 3), round(middle, 3), round(high, 3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,4,16")
    parser.add_argument("--workloads", default="stories,random,lists,mixed")
    parser.add_argument("--depths", default="1,2,3,4,6")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--sweep", type=int, default=2, help="rounds in which every depth runs")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of plain, the best depth and adaptive")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    rows, depths = ([int(part) for part in text.split(",")] for text in (args.rows, args.depths))
    llm = LLM(dtype=args.dtype, mtp="on", max_rows=max(rows), max_draft_tokens=max(8, *depths))
    pairs = [(workload, count) for workload in args.workloads.split(",") for count in rows]
    names, results = contestants(depths, llm.engine.max_drafts), []
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(pairs) * (args.sweep * len(names) + args.rounds * 3))
        for number, (workload, count) in enumerate(pairs, 1):
            progress.update(task, description=f"{workload}, {count} rows")
            contest = Contest(llm, workload, count, args.max_tokens, partial(progress.advance, task))
            results.append(contest.result(names, args.sweep, args.rounds))
            progress.update(task, completed=number * (args.sweep * len(names) + args.rounds * 3))
    title = f"adaptive depth, {torch.get_num_threads()} threads, {args.max_tokens} tokens a row"
    table = Table("workload", "rows", "plain t/s", "best fixed", "adaptive", "drafts", title=title)
    for column in ("× plain", "× best"):
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(
            result.workload,
            str(result.rows),
            f"{result.speeds['plain']:.0f}",
            f"{result.best_fixed} {result.speeds[result.best_fixed]:.0f}",
            f"{result.speeds[ADAPTIVE]:.0f}",
            str(result.adaptive_drafts),
            *(
                f"{mid:.3f} ({low:.2f}–{high:.2f})"
                for low, mid, high in (result.over_plain, result.over_best)
            ),
        )
    Console(width=120).print(table)
    conditions = {"cpu": platform.processor(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    print(
        json.dumps(
            {"benchmark": "adaptive"} | conditions | {"results": [asdict(result) for result in results]}
        )
    )


if __name__ == "__main__":
    main()
