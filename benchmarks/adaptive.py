"""Adaptive draft depth against plain decoding and every fixed depth, on the embedded model.

    python benchmarks/adaptive.py [--rows 1,4,16] [--workloads stories,random,lists,mixed] [--depths 1,2,3,4,5,6]
                                  [--max-tokens 160] [--rounds 5] [--dtype auto]

Every round runs all contestants in turn on one engine, beginning with another one each time, so that a noisy machine
disturbs them alike. The first round warms up, lets the adaptive one get to know the machine and checks that everybody
gives the tokens of plain decoding; otherwise nothing is reported. A contestant's time is that of its decoding steps.
Ratios are taken within a round; medians over rounds. The best fixed depth is the one with the best median.
Ends in one JSON line.
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


@dataclass(frozen=True)
class Result:
    """One workload at one batch size; speeds are tokens per second, medians over the rounds."""

    workload: str
    rows: int
    speeds: dict[str, float]
    best_fixed: str
    adaptive_drafts: float
    over_plain: float
    over_best: float


def requests(llm: LLM, workload: str, rows: int, max_tokens: int) -> list[Request]:
    """A few texts even where one runs at a time: of a single one it is chance which depth suits it."""
    rng = random.Random(rows)
    made: list[Request] = []
    for number in range(max(rows, FEWEST)):
        kind = ("stories", "random")[number % 2] if workload == "mixed" else workload
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=number)
        if kind == "stories":
            chat = [{"role": "user", "content": STORIES[number % len(STORIES)]}]
            prompt = llm.service.encode_chat(chat)
            params = replace(params, temperature=0.0 if number < len(STORIES) else 0.6)
        elif kind == "random":
            prompt = tuple(rng.randrange(3, llm.engine.model.config.vocab_size) for _ in range(24))
            params = replace(params, temperature=1.5)
        else:
            prompt = llm.service.encode(LISTS[number % len(LISTS)])
        made.extend(llm.service.requests(prompt, params, f"{workload}{number}"))
    return made


def contestants(depths: list[int], max_drafts: int) -> dict[str, tuple[int, bool]]:
    """By name: draft_tokens and whether they are a limit only."""
    fixed = {("plain" if depth == 0 else f"K={depth}"): (depth, False) for depth in (0, *depths)}
    return fixed | {ADAPTIVE: (max_drafts, True)}


def run(llm: LLM, asked: list[Request], rows: int, depth: int, adaptive: bool) -> Job:
    """`rows` at a time, the next ones when all are done."""
    engine, waiting = llm.engine, list(asked)
    tokens: dict[str, tuple[int, ...]] = {request.id: () for request in asked}
    num_tokens, seconds, drafted, row_steps = 0, 0.0, 0, 0
    while engine.has_work or waiting:
        if not engine.has_work:
            for request in waiting[:rows]:
                engine.add(replace(request, draft_tokens=depth, adaptive=adaptive))
            del waiting[:rows]
        step = engine.step()
        for output in step.rows:
            tokens[output.request.id] += output.token_ids
        if not step.num_prompt_tokens:
            num_tokens += sum(len(output.token_ids) for output in step.rows)
            drafted += sum(output.num_drafted for output in step.rows)
            row_steps += len(step.rows)
            seconds += step.seconds
    return Job(tokens, num_tokens, seconds, drafted / row_steps)


def measure(
    llm: LLM,
    workload: str,
    rows: int,
    depths: list[int],
    max_tokens: int,
    rounds: int,
    advance: Callable[[], None],
) -> Result:
    """`advance` is called after each run of a contestant."""
    asked = requests(llm, workload, rows, max_tokens)
    names = contestants(depths, llm.engine.max_drafts)
    jobs: dict[str, list[Job]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        order = list(names)
        first = turn % len(order)
        for name in order[first:] + order[:first]:
            jobs[name].append(run(llm, asked, rows, *names[name]))
            advance()
            if jobs["plain"] and jobs[name][-1].tokens != jobs["plain"][0].tokens:
                raise SystemExit(f"{workload}, {rows} rows, {name}: tokens differ; no speed is reported")
    speeds = {name: [job.num_tokens / job.seconds for job in own[1:]] for name, own in jobs.items()}
    middle = {name: statistics.median(own) for name, own in speeds.items()}
    best = max((name for name in names if name != ADAPTIVE), key=lambda name: middle[name])

    def ratio(other: str) -> float:
        pairs = zip(speeds[ADAPTIVE], speeds[other], strict=True)
        return round(statistics.median(own / its for own, its in pairs), 3)

    drafts = statistics.median(job.drafts_per_row_step for job in jobs[ADAPTIVE][1:])
    rounded = {name: round(speed, 1) for name, speed in middle.items()}
    return Result(workload, rows, rounded, best, round(drafts, 2), ratio("plain"), ratio(best))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,4,16")
    parser.add_argument("--workloads", default="stories,random,lists,mixed")
    parser.add_argument("--depths", default="1,2,3,4,5,6")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    rows, depths = ([int(part) for part in text.split(",")] for text in (args.rows, args.depths))
    llm = LLM(dtype=args.dtype, mtp="on", max_rows=max(rows), max_draft_tokens=max(8, *depths))
    pairs = [(workload, count) for workload in args.workloads.split(",") for count in rows]
    results = []
    with Progress(console=Console(stderr=True)) as progress:
        runs = (args.rounds + 1) * len(contestants(depths, 0))
        task = progress.add_task("", total=len(pairs) * runs)
        for workload, count in pairs:
            progress.update(task, description=f"{workload}, {count} rows")
            advance = partial(progress.advance, task)
            results.append(measure(llm, workload, count, depths, args.max_tokens, args.rounds, advance))
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
            f"{result.over_plain:.3f}",
            f"{result.over_best:.3f}",
        )
    Console().print(table)
    conditions = {"cpu": platform.processor(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    print(
        json.dumps(
            {"benchmark": "adaptive"} | conditions | {"results": [asdict(result) for result in results]}
        )
    )


if __name__ == "__main__":
    main()
