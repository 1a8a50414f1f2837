"""Notices that a thread does not get on: a device that was lost, a deadlock, a kernel that never ends.

Knows threads and clocks, no engine. What a compiler takes is no hang until it takes much longer still.
"""

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType

log = logging.getLogger(__name__)
COMPILING = ("/triton/compiler/", "/triton/backends/", "/torch/_inductor/", "/torch/utils/cpp_extension.py")
"""Parts of the file names of those who compile while a step waits."""
COMPILING_FACTOR = 10
"""How many times as long a step may take that compiles."""
TICKS = 8
"""How many times within the bound the thread is looked at."""


class Watchdog:
    """Watches one thread, which calls `begin` before each piece of work and `end` before it waits for more. `on_hang`
    is called once, in another thread, with a sentence; the watching has ended then."""

    def __init__(self, seconds: float, on_hang: Callable[[str], None]) -> None:
        self._seconds = seconds
        self._on_hang = on_hang
        self._piece = 0
        """A number for every piece of work; 0 while there is none. One assignment, so that no lock is needed."""
        self._count = 0
        self._watched: int | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="headlong-watchdog", daemon=True)

    def begin(self) -> None:
        self._count += 1
        self._piece = self._count

    def end(self) -> None:
        self._piece = 0

    def watch_this_thread(self) -> None:
        """Begins to watch whoever calls it."""
        self._watched = threading.get_ident()
        self._thread.start()

    def close(self) -> None:
        self._stop.set()

    def _watch(self) -> None:
        tick = self._seconds / TICKS
        seen, spent, before = 0, 0.0, time.monotonic()
        while not self._stop.wait(tick):
            now = time.monotonic()
            # A process that was stopped, or had no core, has not let anything hang meanwhile.
            passed, before = min(now - before, 2 * tick), now
            piece = self._piece
            spent = spent + passed if piece and piece == seen else 0.0
            seen = piece
            if spent >= self._seconds and self._hangs(spent):
                return

    def _hangs(self, spent: float) -> bool:
        frame = sys._current_frames().get(self._watched or 0)
        if _compiles(frame) and spent < self._seconds * COMPILING_FACTOR:
            return False
        where = "".join(traceback.format_stack(frame)) if frame is not None else "nowhere: the thread is gone"
        log.critical("a step has not ended after %.0f s; it is at\n%s", spent, where)
        self._on_hang(f"a step has not ended after {spent:.0f} s (step_timeout)")
        return True


def _compiles(frame: FrameType | None) -> bool:
    while frame is not None:
        if any(part in frame.f_code.co_filename for part in COMPILING):
            return True
        frame = frame.f_back
    return False
