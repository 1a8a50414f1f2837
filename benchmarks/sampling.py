"""What choosing tokens takes: one row of a step, alone and with three drafts, by kind of sampling and vocabulary.

    python benchmarks/sampling.py [--vocab 8192,248320] [--tokens 1,4] [--device cpu] [--repeats 30]

Logits are random, and a few dozen tokens stand out as they do in text. Medians in milliseconds of `Sampler.choose`,
which decides all tokens of a step at once. Ends in one JSON line.
"""

import argparse
import json
import statistics
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from headlong import SamplingParams
from headlong.ops.registry import Ops
from headlong.sampling.entries import Entries, Entry
from headlong.sampling.sampler import Sampler
from headlong.sampling.table import SamplingTable
from headlong.types import Request

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 0.8, "top_k": 20},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
    "top-k and top-p": {"temperature": 0.7, "top_k": 20, "top_p": 0.95},
    "min-p": {"temperature": 0.8, "min_p": 0.05},
    "top-p, hot": {"temperature": 2.0, "top_p": 0.95},
}
SPREAD, LIKELY = 2.5, 48
"""Standard deviation of logits; and how many tokens stand out."""


def some_logits(tokens: int, vocab: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(0)
    logits_LV = SPREAD * torch.randn(tokens, vocab, generator=generator, device=device)
    logits_LV[:, :: vocab // LIKELY] += 4 * SPREAD
    return logits_LV


def milliseconds(sampler: Sampler, logits_LV: torch.Tensor, entries: list[Entry], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        sampler.choose(logits_LV, Entries(entries, sampler.table, None)).tolist()
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--vocab", type=numbers, default=[8192, 248320])
    parser.add_argument("--tokens", type=numbers, default=[1, 4])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    device = torch.device(args.device)
    ops = Ops(torch.float32, device)
    shapes = [(vocab, tokens) for vocab in args.vocab for tokens in args.tokens]
    found: dict[str, list[float]] = {}
    for kind, given in KINDS.items():
        for vocab, tokens in shapes:
            table = SamplingTable(1, vocab, device)
            table.set(1, Request("row", (0,), SamplingParams(seed=1, **given), seed=1), [])
            sampler = Sampler(table, ops.best, ops.draw, ops.sample)
            logits_LV, entries = some_logits(tokens, vocab, device), [Entry(1, 5, 0, 0, tokens)]
            spent = milliseconds(sampler, logits_LV, entries, args.repeats)
            found.setdefault(kind, []).append(round(spent, 3))
    out = Table("ms", *(f"{tokens} of {vocab:,}" for vocab, tokens in shapes))
    for kind, times in found.items():
        out.add_row(kind, *map(str, times))
    Console(width=110).print(out)
    print(json.dumps({"benchmark": "sampling", "device": args.device, "shapes": shapes, "ms": found}))


if __name__ == "__main__":
    main()
