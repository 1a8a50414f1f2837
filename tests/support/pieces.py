"""How long nobody else can run, in processor time, which a busy machine does not change.

Two threads of one process stop each other where one of them keeps the interpreter's lock: during a call into C that
does not let go of it. A profile hook sees when each call begins and ends, so the longest time of a thread between two
events of its own is the longest that others may have to wait for it. What the event loop calls stops whoever it
serves, whether or not the lock is let go of.
"""

import asyncio
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

LETS_GO = ("encode_batch_fast", "decode_batch")
"""Calls into C during which other threads run, as other tests show."""


@dataclass
class Longest:
    """The longest piece that was seen since it was reset."""

    seconds: float = 0.0
    where: str = ""

    def note(self, seconds: float, where: str) -> None:
        if seconds > self.seconds:
            self.seconds, self.where = seconds, where

    def reset(self) -> None:
        self.seconds, self.where = 0.0, ""


class _Hook:
    """A profile function for any number of threads."""

    def __init__(self, longest: Longest, wanted: Callable[[str], bool]) -> None:
        self._longest, self._wanted, self._own = longest, wanted, threading.local()

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        own = self._own
        spent = time.thread_time() - getattr(own, "last", float("inf"))
        if spent > self._longest.seconds:
            if not hasattr(own, "watched"):
                own.watched = self._wanted(threading.current_thread().name)
            name = getattr(arg, "__qualname__", "") if event.startswith("c_") else frame.f_code.co_qualname
            if own.watched and not name.endswith(LETS_GO):
                self._longest.note(spent, f"{name} ({event}, {threading.current_thread().name})")
        own.last = time.thread_time()


@contextmanager
def here() -> Iterator[Longest]:
    """Watches this thread until the block ends."""
    longest = Longest()
    hook = _Hook(longest, lambda _: True)
    before = sys.getprofile()
    sys.setprofile(hook)
    try:
        yield longest
    finally:
        sys.setprofile(before)


@contextmanager
def in_threads(wanted: Callable[[str], bool]) -> Iterator[Longest]:
    """Watches the threads that start inside of the block and whose names are `wanted`."""
    longest = Longest()
    threading.setprofile(_Hook(longest, wanted))
    try:
        yield longest
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]


@contextmanager
def on_the_loop(thread: str) -> Iterator[Longest]:
    """Watches what the event loop of a thread calls."""
    longest, run = Longest(), asyncio.Handle._run

    def timed(handle: Any) -> None:
        started = time.thread_time()
        run(handle)
        if threading.current_thread().name == thread:
            longest.note(time.thread_time() - started, repr(handle)[:200])

    asyncio.Handle._run = timed
    try:
        yield longest
    finally:
        asyncio.Handle._run = run


@dataclass
class Turns:
    """How many times another thread came to run."""

    count: int = 0


@contextmanager
def turns() -> Iterator[Turns]:
    """Counts how often another thread runs while the block does."""
    found, stop = Turns(), threading.Event()

    def run() -> None:
        while not stop.is_set():
            time.sleep(0.001)
            found.count += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()


@contextmanager
def modules_set_aside() -> Iterator[None]:
    """The garbage collector does not look at what there is now, as in a server."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
