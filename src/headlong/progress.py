"""Progress as a callback, so that only the outermost caller decides how it looks.

Knows nothing of what is being counted. Libraries call `report(label, done, total)`; the command line
draws bars, a server may log, tests record.
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from headlong.printable import printable

if TYPE_CHECKING:
    from rich.progress import TaskID

ProgressFn = Callable[[str, int, int], None]
"""Called as `(label, done, total)`; `done == total` ends that label's bar."""


def silent(label: str, done: int, total: int) -> None:
    """Reports nothing."""


class BarProgress:
    """Draws rich progress bars on stderr; one bar per label, removed when it is full."""

    def __init__(self) -> None:
        self._bars: dict[str, TaskID] = {}
        self._live = None

    def __call__(self, label: str, done: int, total: int) -> None:
        if done >= total and label not in self._bars:
            return  # over before anybody could see it
        if self._live is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            name = TextColumn("{task.description}", markup=False)
            columns = (name, BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
            self._live = Progress(
                *columns, TimeElapsedColumn(), console=Console(file=sys.stderr), transient=True
            )
            self._live.start()
        if label not in self._bars:
            self._bars[label] = self._live.add_task(printable(label), total=total)
        self._live.update(self._bars[label], completed=done, total=total)
        if done >= total:
            self._live.remove_task(self._bars.pop(label))
            if not self._bars:
                self._live.stop()
                self._live = None


def default_progress() -> ProgressFn:
    """Bars where a person is watching (stderr is a terminal), silence elsewhere."""
    return BarProgress() if sys.stderr.isatty() else silent
