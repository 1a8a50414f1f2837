"""A command on a pseudo-terminal, and the screen that a person would see."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pyte

LINES, COLUMNS = 200, 110
PATIENCE = 120


class PseudoTerminal:
    """Runs `headlong WORDS` there; `with` ends it."""

    def __init__(self, *words: str, **environment: str) -> None:
        ours, theirs = pty.openpty()
        self._descriptor = ours
        self.raw = b""
        self.screen = pyte.Screen(COLUMNS, LINES)
        self._stream = pyte.ByteStream(self.screen)
        size = {"COLUMNS": str(COLUMNS), "LINES": str(LINES), "TERM": "xterm-256color"}
        clean = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "CI")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headlong.cli.main", *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=clean | size | environment,
            start_new_session=True,
        )
        os.close(theirs)

    def __enter__(self) -> "PseudoTerminal":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self._descriptor)

    @property
    def lines(self) -> list[str]:
        """What stands on the screen, without the empty lines at its end."""
        shown = [line.rstrip() for line in self.screen.display]
        while shown and not shown[-1]:
            shown.pop()
        return shown

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def wait_for(self, pattern: str, *, count: int = 1) -> None:
        """Until the screen has so many matches of a pattern, in lines as the command wrote them."""
        self._until(lambda: len(re.findall(pattern, "\n".join(self.lines), re.MULTILINE)) >= count, pattern)

    def wait_for_the_end(self) -> int:
        self._until(lambda: False, "the end", ended_is_fine=True)
        return self.process.wait(PATIENCE)

    def _until(self, true: Callable[[], bool], wanted: str, *, ended_is_fine: bool = False) -> None:
        deadline = time.monotonic() + PATIENCE
        while not true():
            if time.monotonic() > deadline:
                raise AssertionError(f"waited in vain for {wanted!r}:\n" + "\n".join(self.lines))
            ready, _, _ = select.select([self._descriptor], [], [], 0.2)
            if not ready:
                continue
            try:
                piece = os.read(self._descriptor, 65536)
            except OSError:  # Linux: the other side closed
                piece = b""
            if not piece:
                if ended_is_fine:
                    return
                raise AssertionError(f"ended before {wanted!r}:\n" + "\n".join(self.lines))
            self.raw += piece
            self._stream.feed(piece)


def rendered(text: str) -> list[str]:
    """The lines a terminal of the same width shows of a text."""
    screen = pyte.Screen(COLUMNS, LINES)
    pyte.Stream(screen).feed(text.replace("\n", "\r\n"))
    shown = [line.rstrip() for line in screen.display]
    while shown and not shown[-1]:
        shown.pop()
    return shown
