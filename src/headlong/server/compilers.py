"""The threads in which requests wait for their grammars: few, and not those that every other request needs."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from headlong.errors import BusyError

MAX_AT_ONCE = 2
MAX_WAITING = 16
Value = TypeVar("Value")


class Compilers:
    """Used on the event loop alone."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MAX_AT_ONCE, "headlong-compile")
        self._open = 0

    async def run(self, work: Callable[..., Value], *args: Any, **options: Any) -> Value:
        """Does `work` in one of the threads; raises `BusyError` where too much waits for them already."""
        if self._open >= MAX_AT_ONCE + MAX_WAITING:
            raise BusyError("grammar: too many others wait to be compiled; try again later")
        self._open += 1
        loop = asyncio.get_running_loop()
        done = loop.run_in_executor(self._threads, partial(work, *args, **options))
        done.add_done_callback(self._release)  # whoever stops waiting does not stop the thread
        return await asyncio.shield(done)

    def _release(self, done: "asyncio.Future[Any]") -> None:
        self._open -= 1
        if not done.cancelled():
            done.exception()
