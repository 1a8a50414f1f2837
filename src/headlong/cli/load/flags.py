"""Values of the flags of `headlong bench serve`, and their limits. Knows texts, no flags and no run."""

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headlong.cli import options

if TYPE_CHECKING:
    from headlong.cli.load.workload import Mtp

MOST_STREAMS, MOST_COMPARED = 1024, 9


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = options.whole(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, not {value}")
        if most is not None and value > most:
            raise argparse.ArgumentTypeError(f"must be at most {most}, not {value}")
        return value

    return parse


def positive(most: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = options.number(text)
        if not 0 < value <= most:
            raise argparse.ArgumentTypeError(f"must be above 0 and at most {most:g}, not {text}")
        return value

    return parse


def _compared(values: list[Any]) -> list[Any]:
    """Returns the values that a run compares, each once."""
    values = list(dict.fromkeys(values))
    if len(values) > MOST_COMPARED:
        raise argparse.ArgumentTypeError(f"has {len(values)} entries; {MOST_COMPARED} can be compared")
    return values


def streams(text: str) -> list[int]:
    return sorted(_compared([whole(1, MOST_STREAMS)(part) for part in text.split(",")]))


def settings(text: str) -> "list[Mtp]":
    known = ("auto", "on", "off")
    return _compared([part if part in known else _depth(part) for part in text.split(",")])


def _depth(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"must be of auto, on, off and numbers from 1, not {text!r}")
    return int(text)


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, not {text!r}")
    return value
