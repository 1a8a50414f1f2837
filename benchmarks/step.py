"""Where the time of a step goes, and how fast a prompt is read, on the embedded model.

    python benchmarks/step.py [--dtype auto] [--draft-tokens 0,3] [--max-tokens 200] [--prompt-tokens 512]

Times each stage of `Engine.step` with a clock around it. Ends in one JSON line.
"""

import argparse
import json
import random
import time
from collections import defaultdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from headlong import LLM, SamplingParams
from stages import stages_of

PROMPT = "Write a short story about a shy dragon who learns to share."


def clock_stages(llm: LLM) -> dict[str, float]:
    """Puts a clock around each stage; returns the seconds, which grow from then on."""
    engine, seconds = llm.engine, defaultdict(float)
    for owner, name in stages_of(engine):
        setattr(owner, name, _clocked(getattr(owner, name), name, seconds))
    return seconds


def _clocked(function: Any, name: str, seconds: dict[str, float]) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = function(*args, **kwargs)
        seconds[name] += time.perf_counter() - started
        return result

    return run


def prompt_speed(llm: LLM, length: int) -> float:
    """Tokens per second over a random prompt; the best of three."""
    ids = [random.Random(0).randrange(3, 8000) for _ in range(length)]
    speeds = []
    for _ in range(3):
        started = time.perf_counter()
        llm.generate(ids, SamplingParams(max_tokens=1))
        speeds.append(length / (time.perf_counter() - started))
    return max(speeds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--draft-tokens", default="0,3")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    args = parser.parse_args()
    llm = LLM(prefix_cache=False, dtype=args.dtype, mtp="on")
    speed = prompt_speed(llm, args.prompt_tokens)
    seconds = clock_stages(llm)
    prompt = llm.service.text.encode_chat([{"role": "user", "content": PROMPT}])
    columns: dict[str, dict[str, float]] = {}
    for depth in map(int, args.draft_tokens.split(",")):
        params = SamplingParams(max_tokens=args.max_tokens, draft_tokens=depth, ignore_eos=True)
        llm.generate(prompt, params)
        seconds.clear()
        stats = llm.generate(prompt, params).stats
        steps = stats.steps + 1  # the prompt's step is clocked too
        columns[f"K={depth}"] = {name: round(1000 * spent / steps, 3) for name, spent in seconds.items()}
        columns[f"K={depth}"]["whole step"] = round(1000 * stats.decode_seconds / stats.steps, 3)
    table = Table(
        "stage (ms)", *columns, title=f"{torch.get_num_threads()} threads; prompt: {speed:.0f} tokens/s"
    )
    for name in next(iter(columns.values())):
        table.add_row(name, *(f"{column[name]:.2f}" for column in columns.values()))
    Console().print(table)
    print(json.dumps({"benchmark": "step", "prompt_tokens_per_second": round(speed), "ms": columns}))


if __name__ == "__main__":
    main()
