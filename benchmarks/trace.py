"""Draws docs/gpu-step.svg: one plain step and one with drafts on a GPU, what the host and the device did and when.

    python benchmarks/trace.py [--out FILE] [--shape benchmarks/shapes/qwen3.6-27b.json] [--layers N] [--fp8]
                               [--rows 1] [--context 1024] [--draft-tokens 3] [--sampled] [--penalised]
                               [--constrained]

A model of the given shape with random weights runs in the engine until its steps are recorded graphs; then one step is
taken down by torch's profiler, whose own work makes the host a little slower than it is. Says time by kind, the
engine's memory plan, and how much of its reserve was used. Ends in one JSON line.
"""

import argparse
import json
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity

from headlong.engine.engine import Engine
from stages import take_down
from timeline import Timeline, draw

TARGET = Path(__file__).parent.parent / "docs" / "gpu-step.svg"
WARM = 12
"""Steps before the one that is taken down: a shape is compiled, then recorded, then replayed."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=TARGET)
    parser.add_argument("--shape", type=Path, default=Path(__file__).parent / "shapes" / "qwen3.6-27b.json")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--draft-vocab", type=int, default=None)
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("--penalised", action="store_true")
    parser.add_argument("--constrained", action="store_true")
    args = parser.parse_args()
    from gpu import CUDA, Bench
    from random_weights import random_model

    with torch.inference_mode():
        made = random_model(args.shape, torch.bfloat16, CUDA, fp8=args.fp8, layers=args.layers)
    args.built = made.built
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    bench = Bench(args, args.rows, args.context)
    steps: dict[str, Timeline] = {}
    for depth in (0, args.draft_tokens):
        bench.fill(depth)
        for _ in range(WARM):
            bench.engine.step()
        steps[f"K={depth}" if depth else "plain"] = take_down(
            bench.engine, [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        )
        bench.clear()
    device = torch.cuda.get_device_name()
    layers = "" if args.layers is None else f", {args.layers} layers"
    caption = f"{args.shape.stem}{layers}, {args.rows} x {args.context} tokens, {device}"
    args.out.write_text(draw(steps, caption))
    report(steps, caption, bench.engine)


def report(steps: dict[str, Timeline], caption: str, engine: Engine) -> None:
    columns = {title: step.by_kind() | {"step": step.length} for title, step in steps.items()}
    table = Table("ms", *columns, title=caption)
    for kind in next(iter(columns.values())):
        table.add_row(kind, *(f"{column[kind]:.3f}" for column in columns.values()))
    Console(width=110).print(table)
    for line in engine.memory.lines():
        print(line)
    memory, peak = engine.memory, torch.cuda.max_memory_reserved()
    found = {
        "benchmark": "trace",
        "caption": caption,
        "ms": {
            title: {kind: round(ms, 4) for kind, ms in column.items()} for title, column in columns.items()
        },
        "reserve_planned_bytes": memory.reserve_bytes,
        "reserve_used_bytes": peak - (memory.total_bytes - memory.reserve_bytes),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
