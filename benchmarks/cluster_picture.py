"""Draws what `cluster_simulator.py` found: time to the first token and speed, by the number of replicas."""

from collections.abc import Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 420, 300, 54, 16, 58, 46
PREFIX, RANDOM, INK, QUIET, GRID, PAPER = "#2f9e62", "#c46a1b", "#c9d1d9", "#8b949e", "#30363d", "#0d1117"
LINES = (("prefix", PREFIX, ""), ("random", RANDOM, ' stroke-dasharray="6 4"'))


def draw(users: int, answers: Sequence[dict[str, Any]]) -> str:
    """An SVG of two panels side by side."""
    style = "font-family:ui-sans-serif,system-ui,sans-serif;font-size:12px"
    title = f"{users:,} users on paper: replicas of a 27B model, one H200 each"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">',
        f'<rect width="100%" height="100%" rx="8" fill="{PAPER}"/><g style="{style}">',
        f'<text x="{LEFT}" y="22" fill="{INK}" font-weight="600">{escape(title)}</text>',
        *_legend(),
        *_panel(0, "seconds to the first token, p99", "first_p99", answers),
        *_panel(WIDTH, "tokens a second of an answer, median", "speed_p50", answers),
    ]
    return "\n".join([*parts, "</g></svg>"]) + "\n"


def _legend() -> list[str]:
    places = (2 * WIDTH - RIGHT - 210, 2 * WIDTH - RIGHT - 100)
    return [
        f'<line x1="{x}" x2="{x + 28}" y1="18" y2="18" stroke="{colour}" stroke-width="2"{dashes}/>'
        f'<text x="{x + 36}" y="22" fill="{colour}">{routing}</text>'
        for x, (routing, colour, dashes) in zip(places, LINES, strict=True)
    ]


def _panel(offset: int, title: str, field: str, answers: Sequence[dict[str, Any]]) -> list[str]:
    counts = sorted({each["replicas"] for each in answers})
    top = _round_up(max(each[field] for each in answers))

    def x(count: float) -> float:
        return offset + LEFT + (WIDTH - LEFT - RIGHT) * (count - counts[0]) / max(1, counts[-1] - counts[0])

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top

    parts = [f'<text x="{offset + LEFT}" y="44" fill="{QUIET}">{escape(title)}</text>']
    for part in range(5):
        value = top * part / 4
        parts.append(
            f'<line x1="{x(counts[0]):.1f}" x2="{x(counts[-1]):.1f}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
            f'stroke="{GRID}"/><text x="{offset + LEFT - 8}" y="{y(value) + 4:.1f}" fill="{QUIET}" '
            f'text-anchor="end">{value:g}</text>'
        )
    for count in counts:
        parts.append(
            f'<text x="{x(count):.1f}" y="{HEIGHT - BOTTOM + 18}" fill="{QUIET}" text-anchor="middle">{count}</text>'
        )
    parts.append(
        f'<text x="{offset + (WIDTH + LEFT) / 2:.0f}" y="{HEIGHT - 10}" fill="{QUIET}" '
        'text-anchor="middle">replicas</text>'
    )
    for routing, colour, dashes in LINES:
        known = sorted((each["replicas"], each[field]) for each in answers if each["routing"] == routing)
        points = " ".join(f"{x(count):.1f},{y(value):.1f}" for count, value in known)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'
            + "".join(
                f'<circle cx="{x(count):.1f}" cy="{y(value):.1f}" r="3" fill="{colour}"/>'
                for count, value in known
            )
        )
    return parts


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 5, 8 or 10 times a power of ten."""
    power = 1.0
    while power * 10 < value:
        power *= 10
    while power > value:
        power /= 10
    return next(power * step for step in (1, 2, 4, 5, 8, 10) if power * step >= value)
