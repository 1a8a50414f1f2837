"""Prompts on a GPU: read from end to end by the engine's own steps, the head primed; and what they do to rows that
decode.

    python benchmarks/prompts.py [--shape benchmarks/shapes/qwen3.6-27b.json] [--layers N] [--fp8]
                                 [--prompts 1x8192,16x1024] [--chunks 2048,8192] [--kernels 12] [--mixed 16x32768]

A model of the given shape with random weights. For each prompt (rows x tokens) and chunk: tokens a second, the time to
the first token, and the model's own multiplications (two for each weight that a token meets, attention left out) in
TFLOP/s beside those of cuBLAS's largest GEMM in the same run. `--kernels` names the kernels that took longest.
`--mixed`: so many rows decode while a prompt of so many tokens arrives; the gaps between their tokens, before and
meanwhile. The best of two runs after one that compiles. Ends in one JSON line.
"""

import argparse
import json
import statistics
import time
import zlib
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from cuda_times import milliseconds
from headlong import SamplingParams
from headlong.config import EngineConfig
from headlong.engine.assemble import assemble
from headlong.engine.engine import Engine
from headlong.types import Request
from random_weights import random_model

CUDA = torch.device("cuda")
GENERATED = 4096


class Reader:
    """An engine that reads prompts of one shape."""

    def __init__(
        self,
        args: argparse.Namespace,
        rows: int,
        context: int,
        chunk: int | None,
        cache_tokens: int | None = None,
    ) -> None:
        config = EngineConfig(
            device="cuda",
            mtp="on",
            max_rows=rows,
            max_context=context + GENERATED,
            gpu_memory_fraction=0.95,
            cache_tokens=cache_tokens or rows * (context + GENERATED),
            chunk_tokens=chunk,
            prefix_cache=False,
        )
        self.engine: Engine = assemble(args.built, config)
        self.vocab = args.built.model.config.vocab_size

    def add(self, name: str, context: int, max_tokens: int = GENERATED) -> None:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        prompt = tuple(torch.randint(self.vocab, (context,), generator=generator).tolist())
        params = SamplingParams(max_tokens=max_tokens, draft_tokens=0, ignore_eos=True)
        self.engine.add(Request(name, prompt, params, seed=1, draft_tokens=0))

    def read(self, rows: int, context: int) -> float:
        """The seconds until every prompt was read."""
        started = time.perf_counter()
        for row in range(rows):
            self.add(f"row{row}", context, 4)
        self.step_until_read()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        self.clear()
        return seconds

    def step_until_read(self) -> list[float]:
        """Returns the seconds of each step until all rows decode."""
        times, scheduler = [], self.engine.scheduler
        while scheduler.waiting or any(not row.decoding for row in scheduler.running):
            started = time.perf_counter()
            self.engine.step()
            times.append(time.perf_counter() - started)
        return times

    def clear(self) -> None:
        for row in list(self.engine.scheduler.running):
            self.engine.cancel(row.id)


def cublas(config: object, tokens: int) -> float:
    """TFLOP/s of a GEMM as large as the model's largest."""
    size = getattr(config, "hidden_size", 4096)
    x, weight = (torch.randn(n, size, device=CUDA).to(torch.bfloat16) for n in (tokens, 8 * size))
    return 2e-9 * tokens * 8 * size * size / milliseconds(lambda: torch.mm(x, weight.T))


def read_prompts(args: argparse.Namespace, found: list[dict[str, object]]) -> None:
    peak = cublas(args.built.model.config, 8192)
    columns = ("prompt", "chunk", "tokens/s", "first token, ms", "TFLOP/s", f"of cuBLAS ({peak:.0f})")
    table = Table(*columns, title=f"{args.shape.stem}{' FP8' if args.fp8 else ''}")
    for prompt in args.prompts.split(","):
        rows, context = (int(part) for part in prompt.split("x"))
        for chunk in args.chunks.split(","):
            reader = Reader(args, rows, context, int(chunk))
            seconds = min([reader.read(rows, context) for _ in range(3)][1:])
            speed = rows * context / seconds
            flops = 2e-12 * args.parameters * speed
            line = {"prompt": prompt, "chunk": int(chunk), "tokens_per_second": round(speed)}
            found.append({**line, "first_token_ms": round(1e3 * seconds), "tflops": round(flops)})
            cells = (f"{speed:,.0f}", f"{1e3 * seconds:,.0f}", f"{flops:.0f}", f"{flops / peak:.2f}")
            table.add_row(prompt, chunk, *cells)
            print(found[-1], flush=True)
            if args.kernels:
                show_kernels(reader, rows, context, args.kernels)
            del reader
            torch.cuda.empty_cache()
    Console(width=110).print(table)


def show_kernels(reader: Reader, rows: int, context: int, count: int) -> None:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        reader.read(rows, context)
    kernels = sorted(profiler.key_averages(), key=lambda kernel: -kernel.device_time_total)
    for kernel in kernels[:count]:
        print(f"{kernel.device_time_total / 1e3:8.1f} ms {kernel.count:6d} x {kernel.key[:80]}", flush=True)


def gaps_beside_prompt(reader: Reader, rows: int, context: int) -> tuple[list[float], list[float]]:
    """The seconds of steps of rows that decode, alone and while a prompt is read."""
    for row in range(rows):
        reader.add(f"row{row}", 1024)
    reader.step_until_read()
    before = []
    for _ in range(30):
        started = time.perf_counter()
        reader.engine.step()
        before.append(time.perf_counter() - started)
    reader.add("long", context, 4)
    during = reader.step_until_read()
    reader.clear()
    return before, during


def mixed_load(args: argparse.Namespace) -> dict[str, object]:
    """Gaps between tokens of rows that decode, before a prompt arrives and while it is read, in milliseconds."""
    rows, context = (int(part) for part in args.mixed.split("x"))
    found: dict[str, object] = {}
    for name, chunk in (("by default", None), ("2,048 whatever decodes", 2048)):
        reader = Reader(args, rows + 1, context, chunk, context + 64 + rows * (1088 + GENERATED))
        gaps_beside_prompt(reader, rows, context)  # which compiles
        before, during = gaps_beside_prompt(reader, rows, context)
        usual, ordered = statistics.median(before), sorted(during)
        found[name] = {
            "usual_ms": round(1e3 * usual, 1),
            "median_ms": round(1e3 * statistics.median(during), 1),
            "p99_ms": round(1e3 * ordered[int(0.99 * (len(ordered) - 1))], 1),
            "prompt_tokens_per_second": round(context / sum(during)),
        }
        print(name, found[name], flush=True)
        del reader
        torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", type=Path, default=Path(__file__).parent / "shapes" / "qwen3.6-27b.json")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--prompts", default="1x8192,16x1024")
    parser.add_argument("--chunks", default="2048,8192")
    parser.add_argument("--kernels", type=int, default=0)
    parser.add_argument("--mixed", default=None)
    args = parser.parse_args()
    with torch.inference_mode():
        made = random_model(args.shape, torch.bfloat16, CUDA, fp8=args.fp8, layers=args.layers)
    args.built, config = made.built, made.built.model.config
    lm_head = 2 * config.vocab_size * config.hidden_size  # bytes, and it meets no prompt's tokens
    args.parameters = (made.target_bytes - lm_head) / (1 if args.fp8 else 2)
    lines: list[dict[str, object]] = []
    found: dict[str, object] = {"benchmark": "prompts", "shape": args.shape.stem, "fp8": args.fp8}
    if args.prompts:
        read_prompts(args, lines)
    if args.mixed:
        found["mixed"] = mixed_load(args)
    print(json.dumps({**found, "device": torch.cuda.get_device_name(), "lines": lines}))


if __name__ == "__main__":
    main()
