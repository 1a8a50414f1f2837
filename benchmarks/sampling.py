"""What choosing tokens takes: one row of a step, alone and with three drafts, by kind of sampling and vocabulary.

    python benchmarks/sampling.py [--vocab 8192,248320] [--tokens 1,4] [--device cpu] [--repeats 30]

Logits are random, and a few dozen tokens stand out as they do in text. Medians in milliseconds: on a CPU of
`Sampler.choose`, which decides all tokens of a step at once; on a GPU of `Sampler.choose_even` in a recorded graph, as
a step has it, by the device's clock, and beside it the same by torch's operations, where these can be recorded. Ends in
one JSON line.
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
from headlong.ops.registry import choose_backend
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
    "penalty": {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "presence_penalty": 1.5},
    "greedy, penalty": {"temperature": 0.0, "presence_penalty": 1.5},
}
SPREAD, LIKELY = 2.5, 48
"""Standard deviation of logits; and how many tokens stand out."""
OUTPUT = 1000
"""Tokens that penalised rows have produced."""
IN_A_ROW = 8
"""Choices in a recorded graph: so that starting it does not count."""


def some_logits(tokens: int, vocab: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(0)
    logits_LV = SPREAD * torch.randn(tokens, vocab, generator=generator, device=device)
    logits_LV[:, :: vocab // LIKELY] += 4 * SPREAD
    return logits_LV


def milliseconds(sampler: Sampler, logits_LV: torch.Tensor, entries: list[Entry], repeats: int) -> float:
    times, drafts_1K = [], torch.arange(len(logits_LV))[None]
    for _ in range(repeats):
        started = time.perf_counter()
        sampler.choose(logits_LV, Entries(entries, sampler.table, drafts_1K)).tolist()
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times)


def recorded_milliseconds(sampler: Sampler, logits_LV: torch.Tensor, repeats: int) -> float:
    """On the device alone."""
    device, signature = logits_LV.device, sampler.signature([1])
    assert signature is not None
    slots_R = torch.ones(1, dtype=torch.long, device=device)
    positions_L = torch.arange(len(logits_LV), device=device)
    drafts_RK = positions_L[None, 1:].contiguous()
    sampler.table.tally.update([1])
    choose = lambda: sampler.choose_even(logits_LV, slots_R, positions_L, drafts_RK, signature)  # noqa: E731
    choose()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(IN_A_ROW):
            choose()
    times = []
    for _ in range(repeats + 1):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / IN_A_ROW)
    return statistics.median(times[1:])


def measured(
    given: dict[str, Any], vocab: int, tokens: int, device: torch.device, repeats: int
) -> list[float]:
    """With the device's ops; on a GPU by torch's operations, too."""
    ops, table = choose_backend(torch.float32, device), SamplingTable(1, vocab, device)
    table.set(1, Request("row", (0,), SamplingParams(seed=1, **given), seed=1), list(range(5, 5 + OUTPUT)))
    logits_LV = some_logits(tokens, vocab, device)
    sampler = Sampler(table, ops.argmax, ops.draw, ops.sample, ops.penalise)
    if device.type == "cpu":
        return [milliseconds(sampler, logits_LV, [Entry(1, 5, 0, tokens)], repeats)]
    plain = Sampler(table, draw=ops.draw)
    able = [each for each in (sampler, plain) if each.signature([1]) is not None]
    return [recorded_milliseconds(each, logits_LV, repeats) for each in able]


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
    shapes = [(vocab, tokens) for vocab in args.vocab for tokens in args.tokens]
    found = {
        kind: [
            [round(spent, 4) for spent in measured(given, vocab, tokens, device, args.repeats)]
            for vocab, tokens in shapes
        ]
        for kind, given in KINDS.items()
    }
    beside = "" if device.type == "cpu" else " (torch)"
    out = Table("ms", *(f"{tokens} of {vocab:,}{beside}" for vocab, tokens in shapes))
    for kind, times in found.items():
        out.add_row(
            kind, *(" ".join([str(own), *(f"({other})" for other in others)]) for own, *others in times)
        )
    Console(width=110).print(out)
    print(json.dumps({"benchmark": "sampling", "device": args.device, "shapes": shapes, "ms": found}))


if __name__ == "__main__":
    main()
