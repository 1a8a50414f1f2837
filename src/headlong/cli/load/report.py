"""Cells as a table, and in words what the table leaves out. Knows cells, no samples and no server."""

from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from headlong.cli.load.answer import CHUNKS
from headlong.cli.load.stats import PLAIN, Cell, Spread

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

NOTABLE_LAG = 0.02
NUM_ERRORS_TOLD = 5
WIDEST = 1000


class Column(NamedTuple):
    heading: str
    show: Callable[[Cell], str]


def _milliseconds(spread: Spread | None) -> str:
    return "-" if spread is None else f"{1000 * spread.p50:.2f} / {1000 * spread.p99:.2f}"


def _ratio(cell: Cell) -> str:
    if cell.ratio is None:
        return "-"
    rounds = cell.ratio.rounds
    return f"{median(rounds):.2f}x ({min(rounds):.2f}-{max(rounds):.2f})"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


STREAMS = Column("streams", lambda cell: str(cell.concurrency))
MTP = Column("mtp", lambda cell: str(cell.mtp))
RATIO = Column("ratio", _ratio)
LOAD = (
    Column("sent", lambda cell: str(cell.requests)),
    Column("failed", lambda cell: str(len(cell.failures))),
    Column("tokens/s", lambda cell: f"{cell.tokens_per_second:.1f}"),
)
DRAFTING = (
    Column("tokens/\nstep", lambda cell: _number(cell.tokens_per_step, ".2f")),
    Column("accepted", lambda cell: "?" if cell.drafts is None else _number(cell.acceptance, ".0%")),
)
LATENCY = (
    Column(
        "stream\ntokens/s",
        lambda c: _number(c.stream_tokens_per_second and c.stream_tokens_per_second.p50, ".1f"),
    ),
    Column("TTFT ms\np50 / p99", lambda cell: _milliseconds(cell.ttft)),
    Column("ITL ms\np50 / p99", lambda cell: _milliseconds(cell.itl)),
    Column("gap ms\np99", lambda cell: _number(cell.gap and 1000 * cell.gap.p99, ".2f")),
)


def tables(cells: list[Cell], title: str, console: "Console") -> "list[Table]":
    """Makes one table, or two where one would not fit the console."""
    first = [STREAMS, *([MTP] if any(cell.mtp is not None for cell in cells) else [])]
    load = [*LOAD, *([RATIO] if any(cell.ratio is not None for cell in cells) else [])]
    whole = _table([*first, *load, *LATENCY, *DRAFTING], cells, title)
    unlimited = console.options.update(max_width=WIDEST)
    if console.measure(whole, options=unlimited).maximum <= console.width:
        return [whole]
    parts = [[*first, *load, *DRAFTING], [*first, *LATENCY]]
    return [_table(part, cells, title if part is parts[0] else None, narrow=True) for part in parts]


def _table(columns: list[Column], cells: list[Cell], title: str | None, *, narrow: bool = False) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.HEAVY_HEAD)
    if narrow:
        table.box, table.padding = box.SIMPLE_HEAD, (0, 1, 0, 0)
    for column in columns:
        # Of a ratio the range may go into a second line; no number may be cut.
        least = len("(0.00-0.00)") if column is RATIO else None
        table.add_column(column.heading, justify="right", no_wrap=column is not RATIO, min_width=least)
    for cell in cells:
        table.add_row(*(column.show(cell) for column in columns))
    return table


def notes(cells: list[Cell], *, interrupted: bool) -> list[str]:
    """Where the numbers come from, and what went wrong."""
    lines = []
    if interrupted:
        lines.append("interrupted: the last block counts only the requests that had ended")
    if any(CHUNKS in cell.counted_by for cell in cells):
        lines.append("the server sends no usage: chunks were counted, which may hold several tokens each")
    sources = {cell.drafts.source for cell in cells if cell.drafts is not None}
    if sources:
        lines.append(f"acceptance from {', '.join(sorted(sources))}")
    elif any(cell.completed for cell in cells):
        lines.append("acceptance not reported by this server")
    if any(cell.mtp == PLAIN and cell.drafts is not None and cell.drafts.drafted for cell in cells):
        lines.append(f"drafts were made with mtp {PLAIN} too: this server ignores the field `speculative`")
    reference = next((cell.ratio.to for cell in cells if cell.ratio is not None), None)
    if reference is not None:
        lines.append(f"ratio: tokens/s over those of mtp {reference} in the same round; median (least-most)")
    kinds = Counter(failure.kind for cell in cells for failure in cell.failures)
    for kind, number in kinds.most_common(NUM_ERRORS_TOLD):
        told = next(f.message for cell in cells for f in cell.failures if f.kind == kind)
        lines.append(f"{number} x {kind}: {told}")
    if resent := sum(cell.resent for cell in cells):
        lines.append(f"{resent} sent again: the server closed connections that it said it would keep")
    late = max((cell.lag.p99 for cell in cells if cell.lag is not None), default=0.0)
    if late > NOTABLE_LAG:
        lines.append(
            f"this program itself was up to {1000 * late:.0f} ms late (p99): its machine is too busy"
        )
    return lines
