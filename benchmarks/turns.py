"""Does a step cost more than at another commit? Two processes that stay, in turns of a fraction of a second each.

    python benchmarks/turns.py OTHER [--draft-tokens 0,1,3] [--rounds 40] [--max-tokens 60]

OTHER is the folder of a second checkout; its sources run with this Python, and its native kernels must be built there.
Each process loads the embedded model once and then generates the same tokens over and over, whenever it is its turn.
Compared are the wall clock's seconds of a step and the processor's: the latter hardly change when other processes want
the same cores, so they tell a difference of some percent where `side_by_side.py` cannot. Both processes and this one
keep to one core. The ratio is this checkout over the other, the median of rounds. Ends in one JSON line.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

HERE = Path(__file__).resolve().parents[1]
PROMPT = [7919 * i % 7000 + 3 for i in range(24)]
CLOCKS = ("wall", "processor")


def answer_turns(max_tokens: int) -> None:
    """A depth a line in; out come the seconds of a step by either clock."""
    from headlong import LLM, SamplingParams

    llm = LLM(prefix_cache=False, mtp="on", progress=lambda *_: None)
    print("ready", flush=True)
    for line in sys.stdin:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, draft_tokens=int(line), ignore_eos=True)
        started = time.process_time()
        stats = llm.generate(PROMPT, params).stats
        spent = time.process_time() - started
        print(json.dumps([stats.decode_seconds / stats.steps, spent / stats.steps]), flush=True)


class Side:
    """One checkout's process."""

    def __init__(self, checkout: Path, max_tokens: int) -> None:
        command = [sys.executable, __file__, str(checkout), "--in-process", "--max-tokens", str(max_tokens)]
        environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()

    def turn(self, depth: int) -> tuple[float, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{depth}\n")
        self.process.stdin.flush()
        wall, processor = json.loads(self._read())
        return wall, processor

    def close(self) -> None:
        self.process.communicate(timeout=60)

    def _read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a process ended with status {self.process.wait()}; its message is above")
        return line


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path)
    parser.add_argument("--draft-tokens", default="0,1,3")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=60)
    parser.add_argument("--in-process", action="store_true", help="used by itself")
    args = parser.parse_args()
    if args.in_process:
        answer_turns(args.max_tokens)
        return
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    sides = [Side(checkout, args.max_tokens) for checkout in (HERE, args.other.resolve())]
    table = Table("K", "clock", "here (ms)", "other (ms)", "here / other", "quartiles")
    results: dict[str, float] = {}
    for depth in map(int, args.draft_tokens.split(",")):
        for side in sides:
            side.turn(depth)
        rounds = []
        for number in track(range(args.rounds), console=Console(stderr=True), description=f"K={depth}"):
            turns = {side: side.turn(depth) for side in (sides if number % 2 else sides[::-1])}
            rounds.append([turns[side] for side in sides])
        for place, clock in enumerate(CLOCKS):
            here, other = ([each[which][place] for each in rounds] for which in (0, 1))
            ratios = [mine / theirs for mine, theirs in zip(here, other, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
            milliseconds = [f"{1000 * statistics.median(side):.3f}" for side in (here, other)]
            table.add_row(str(depth), clock, *milliseconds, f"{middle:.3f}", f"{low:.3f} to {high:.3f}")
            results[f"K={depth} {clock}"] = round(middle, 4)
    for side in sides:
        side.close()
    Console().print(table)
    print(json.dumps({"benchmark": "turns", "ratios": results}))


if __name__ == "__main__":
    main()
