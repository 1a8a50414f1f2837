"""Is one commit as fast as another? Runs a benchmark of this folder in two checkouts, in turns, and compares numbers.

    python benchmarks/side_by_side.py OTHER [--script step.py] [--rounds 5] [-- arguments of the script]

OTHER is the folder of a second checkout, for instance one of an earlier commit; its sources and its copy of the script
run with this Python. Native kernels must be built there, too (`pip install -e`, or copy `ops/_native*.so`). Every
number of the script's JSON line is compared: the median over rounds in each checkout, and the median of the ratios
within a round, this one over the other. Machines are shared and noisy: a ratio says something only if its quartiles
are close. Ends in one JSON line.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

HERE = Path(__file__).resolve().parents[1]


def numbers(found: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """All numbers of a JSON value with their places."""
    if isinstance(found, dict):
        for key, value in found.items():
            yield from numbers(value, f"{path} {key}".strip())
    elif isinstance(found, list):
        for place, value in enumerate(found):
            yield from numbers(value, f"{path} {place}".strip())
    elif isinstance(found, int | float) and not isinstance(found, bool):
        yield path, float(found)


def run(checkout: Path, script: str, arguments: list[str]) -> dict[str, float]:
    """The numbers that one run of the script ends with."""
    command = [sys.executable, str(checkout / "benchmarks" / script), *arguments]
    environment = os.environ | {"PYTHONPATH": str(checkout / "src")}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
    )
    return dict(numbers(json.loads(done.stdout.splitlines()[-1])))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path)
    parser.add_argument("--script", default="step.py")
    parser.add_argument("--rounds", type=int, default=5)
    own, _, arguments = " ".join(sys.argv[1:]).partition(" -- ")
    args = parser.parse_args(own.split())
    places = {"here": HERE, "other": args.other.resolve()}
    rounds: list[dict[str, dict[str, float]]] = []
    for number in track(range(args.rounds), console=Console(stderr=True), description=args.script):
        turns = list(places.items())[:: -1 if number % 2 else 1]
        rounds.append({name: run(place, args.script, arguments.split()) for name, place in turns})
    table, results = Table("number", "here", "other", "here / other", "quartiles"), {}
    for key in rounds[0]["here"]:
        if not all(one[name].get(key) for one in rounds for name in places):
            continue
        ratios = sorted(one["here"][key] / one["other"][key] for one in rounds)
        low, middle, high = (
            statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        )
        medians = [statistics.median(one[name][key] for one in rounds) for name in places]
        table.add_row(
            key, *(f"{value:.4g}" for value in medians), f"{middle:.3f}", f"{low:.3f} to {high:.3f}"
        )
        results[key] = round(middle, 4)
    Console().print(table)
    print(json.dumps({"benchmark": "side_by_side", "script": args.script, "ratios": results}))


if __name__ == "__main__":
    main()
