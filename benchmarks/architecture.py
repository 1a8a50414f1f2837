"""Draws docs/architecture.svg: the packages in the order in which they may import each other, and a token's walk.

python benchmarks/architecture.py

Needs nothing of the engine. `tests/test_docs.py` holds the picture to the packages that there are.
"""

from html import escape
from pathlib import Path

TARGET = Path(__file__).parent.parent / "docs" / "architecture.svg"
WIDTH, HEIGHT, TOP = 1040, 656, 66

PACKAGES = (
    ("cli", "commands and their output"),
    ("cluster", "replicas on Ray Serve, and their front"),
    ("server", "HTTP, dialects, limits, keys, models"),
    ("convert", "writing checkpoints"),
    ("llm", "LLM, AsyncLLM: the Python interface"),
    ("engine", "plans, steps, memory, faults, metrics"),
    ("text", "templates, tokens, tools, grammars"),
    ("speculate", "proposers, acceptance, draft depth"),
    ("sampling", "processors, noise, the draw"),
    ("models", "families: one file each; heads"),
    ("layers", "attention, DeltaNet, MLP, experts"),
    ("state", "pages, slots, checkpoints, commit"),
    ("checkpoint", "files, names, loading"),
    ("ops", "backends: reference, native, Triton"),
    ("quant", "packed formats"),
    ("types", "values: requests, plans, drafts, verdicts"),
)
"""Each package and what it holds; a package imports only from those below it."""

BEFORE = (
    ("Request", "server or LLM: prompt rendered and tokenized, fields checked"),
    ("plan", "scheduler: rows, tokens of each, depths; pages reserved"),
)
STAGES = (
    ("draft", "the proposer: up to K tokens for each row"),
    ("forward", "the target: logits and hidden states of all rows' tokens"),
    ("verify", "accepted drafts and one token of the target's own"),
    ("commit", "the state keeps what was accepted; the head reads it"),
)
AFTER = (
    ("finish", "scheduler: lengths, stop tokens, stop strings"),
    ("Chunk", "text, reasoning, tool calls; server-sent events or Completion"),
)
STEPPERS = "host by parts, one CUDA graph, or graphs around a grammar"

STYLE = """
text { font-family: ui-sans-serif, system-ui, "Segoe UI", Arial, sans-serif; font-size: 12.5px; fill: #57606a }
.name { font-family: ui-monospace, Menlo, Consolas, monospace; font-weight: 600; font-size: 13px; fill: #1f2328 }
.title { font-weight: 600; font-size: 15px; fill: #1f2328 }
.card { fill: #ffffff; stroke: #d0d7de }
.box { fill: #f6f8fa; stroke: #d0d7de }
.step { fill: none; stroke: #0969da; stroke-width: 1.5 }
.stage { fill: #ddf4ff; stroke: #54aeff }
.line { fill: none; stroke: #57606a; stroke-width: 1.3 }
.ahead { stroke-dasharray: 5 4 }
.tip { fill: #57606a }
@media (prefers-color-scheme: dark) {
text { fill: #9198a1 } .name, .title { fill: #f0f6fc }
.card { fill: #0d1117; stroke: #3d444d } .box { fill: #151b23; stroke: #3d444d }
.step { stroke: #4493f8 } .stage { fill: #12263f; stroke: #1f6feb }
.line { stroke: #9198a1 } .tip { fill: #9198a1 }
}
"""


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(content)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" class="{kind}"/>'


def row(x: float, y: float, width: float, entry: tuple[str, str], kind: str, indent: float) -> list[str]:
    """A box with a name and what it means."""
    name, meaning = entry
    return [box(x, y, width, 30, kind), text(x + 12, y + 20, name, "name"), text(x + indent, y + 20, meaning)]


def arrow(x: float, y: float, length: float) -> list[str]:
    """Down from (x, y)."""
    tip = y + length
    return [
        f'<path d="M{x} {y} V{tip - 4}" class="line"/>',
        f'<path d="M{x - 4} {tip - 6} L{x + 4} {tip - 6} L{x} {tip} Z" class="tip"/>',
    ]


def packages() -> list[str]:
    parts = [
        text(24, 34, "Packages", "title"),
        text(24, 53, "Each imports only from those below it."),
    ]
    for number, entry in enumerate(PACKAGES):
        parts += row(24, TOP + number * 38, 356, entry, "box", 104)
    return parts


def walk() -> list[str]:
    x, width, y = 440, 540, TOP
    parts = [
        text(x, 34, "A token's walk", "title"),
        text(x, 53, "From plan to finish is one Engine.step. Calls go down, values come back."),
    ]
    for entry in BEFORE:
        parts += [*row(x, y, width, entry, "box", 84), *arrow(x + 40, y + 30, 18)]
        y += 48
    plan, first = y - 48, y
    y += 34
    parts.append(text(x + 12, first + 23, "stepper", "name"))
    parts.append(text(x + 84, first + 23, STEPPERS))
    for entry in STAGES:
        parts += row(x + 10, y, width - 20, entry, "stage", 84)
        if entry is not STAGES[-1]:
            parts += arrow(x + 50, y + 30, 14)
        y += 44
    parts.append(box(x, first, width, y - first - 4, "step"))
    y += 14
    parts += arrow(x + 40, y - 18, 18)
    finish = y
    for entry in AFTER:
        parts += row(x, y, width, entry, "box", 84)
        if entry is not AFTER[-1]:
            parts += arrow(x + 40, y + 30, 18)
        y += 48
    right = x + width
    parts += [
        f'<path d="M{right} {finish + 15} H{right + 24} V{plan + 15} H{right + 6}" class="line"/>',
        f'<path d="M{right + 7} {plan + 11} L{right + 7} {plan + 19} L{right} {plan + 15} Z" class="tip"/>',
        f'<path d="M{right} {first + 18} H{right + 12} V{plan + 23} H{right + 6}" class="line ahead"/>',
        text(x, y + 12, "Solid line back: the next step. Dashed: on a GPU the next step is launched"),
        text(x, y + 29, "before this one is read, where no row can end by its length or by a stop string."),
    ]
    return parts


def draw() -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
            "<title>The packages of Headlong and the walk of a token</title>",
            f"<style>{STYLE}</style>",
            f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8" class="card"/>',
            *packages(),
            *walk(),
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    TARGET.write_text(draw())
    print(TARGET)
