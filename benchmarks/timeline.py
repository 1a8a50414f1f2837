"""A recorded step of the engine as lanes of time: what the host did, what the device did, and where nobody worked.

Reads the trace that torch's profiler exports, tells kernels by name and by the stage that launched them, adds up time
by kind, and draws SVG. Needs no GPU and runs nothing.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from picture import BACKGROUND, MARGIN, PLAIN, QUIET

STEP = "step"
"""The annotation around the whole step; those of its stages are `stage:` and a name."""
STAGE = "stage:"
DRAFTS, VERDICT, OTHER, WAITS = "drafts, head", "verdict", "copies, other", "host waits"
BY_STAGE = {"propose": DRAFTS, "observe": DRAFTS, "verify": VERDICT, "commit": VERDICT}
"""Whatever is launched there is that, products of the head too."""
BY_NAME = (
    ("products", r"gemm|epilogue|experts|gemv|cutlass|cublas"),
    ("attention", r"attend|combine|prepare|rotate|heads"),
    ("delta rule", r"delta|token_inputs|gated_norm"),
    ("norms, gates", r"norm|silu"),
    (VERDICT, r"argmax"),
)
COLOURS = {
    "products": "#58a6ff",
    "attention": "#d29922",
    "delta rule": "#bc8cff",
    "norms, gates": "#39c5cf",
    DRAFTS: "#3fb950",
    VERDICT: "#f85149",
    OTHER: "#8b949e",
}
STAGE_COLOURS = ("#3d444d", "#59616b")
WAIT_COLOUR = "#6e4b1f"
IDLE = "#1c222a"
DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_CALLS = ("cuda_runtime", "cuda_driver")
WIDTH, LEFT, LANE, GAP = 1200, 130, 26, 8
AXIS = 20
STEP_HEIGHT = 22 + 3 * LANE + GAP + AXIS + 28
FINEST = 0.5
"""Pixels: blocks of one kind with less between them are drawn as one."""


@dataclass(frozen=True)
class Block:
    """Something from `start` to `end`, milliseconds after the step began."""

    kind: str
    start: float
    end: float

    @property
    def length(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """One step. Its length is until both host and device are done."""

    stages: tuple[Block, ...]
    waits: tuple[Block, ...]
    device: tuple[Block, ...]
    length: float
    host: float
    """Until the host is done."""

    @classmethod
    def of(cls, events: Sequence[Mapping[str, Any]]) -> "Timeline":
        """From the exported events, whose times are microseconds."""
        timed = sorted((e for e in events if e.get("ph") == "X"), key=lambda e: e["ts"])
        step = next(e for e in timed if e.get("cat") == "user_annotation" and e["name"] == STEP)
        begin, finish = step["ts"], step["ts"] + step["dur"]

        def block(kind: str, event: Mapping[str, Any]) -> Block:
            start = (event["ts"] - begin) / 1e3
            return Block(kind, start, start + event["dur"] / 1e3)

        stages = [
            block(event["name"].removeprefix(STAGE), event)
            for event in timed
            if event.get("cat") == "user_annotation" and event["name"].startswith(STAGE)
        ]
        calls = [e for e in timed if e.get("cat") in HOST_CALLS and begin <= e["ts"] <= finish]
        launched = {e["args"]["correlation"]: e["ts"] for e in calls if "correlation" in e.get("args", {})}
        device = []
        for event in timed:
            if event.get("cat") in DEVICE_EVENTS and event["args"].get("correlation") in launched:
                at = (launched[event["args"]["correlation"]] - begin) / 1e3
                device.append(block(kind_of(event["name"], _stage_at(stages, at)), event))
        waits = [block(WAITS, e) for e in calls if "Synchronize" in e["name"]]
        host = (finish - begin) / 1e3
        length = max([host, *(one.end for one in device)])
        return cls(tuple(stages), tuple(waits), _one_after_another(device), length, host)

    @property
    def busy(self) -> float:
        """Milliseconds in which something ran on the device."""
        return sum(block.length for block in self.device)

    def by_kind(self) -> dict[str, float]:
        """Milliseconds of each kind on the device, and of none."""
        found = {kind: sum(one.length for one in self.device if one.kind == kind) for kind in COLOURS}
        return found | {"idle": self.length - self.busy}


def _one_after_another(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """A kernel may be there before the one ahead of it has ended: until then it only waits."""
    found, reached = [], 0.0
    for block in sorted(blocks, key=lambda one: (one.end, one.start)):
        if block.end > reached:
            found.append(replace(block, start=max(block.start, reached)))
            reached = block.end
    return tuple(found)


def kind_of(name: str, stage: str | None) -> str:
    if stage in BY_STAGE:
        return BY_STAGE[stage]
    return next((kind for kind, pattern in BY_NAME if re.search(pattern, name)), OTHER)


def _stage_at(stages: Sequence[Block], time: float) -> str | None:
    return next((stage.kind for stage in stages if stage.start <= time <= stage.end), None)


def merged(blocks: Sequence[Block], finest: float) -> list[Block]:
    """Neighbours of one kind with less than so much between them as one."""
    found: list[Block] = []
    for block in sorted(blocks, key=lambda one: one.start):
        last = found[-1] if found else None
        if last is not None and last.kind == block.kind and block.start - last.end < finest:
            found[-1] = Block(last.kind, last.start, max(last.end, block.end))
        else:
            found.append(block)
    return found


def draw(steps: Mapping[str, Timeline], caption: str, zoom: float = 0.5) -> str:
    """The steps one above the other on one scale, each with `zoom` milliseconds of its middle drawn wide; then time by
    kind."""
    longest = max(step.length for step in steps.values())
    parts: list[str] = []
    y = MARGIN
    for title, step in steps.items():
        parts += _step(title, step, longest, zoom, y)
        y += STEP_HEIGHT
    parts += _legend(steps, y)
    y += 22 * (len(COLOURS) + 4)
    parts.append(_text(MARGIN, y, caption, QUIET))
    height = y + MARGIN
    style = "font-family:ui-monospace,Menlo,Consolas,monospace;font-size:13px;white-space:pre"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/><g style="{style}">',
            *parts,
            "</g></svg>\n",
        ]
    )


def _step(title: str, step: Timeline, longest: float, zoom: float, y: int) -> list[str]:
    """A title, the host's lane, the device's with its scale, and a part of that drawn wide."""
    span = WIDTH - LEFT - MARGIN
    idle = step.length - step.busy
    said = f"{title}: {step.length:.2f} ms, device idle {idle:.2f} ms ({idle / step.length:.0%})"
    parts = [_text(MARGIN, y + 12, said, PLAIN)]
    y += 22
    stages = [(block, STAGE_COLOURS[number % len(STAGE_COLOURS)]) for number, block in enumerate(step.stages)]
    host = [*stages, *((block, WAIT_COLOUR) for block in step.waits)]
    parts += _lane("host", host, (0.0, longest), step.host, y)
    scale = span / longest
    for block in step.stages:
        if block.length * scale > 8 * len(block.kind) + 8:
            parts.append(_text(LEFT + block.start * scale + 4, y + 17, block.kind, PLAIN))
    y += LANE + GAP
    device = [(block, COLOURS[block.kind]) for block in step.device]
    parts += _lane("device", device, (0.0, longest), step.length, y)
    y += LANE
    tick = _round_tick(longest)
    for number in range(int(longest / tick) + 1):
        x = LEFT + number * tick * scale
        parts.append(_line(x, y, x, y + 4))
        parts.append(_text(x, y + AXIS - 5, f"{number * tick:g}{'' if number else ' ms'}", QUIET))
    middle = step.length / 2
    window = (max(0.0, middle - zoom / 2), min(step.length, middle + zoom / 2))
    for number, time in enumerate(window):
        parts.append(_line(LEFT + time * scale, y, LEFT + number * span, y + AXIS))
    parts += _lane(f"{window[1] - window[0]:.2g} ms of it", device, window, window[1], y + AXIS)
    return parts


def _lane(
    name: str, blocks: Sequence[tuple[Block, str]], window: tuple[float, float], end: float, y: int
) -> list[str]:
    """Blocks of a window of time over the colour of nothing."""
    begin, stop = window
    scale = (WIDTH - LEFT - MARGIN) / (stop - begin)
    parts = [_text(MARGIN, y + 17, name, QUIET), _rect(LEFT, y, (min(end, stop) - begin) * scale, IDLE)]
    for colour in dict.fromkeys(colour for _, colour in blocks):
        inside = [
            Block("", max(begin, block.start), min(stop, block.end))
            for block, own in blocks
            if own == colour and block.end > begin and block.start < stop
        ]
        for block in merged(inside, FINEST / scale):
            parts.append(_rect(LEFT + (block.start - begin) * scale, y, block.length * scale, colour))
    return parts


def _legend(steps: Mapping[str, Timeline], y: int) -> list[str]:
    """Time by kind, a column for each step."""
    columns = [step.by_kind() | {WAITS: sum(wait.length for wait in step.waits)} for step in steps.values()]
    colours = COLOURS | {"idle": IDLE, WAITS: WAIT_COLOUR}
    parts = [_text(LEFT + 190 + 130 * n, y + 12, title, QUIET) for n, title in enumerate(steps)]
    for number, kind in enumerate(colours):
        top = y + 22 * (number + 1)
        parts.append(_rect(LEFT, top, 14, colours[kind], 14))
        parts.append(_text(LEFT + 24, top + 12, kind, PLAIN))
        parts += [
            _text(LEFT + 190 + 130 * n, top + 12, f"{found[kind]:8.3f} ms", PLAIN)
            for n, found in enumerate(columns)
        ]
    return parts


def _round_tick(longest: float) -> float:
    """The largest of 1, 2, 5 × 10ⁿ that gives at least five."""
    tick = 1000.0
    for factor in (0.5, 0.4, 0.5) * 6:
        if longest / tick >= 5:
            break
        tick *= factor
    return tick


def _line(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<path d="M{x:.1f} {y}L{to_x:.1f} {to_y}" stroke="{QUIET}" stroke-width="0.7" fill="none"/>'


def _rect(x: float, y: float, width: float, fill: str, height: int = LANE) -> str:
    return f'<rect x="{x:.2f}" y="{y}" width="{max(0.0, width):.2f}" height="{height}" fill="{fill}"/>'


def _text(x: float, y: float, text: str, fill: str) -> str:
    return f'<text x="{x:.1f}" y="{y}" fill="{fill}" xml:space="preserve">{escape(text)}</text>'
