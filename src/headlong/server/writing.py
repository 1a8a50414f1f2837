"""Writes answers as JSON, in pieces and beside the event loop: what holds the log-probabilities of thousands of tokens
or thousands of vectors takes seconds, in which others are to be served. Knows no wire format.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

AT_ONCE = 2000
"""The values that are written without letting go of the interpreter's lock: a millisecond or two."""
Value = TypeVar("Value")
_writers = ThreadPoolExecutor(2, "headlong-write")
"""Threads of their own: an answer waits for no prompt that is being read."""


async def beside(make: Callable[[], Value]) -> Value:
    """What `make` makes, in another thread."""
    return await asyncio.get_running_loop().run_in_executor(_writers, make)


def written(data: Any) -> str:
    """The data as JSON. Other threads run in between."""
    return "".join(_pieces(data))


def _pieces(data: Any) -> Iterator[str]:
    if _size(data) < AT_ONCE:
        yield _dumps(data)
    elif isinstance(data, dict):
        mark = "{"
        for name, value in data.items():
            yield f"{mark}{_dumps(str(name))}:"
            yield from _pieces(value)
            mark = ","
        yield "}"
    else:
        mark, step = "[", max(1, AT_ONCE // _size(data[0]))
        for start in range(0, len(data), step):
            yield mark
            if step == 1:
                yield from _pieces(data[start])
            else:
                yield _dumps(data[start : start + step])[1:-1]
            mark = ","
        yield "]"


def _size(data: Any) -> int:
    """How many values there are, or `AT_ONCE` if there are more."""
    count, waiting = 0, [data]
    while waiting and count < AT_ONCE:
        value = waiting.pop()
        count += 1
        if isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list | tuple):
            waiting.extend(value[:AT_ONCE])
    return count if not waiting else AT_ONCE


def _dumps(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))
