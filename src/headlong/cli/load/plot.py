"""Cells as an SVG: throughput, time to first token and time between tokens, by number of streams.

Draws with text alone, so that no plotting library is needed. Knows cells and where pixels go.
"""

import math
from collections.abc import Callable
from html import escape

from headlong.cli.load.stats import Cell
from headlong.cli.load.workload import Mtp

PANEL_WIDTH, PANEL_HEIGHT, MARGIN = 300, 200, 18
LEFT, TOP, BOTTOM, GAP = 58, 64, 46, 34
BACKGROUND, TEXT, QUIET, GRID = "#0d1117", "#c9d1d9", "#8b949e", "#30363d"
COLOURS = ("#58a6ff", "#3fb950", "#d29922", "#f778ba", "#a371f7", "#ff7b72", "#39c5cf", "#e3b341")
NUM_TICKS = 5
TITLE_Y, TITLE_LEN = 26, 60

Value = Callable[[Cell], float | None]
PANELS: tuple[tuple[str, Value, Value | None], ...] = (
    ("tokens/s, all streams", lambda cell: cell.tokens_per_second, None),
    (
        "time to first token, ms",
        lambda c: c.ttft and 1000 * c.ttft.p50,
        lambda c: c.ttft and 1000 * c.ttft.p99,
    ),
    ("time per token, ms", lambda c: c.itl and 1000 * c.itl.p50, lambda c: c.itl and 1000 * c.itl.p99),
)
"""The panels: each has a title, the value of its solid line and that of its dashed one."""


def nice_step(largest: float) -> float:
    """1, 2 or 5 times a power of ten, so that at most NUM_TICKS steps reach `largest`."""
    assert largest > 0
    power = 10.0 ** math.floor(math.log10(largest / NUM_TICKS))
    return next(m * power for m in (1, 2, 5, 10) if m * power * NUM_TICKS >= largest * (1 - 1e-12))


def svg(cells: list[Cell], title: str) -> str:
    """Draws the whole picture."""
    streams = sorted({cell.concurrency for cell in cells})
    settings = list(dict.fromkeys(cell.mtp for cell in cells))
    width = 2 * MARGIN + len(PANELS) * (LEFT + PANEL_WIDTH) + (len(PANELS) - 1) * GAP
    height = TOP + PANEL_HEIGHT + BOTTOM + MARGIN
    style = "font-family:system-ui,sans-serif;font-size:12px"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/><g style="{style}">',
        _text(MARGIN, TITLE_Y, title if len(title) <= TITLE_LEN else title[:TITLE_LEN] + "…", TEXT, size=14),
        *_legend(settings, width),
    ]
    for number, (caption, value, dashed) in enumerate(PANELS):
        x = MARGIN + LEFT + number * (LEFT + PANEL_WIDTH + GAP)
        parts += _panel(x, caption, cells, streams, settings, value, dashed)
    return "\n".join([*parts, "</g></svg>"]) + "\n"


def _legend(settings: list[Mtp], width: int) -> list[str]:
    """The texts above the panels, placed from the right: what the lines mean, then the settings, the last one first."""
    parts = [_text(width - MARGIN, TITLE_Y, "solid p50, dashed p99", QUIET, anchor="end")]
    x = width - MARGIN - 150
    for number, mtp in reversed(list(enumerate(settings))):
        if mtp is not None:
            label = f"mtp {mtp}"
            parts.append(_text(x, TITLE_Y, label, _colour(number), anchor="end"))
            x -= 8 * len(label) + 12
    return parts


def _panel(
    x: int,
    caption: str,
    cells: list[Cell],
    streams: list[int],
    settings: list[Mtp],
    value: Value,
    dashed: Value | None,
) -> list[str]:
    drawn = [v for cell in cells for line in (value, dashed) if line and (v := line(cell)) is not None]
    largest = max(drawn, default=0.0) or 1.0
    step = nice_step(largest)
    top = step * math.ceil(largest / step * (1 - 1e-12))

    def at(concurrency: int, height: float) -> tuple[float, float]:
        # Evenly spaced: numbers of streams usually double.
        place = (streams.index(concurrency) + 0.5) / len(streams)
        return x + place * PANEL_WIDTH, TOP + PANEL_HEIGHT * (1 - height / top)

    parts = [_text(x, TOP - 12, caption, TEXT)]
    for tick in range(round(top / step) + 1):
        y = TOP + PANEL_HEIGHT * (1 - tick * step / top)
        parts.append(f'<path d="M{x} {y:.1f}h{PANEL_WIDTH}" stroke="{GRID}"/>')
        parts.append(_text(x - 6, y + 4, f"{tick * step:.6g}", QUIET, anchor="end"))
    for concurrency in streams:
        parts.append(
            _text(at(concurrency, 0)[0], TOP + PANEL_HEIGHT + 16, str(concurrency), QUIET, anchor="middle")
        )
    parts.append(_text(x + PANEL_WIDTH / 2, TOP + PANEL_HEIGHT + 34, "streams", QUIET, anchor="middle"))
    for number, mtp in enumerate(settings):
        own = sorted((cell for cell in cells if cell.mtp == mtp), key=lambda cell: cell.concurrency)
        for line, dashes in ((dashed, "4 4"), (value, "")):
            if line is not None:
                points = [at(c.concurrency, v) for c in own if (v := line(c)) is not None]
                parts += _line(points, _colour(number), dashes)
    return parts


def _line(points: list[tuple[float, float]], colour: str, dashes: str) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    stroke = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes or "none"}"'
    # Hollow where the line is dashed: with one number of streams the points are all there is.
    dot = f'fill="{BACKGROUND if dashes else colour}" stroke="{colour}" stroke-width="1.5"'
    circles = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" {dot}/>' for x, y in points]
    return [f'<polyline points="{path}" {stroke}/>', *circles]


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _text(x: float, y: float, words: str, fill: str, *, anchor: str = "start", size: int = 12) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text {place} fill="{fill}">{escape(words)}</text>'
