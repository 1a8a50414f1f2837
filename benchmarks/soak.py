"""Many requests through one engine, with faults injected and clients that leave: none lost, none wrong, memory flat.

    python benchmarks/soak.py [--tiny 100000] [--embedded 5000] [--minutes 0] [--fault-rate 0.003] [--seed 0]
                              [--device cpu] [--kinds 5] [--together 40]

A random tiny model first, then the embedded one. Requests are drawn from a set whose every truth is known: the tokens
each gives alone, without drafts, on an engine without a prefix cache. So every single one is checked. Pages are few,
so that rows are put back; prompts begin alike, so that the cache is used. A request that a fault ended is counted as
failed: its tokens up to there must be right too. `--minutes` bounds each part; it then stops asking and says how far it
came. Ends in one JSON line, with exit code 1 if a request was lost or wrong, if a fault was not injected, or if memory
grew.
"""

import argparse
import json
import logging
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from headlong import LLM, SamplingParams
from headlong.engine.row import FAULT
from headlong.progress import silent
from headlong.types import Plan, RowOutput
from support import tiny
from support.injection import Injector

MAX_TOKENS = 48
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.95},
    {"repetition_penalty": 1.2},
    {"temperature": 0.9, "presence_penalty": 0.4, "min_p": 0.02},
)
STEP_STAGES = 12
"""How many stages a step passes, about: a fault rate per step is so many times that of each."""
GROWTH = 1.05, 32 << 20
"""Memory is flat if it ends below so many times what it was after a fifth of the run, or so many bytes more."""
Key = tuple[int, int]


@dataclass
class Row:
    """A request on its way."""

    key: Key
    max_tokens: int
    tokens: list[int] = field(default_factory=list)


class Soak:
    """One engine, one set of prompts."""

    def __init__(self, model: Path | None, dtype: str, args: argparse.Namespace) -> None:
        self.rng = random.Random(args.seed)
        self.cancel_rate, self.minutes = args.cancel_rate, args.minutes
        self.fault_rate, self.num_kinds, self.together = args.fault_rate, args.kinds, args.together
        options: dict[str, Any] = {
            "dtype": dtype, "device": args.device, "page_size": 16, "max_context": 256, "progress": silent
        }  # fmt: skip
        self.plain = LLM(model, mtp="off", prefix_cache=False, max_rows=1, **options)
        self.llm = LLM(model, max_rows=16, cache_tokens=1536, chunk_tokens=96, **options)
        self.prompts = self._prompts()
        self.truths: dict[Key, tuple[int, ...]] = {}
        self.living: dict[str, Row] = {}
        self.counts: Counter[str] = Counter()
        self.injector = Injector(self.llm.engine, self._strike)
        self.injector.poison = self._poison

    def run(self, total: int, progress: Progress, name: str) -> dict[str, Any]:
        truths = progress.add_task(f"{name}: truths", total=len(self.prompts) * self.num_kinds)
        for key in [(p, k) for p in range(len(self.prompts)) for k in range(self.num_kinds)]:
            prompt, params = self._asked(key, MAX_TOKENS)
            self.truths[key] = self.plain.generate(list(prompt), params).token_ids
            progress.advance(truths)
        task = progress.add_task(f"{name}: requests", total=total)
        started, early = time.monotonic(), None
        submitted, engine = 0, self.llm.engine
        while submitted < total or engine.has_work:
            if self.minutes and time.monotonic() - started > 60 * self.minutes:
                total = submitted
            while submitted < total and len(self.living) < self.together and self.rng.random() < 0.8:
                self._submit(submitted)
                submitted += 1
            if self.living and self.rng.random() < self.cancel_rate:
                self._cancel(self.rng.choice(list(self.living)))
            self._step()
            if early is None and is_a_fifth(self.ended, total, time.monotonic() - started, 60 * self.minutes):
                early = resident_bytes()
            progress.update(task, completed=self.ended, total=total)
        seconds = time.monotonic() - started
        self.counts["lost"] = len(self.living)
        return self._report(name, total, seconds, early or resident_bytes())

    @property
    def ended(self) -> int:
        return self.counts["finished"] + self.counts["cancelled"] + self.counts["failed"]

    def _prompts(self) -> list[tuple[int, ...]]:
        """Four beginnings, each continued in different ways, from 1 to about 150 tokens."""
        vocab = self.llm.engine.model.config.vocab_size
        draw = lambda count: tuple(self.rng.randrange(vocab) for _ in range(count))  # noqa: E731
        begins = [draw(count) for count in (1, 16, 40, 96)]
        return [
            (*begin, *draw(self.rng.choice([0, 1, 3, 9, 17, 33, 50]))) for begin in begins for _ in range(12)
        ]

    def _asked(self, key: Key, max_tokens: int, **own: Any) -> tuple[tuple[int, ...], SamplingParams]:
        params = SamplingParams(max_tokens=max_tokens, seed=key[1], ignore_eos=True, **KINDS[key[1]], **own)
        return self.prompts[key[0]], params

    def _submit(self, number: int) -> None:
        key = (self.rng.randrange(len(self.prompts)), self.rng.randrange(self.num_kinds))
        length = min(MAX_TOKENS, 1 + int(self.rng.expovariate(1 / 14)))
        depth = self.rng.choice([None, None, 0, 1, 3, 8])
        prompt, params = self._asked(key, length, draft_tokens=depth, priority=self.rng.choice([0, 0, 0, 1]))
        (request,) = self.llm.service.requests(prompt, params, f"soak-{number}")
        self.living[request.id] = Row(key, length)
        self.llm.engine.add(request)

    def _cancel(self, row_id: str) -> None:
        self.llm.engine.cancel(row_id)
        self._judge(self.living.pop(row_id), whole=False)
        self.counts["cancelled"] += 1

    def _step(self) -> None:
        step = self.llm.engine.step()
        self.counts["preempted"] += len(step.preempted)
        for output in step.rows:
            self._take(output)
        if self.llm.engine.failure is not None:
            self.counts["restarts"] += 1
            self.llm.engine.restart()

    def _take(self, output: RowOutput) -> None:
        row = self.living[output.request.id]
        row.tokens.extend(output.token_ids)
        self.counts["tokens"] += len(output.token_ids)
        self.counts["cached"] += output.num_cached
        if output.finish_reason is None:
            return
        del self.living[output.request.id]
        if output.finish_reason == "error" and str(output.stop_reason).startswith(FAULT):
            self.counts["failed"] += 1
            self._judge(row, whole=False)
        else:
            self.counts["finished"] += 1
            self._judge(row, whole=True)

    def _judge(self, row: Row, whole: bool) -> None:
        expected = self.truths[row.key][: row.max_tokens]
        self.counts["wrong"] += tuple(row.tokens) != (expected if whole else expected[: len(row.tokens)])

    def _strike(self, _stage: str, _late: bool, _injector: Injector) -> Exception | None:
        if self.rng.random() >= self.fault_rate / (2 * STEP_STAGES):
            return None
        self.counts["faults"] += 1
        return self.rng.choice([RuntimeError("injected"), torch.OutOfMemoryError("injected: out of memory")])

    def _poison(self, plan: Plan) -> dict[str, float]:
        rows = [row.request.id for row in plan.rows if row.samples]
        if not rows or self.rng.random() >= self.fault_rate / 3:
            return {}
        self.counts["poisoned"] += 1
        return {self.rng.choice(rows): self.rng.choice([torch.nan, torch.inf])}

    def _report(self, name: str, total: int, seconds: float, early: int) -> dict[str, Any]:
        self.injector.remove()
        engine = self.llm.engine
        engine.check_integrity()
        assert engine.state.pages.num_free == engine.state.pages.size, "pages leaked"
        late = resident_bytes()
        flat = late <= early * GROWTH[0] or late <= early + GROWTH[1]
        injected = self.counts["faults"] + self.counts["poisoned"]
        self.counts["unexpected"] = max(0, engine.faults.count - injected)
        counts = {kind: self.counts[kind] for kind in _COUNTS}
        bad = counts["lost"] + counts["wrong"] + counts["unexpected"]
        return {
            "model": name,
            "requests": total,
            **counts,
            "truths": len(self.truths),
            "steps": self.injector.steps,
            "seconds": round(seconds, 1),
            "mib_at_20_percent": early >> 20,
            "mib_at_the_end": late >> 20,
            "good": flat and not bad and self.ended == total,
        }


_COUNTS = (
    "finished",
    "cancelled",
    "failed",
    "lost",
    "wrong",
    "faults",
    "poisoned",
    "unexpected",
    "restarts",
    "preempted",
    "tokens",
    "cached",
)


def is_a_fifth(ended: int, total: int, seconds: float, limit: float) -> bool:
    """Whether a fifth of the requests is done or, in a run that is bounded by time, a fifth of that is over."""
    return 5 * ended >= total or 0 < limit <= 5 * seconds


def resident_bytes() -> int:
    """What the process holds now; where that cannot be read, the most it ever held."""
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", type=int, default=100_000, help="requests to the tiny model")
    parser.add_argument("--embedded", type=int, default=5_000, help="requests to the embedded model")
    parser.add_argument("--minutes", type=float, default=0.0, help="for each part; 0 is no bound")
    parser.add_argument("--fault-rate", type=float, default=0.003, help="of steps")
    parser.add_argument(
        "--cancel-rate", type=float, default=0.03, help="of steps before which somebody leaves"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--kinds",
        type=int,
        default=len(KINDS),
        help="of requests; one is greedy alone, whose steps are one launch",
    )
    parser.add_argument("--together", type=int, default=40, help="requests at a time; rows are 16")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.getLogger("headlong").setLevel(logging.CRITICAL + 1)  # every fault would tell its story
    results = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with tempfile.TemporaryDirectory() as folder, Progress(*columns, TimeRemainingColumn()) as progress:
        if args.tiny:
            made = tiny.make(Path(folder) / "tiny")
            results.append(Soak(made.folder, "float32", args).run(args.tiny, progress, "tiny"))
        if args.embedded:
            results.append(Soak(None, "auto", args).run(args.embedded, progress, "embedded"))
    table = Table("", *(result["model"] for result in results), title="soak")
    for row in results[0] if results else ():
        table.add_row(row.replace("_", " "), *(str(result[row]) for result in results))
    Console().print(table)
    print(json.dumps({"benchmark": "soak", "fault_rate": args.fault_rate, "results": results}))
    return 0 if all(result["good"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
