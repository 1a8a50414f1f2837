"""Work that takes long and reports its progress, followed from the event loop. Knows no wire format."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from headlong.progress import ProgressFn

Value = TypeVar("Value")


class Report(NamedTuple):
    label: str
    done: int
    total: int


def followed(
    start: Callable[[ProgressFn], Coroutine[Any, Any, Value]],
) -> tuple["asyncio.Task[Value]", AsyncIterator[Report]]:
    """Starts work that may report from any thread; returns its task and its reports, which end with it. The work goes
    on if nobody follows it any more."""
    loop, reports = asyncio.get_running_loop(), asyncio.Queue[Report | None]()

    def report(label: str, done: int, total: int) -> None:
        loop.call_soon_threadsafe(reports.put_nowait, Report(label, done, total))

    task = asyncio.create_task(start(report))
    # Whoever follows may have left: nobody has to fetch the failure.
    task.add_done_callback(lambda ended: (reports.put_nowait(None), ended.cancelled() or ended.exception()))
    return task, _whole_percents(reports)


async def _whole_percents(reports: "asyncio.Queue[Report | None]") -> AsyncIterator[Report]:
    """Leaves out reports that differ by less: there may be one for every tensor or every block of a file."""
    told: tuple[str, int] | None = None
    while (report := await reports.get()) is not None:
        percent = 100 * report.done // max(report.total, 1)
        if (report.label, percent) != told:
            told = (report.label, percent)
            yield report
