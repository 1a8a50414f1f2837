"""The GPU: correctness first, then a step and its parts against what the memory allows.

    python benchmarks/gpu.py [--shape benchmarks/shapes/qwen3.6-27b.json] [--layers 64] [--fp8] [--rows 1,4,16]
                             [--contexts 1024,8192] [--depths 0,1,3,6] [--draft-vocab N] [--sampled] [--penalised]
                             [--constrained]
                             [--tokens 20000] [--skip-exact] [--json FILE]

First the embedded model in bfloat16: batches of greedy rows, of sampled ones and of both, K = 1…6 against K = 0, token
by token. Then a model of the given shape with random weights made on the device, packed as the shape's config says,
which says nothing but takes its time: logits of a verified step against those of single tokens, bit by bit; then the
floor (the bytes a step must read, at the best rate seen: a copy's, or the largest product's; `step_floor.py` says what
counts), a plain step, verified steps of K + 1 tokens, the drafts, and the
whole cycle of K drafts and their verification, by the engine's own code. `pays from` is the share of drafts that must
stand for the cycle to be worth it. Medians of CUDA-event times, milliseconds, of calls one after the other: four of a
part, eight steps. `--sampled` rows are not greedy but have a temperature, top-k and top-p; `--penalised` ones have a
presence penalty as well; of `--constrained` ones a constraint allows every second token. Of contexts beyond 1,024
tokens all but the end is taken as read: keys are zeros there, which take as long. Ends in one JSON line.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from forced_step import forced_steps
from halved import HELD, Halved
from headlong import LLM, SamplingParams
from headlong.config import EngineConfig
from headlong.engine.assemble import assemble
from headlong.engine.engine import Engine
from headlong.state.state import RowState
from headlong.types import Plan, Request
from random_weights import random_model
from step_floor import floor

CUDA = torch.device("cuda")
PROMPTS = (
    "Write a short story about a shy dragon who learns to share.",
    "Explain rain to a child.",
    "red, blue, green, red, blue, green, red, blue,",
    "Give me three tips for sleeping better.",
)
DEPTHS = range(1, 7)
READ_WHOLE, READ_AT_LEAST = 1024, 16
"""Tokens of prompts that are read from end to end, and of longer ones what is read in any case."""


SAMPLED: dict[str, Any] = {"temperature": 0.7, "top_p": 0.95, "top_k": 20, "seed": 1}
PENALISED: dict[str, Any] = SAMPLED | {"presence_penalty": 1.5}
"""What the makers of such models recommend."""
WARM_RUNS = 4
"""In which the engine compiles and records the depths it tries; as many count."""
IN_A_ROW = 4
"""Calls that are timed together: the device then waits for the host at none but the first."""


def milliseconds(work: Callable[[], object], repeats: int = 15, warm: int = 3) -> float:
    for _ in range(warm):
        work()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(IN_A_ROW):
            work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / IN_A_ROW)
    return statistics.median(times)


def exactness(total: int) -> dict[str, float]:
    """Tokens of K = 1…6 that differ from those of K = 0, in batches of different sizes and kinds."""
    llm = LLM(device="cuda", dtype="bfloat16", mtp="on", max_rows=16)
    each = max(32, total // (len(DEPTHS) * 32))
    chats = [[{"role": "user", "content": f"{PROMPTS[n % 4]} ({n})"}] for n in range(32)]
    params = [
        SamplingParams(
            max_tokens=each, ignore_eos=True, seed=n, temperature=0.0 if n % 2 else 0.8, top_p=0.95
        )
        for n in range(32)
    ]

    def tokens_of(numbers: list[int], depth: int) -> dict[int, tuple[int, ...]]:
        found = llm.chat(
            [chats[n] for n in numbers], [replace(params[n], draft_tokens=depth) for n in numbers]
        )
        return {n: done.token_ids for n, done in zip(numbers, found, strict=True)}

    together, apart = [list(range(32))], [list(range(0, 32, 2)), list(range(1, 32, 2))]
    truth = tokens_of(together[0], 0)
    compared = differing = 0
    for depth in DEPTHS:
        for numbers in apart if depth % 3 else together:
            for n, tokens in tokens_of(numbers[:: -1 if depth % 2 else 1], depth).items():
                compared += len(tokens)
                differing += sum(a != b for a, b in zip(tokens, truth[n], strict=True))
    return {"tokens_compared": compared, "tokens_differing": differing, **embedded_speeds()}


def embedded_speeds() -> dict[str, float]:
    """Tokens a second that one row of the embedded model decodes, on both devices: plain, and as the engine chooses."""
    chat, speeds = [{"role": "user", "content": PROMPTS[0]}], {}
    for name, device in (("gpu", "cuda"), ("cpu", "cpu")):
        llm = LLM(device=device, mtp="on", max_rows=1, prefix_cache=False)
        for way, depth in (("plain", 0), ("auto", None)):
            params = SamplingParams(max_tokens=512, ignore_eos=True, draft_tokens=depth)
            (request,) = llm.service.requests(llm.service.text.encode_chat(chat), params, way)
            found = [decoding_speed(llm.engine, request) for _ in range(2 * WARM_RUNS)]
            speeds[f"embedded_{name}_{way}_tokens_per_second"] = round(
                statistics.median(found[WARM_RUNS:]), 1
            )
    return speeds


def decoding_speed(engine: Engine, request: Request) -> float:
    """Tokens a second, once the prompt was read."""
    engine.add(request)
    while not (step := engine.step()).rows:
        pass
    first, tokens, started = len(step.rows[0].token_ids), 0, time.perf_counter()
    while engine.has_work:
        tokens += sum(len(row.token_ids) for row in engine.step().rows)
    assert first + tokens == request.params.max_tokens
    return tokens / (time.perf_counter() - started)


class Bench:
    """One random model in an engine of its own."""

    def __init__(self, args: argparse.Namespace, rows: int, context: int) -> None:
        self.rows, self.context = rows, context
        self.choice = PENALISED if args.penalised else SAMPLED if args.sampled else {}
        self.choice = self.choice | ({"grammar": HELD} if args.constrained else {"ignore_eos": True})
        config = EngineConfig(
            device="cuda",
            mtp="on",
            max_rows=rows,
            max_context=context + 512,
            cache_tokens=rows * (context + 512),
            chunk_tokens=2048,
            prefix_cache=False,
            draft_vocab=args.draft_vocab,
            max_draft_tokens=max(DEPTHS),
        )
        self.engine = assemble(args.built, config)
        self.vocab = args.built.model.config.vocab_size
        if context > READ_WHOLE:
            self._take_as_read(context - READ_AT_LEAST)

    def _take_as_read(self, count: int) -> None:
        """So many tokens of every prompt."""
        honest = self.engine.state.admit

        def admit(*args: Any, **kwargs: Any) -> RowState | None:
            row = honest(*args, **kwargs)
            if row is not None:
                row.length = count
            return row

        self.engine.state.admit = admit  # type: ignore[method-assign]

    def fill(self, depth: int) -> None:
        """Rows that have read their prompts and decode."""
        generator = torch.Generator().manual_seed(1)
        for row in range(self.rows):
            prompt = torch.randint(self.vocab, (self.context,), generator=generator).tolist()
            params = SamplingParams(max_tokens=400, draft_tokens=depth, **self.choice)
            constraint = partial(Halved, self.vocab) if params.grammar else None
            self.engine.add(
                Request(
                    f"row{row}", tuple(prompt), params, seed=row, draft_tokens=depth, constraint=constraint
                )
            )
        while any(not row.decoding for row in self.engine.scheduler.running) or self.engine.scheduler.waiting:
            self.engine.step()

    def clear(self) -> None:
        for row in list(self.engine.scheduler.running):
            self.engine.cancel(row.id)

    @torch.inference_mode()
    def parts(self, depth: int) -> dict[str, float]:
        """Of a step with so many drafts: the whole, the target's pass, and the drafts."""
        self.fill(depth)
        engine = self.engine
        plan = engine.scheduler.plan()
        draft = engine.proposer.propose(plan)
        plan = plan.fitted(draft)
        batch = engine.runner.batch(plan, draft)
        context = engine.runner.context(batch)
        found = {"target": milliseconds(lambda: engine.runner.forward(batch, context))}
        if depth:
            found["drafts"] = milliseconds(lambda: engine.proposer.propose(plan))
        found["step"] = statistics.median(self._step_time() for _ in range(5))
        self.clear()
        return found

    def prompt_speed(self) -> float:
        """Tokens a second of prompts that are read from end to end, the second time."""
        seconds = 0.0
        for _ in range(2):
            torch.cuda.synchronize()
            started = time.perf_counter()
            self.fill(0)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - started
            self.clear()
        return self.rows * self.context / seconds

    def _step_time(self, steps: int = 8) -> float:
        """Of steps one after the other, as they come while the engine runs: one is launched before the last is read."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(3):
            self.engine.step()
        begin.record()
        for _ in range(steps):
            self.engine.step()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / steps

    @torch.inference_mode()
    def is_exact(self, depth: int) -> bool:
        """Whether a verified step's logits are those of its tokens one after the other, bit by bit."""
        self.fill(depth)
        runner, layers = self.engine.runner, self.engine.state.layers
        plan = self.engine.scheduler.plan()
        draft = self.engine.proposer.propose(plan)
        batch = runner.batch(plan, draft)
        slots = [(row.slot, row.num_replay) for row in plan.rows]
        assert not any(num_replay for _, num_replay in slots), "drafts were accepted"
        before = {name: [layer.save(*slot) for slot in slots] for name, layer in layers.items()}
        whole = runner.forward(batch, runner.context(batch))[1].view(self.rows, depth + 1, -1).clone()
        for name, layer in layers.items():
            for (slot, _), saved in zip(slots, before[name], strict=True):
                layer.clear(slot)
                if saved is not None:
                    layer.restore(slot, saved)
        tokens, same = batch.tokens_N.view(self.rows, depth + 1).tolist(), True
        for place in range(depth + 1):
            rows = tuple(
                replace(
                    row,
                    start=row.start + place,
                    query_len=1,
                    num_drafts=0,
                    num_replay=0,
                    known_tokens=(tokens[n][place],),
                )
                for n, row in enumerate(plan.rows)
            )
            single = runner.batch(Plan(rows, 0), None)
            same = same and torch.equal(runner.forward(single, runner.context(single))[1], whole[:, place])
        self.clear()
        return same

    def throughput(self, depth: int, rate: float, steps: int = 40) -> float:
        """Tokens a second where drafts are taken as accepted with this chance each, through the engine's own commit."""
        with forced_steps(self.engine, rate):
            self.fill(depth)
            for _ in range(5):
                self.engine.step()
            torch.cuda.synchronize()
            started, tokens = time.perf_counter(), 0
            for _ in range(steps):
                tokens += sum(len(row.token_ids) for row in self.engine.step().rows)
            seconds = time.perf_counter() - started
            self.clear()
        return tokens / seconds


def measure(args: argparse.Namespace, found: dict[str, object]) -> list[dict[str, float]]:
    lines = []
    for context in args.contexts:
        for rows in args.rows:
            bench = Bench(args, rows, context)
            if rows == args.rows[0] and context == args.contexts[0]:
                found["verify_is_decode"] = bench.is_exact(3)
            if context <= READ_WHOLE:
                found[f"prompt_tokens_per_second_rows{rows}"] = round(bench.prompt_speed())
            plain = 0.0
            for depth in args.depths:
                line = {"rows": rows, "context": context, "K": depth, **bench.parts(depth)}
                if not depth:
                    plain = line["step"]
                elif plain:
                    line["pays from"] = (line["step"] / plain - 1) / depth
                lines.append({key: round(value, 3) for key, value in line.items()})
                print(lines[-1], flush=True)
            for depth, rate in ((0, 0.0), (2, 0.75)):
                key = f"tokens_per_second_rows{rows}_context{context}_K{depth}"
                found[key] = round(bench.throughput(depth, rate), 1)
                print(key, found[key], flush=True)
            del bench
            torch.cuda.empty_cache()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--shape", type=Path, default=Path(__file__).parent / "shapes" / "qwen3.6-27b.json")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--rows", type=numbers, default=[1, 4, 16])
    parser.add_argument("--contexts", type=numbers, default=[1024])
    parser.add_argument("--depths", type=numbers, default=[0, 1, 3, 6])
    parser.add_argument("--draft-vocab", type=int, default=None)
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("--penalised", action="store_true")
    parser.add_argument("--constrained", action="store_true")
    parser.add_argument("--tokens", type=int, default=20000)
    parser.add_argument("--skip-exact", action="store_true")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    found: dict[str, object] = {
        "benchmark": "gpu",
        "device": torch.cuda.get_device_name(),
        "shape": args.shape.stem,
    }
    if not args.skip_exact:
        found |= exactness(args.tokens)
        print(found, flush=True)
    with torch.inference_mode():
        made = random_model(args.shape, torch.bfloat16, CUDA, fp8=args.fp8, layers=args.layers)
    args.built, args.target_bytes, args.draft_bytes = made.built, made.target_bytes, made.draft_bytes
    found |= floor(args, milliseconds)
    print(found, flush=True)
    lines = measure(args, found)
    columns = ("rows", "context", "K", "target", "drafts", "step", "pays from")
    table = Table(*columns, title=f"{args.shape.stem}, milliseconds")
    for line in lines:
        table.add_row(*(str(line.get(column, "")) for column in columns))
    Console(width=110).print(table)
    found["lines"] = lines
    if args.json:
        args.json.write_text(json.dumps(found))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
