"""Where the tests' time goes: the seconds of each file and folder, from what pytest's `--durations=0` prints.

    python -m pytest -n auto --dist worksteal -m "not slow and not gpu" --durations=0 --durations-min=0.01 > log
    python tests/times.py log

Seconds are those of set-up, call and teardown, of all workers together: a run takes about as long as their sum divided
by the workers. Knows nothing of the tests but their names.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

LINE = re.compile(r"^([\d.]+)s (?:setup|call|teardown) +(?:tests/)?(\S+?)::", re.MULTILINE)
LEAST_SECONDS = 5.0


def by_file(log: str) -> dict[str, float]:
    """Seconds of each file, those that take longest first."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for duration, file in LINE.findall(log):
        seconds[file] += float(duration)
    return dict(sorted(seconds.items(), key=lambda entry: -entry[1]))


def by_folder(files: dict[str, float]) -> dict[str, float]:
    folders: defaultdict[str, float] = defaultdict(float)
    for file, seconds in files.items():
        folders[f"{file.split('/')[0]}/" if "/" in file else file] += seconds
    return dict(sorted(folders.items(), key=lambda entry: -entry[1]))


def table(title: str, seconds: dict[str, float]) -> str:
    lines = [f"| {name} | {value:.0f} |" for name, value in seconds.items() if value >= LEAST_SECONDS]
    rest = sum(value for value in seconds.values() if value < LEAST_SECONDS)
    return "\n".join([f"| {title} | s |", "| --- | --- |", *lines, f"| all others | {rest:.0f} |"])


def main() -> None:
    files = by_file("\n".join(Path(name).read_text(encoding="utf-8") for name in sys.argv[1:]))
    print(table("folder", by_folder(files)), table("file", files), sep="\n\n")
    print(f"\nIn all {sum(files.values()):.0f} s.")


if __name__ == "__main__":
    main()
