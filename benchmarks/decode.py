"""Decode speed on the embedded model: `transformers.generate`, Headlong plain, Headlong with K drafts.

    python benchmarks/decode.py [--dtype float32,bfloat16] [--draft-tokens 3] [--max-tokens 128] [--rounds 5]

Checks first that Headlong's tokens are the same with and without drafting. Then every round runs all
contestants in turn, so that a noisy machine disturbs them alike. Decode time is the time of a whole generation
less that of its prompt (one token); medians over rounds, ratios within a round. Ends in one JSON line.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from headlong import LLM, SamplingParams
from headlong.checkpoint.source import EMBEDDED

PROMPTS = (
    "Write a short story about a shy dragon who learns to share.",
    "Explain rain to a child.",
    "Write a letter to a friend about a new puppy.",
)
Contestant = Callable[[int], list[tuple[int, ...]]]


def transformers_contestant(dtype: str, prompts: list[tuple[int, ...]]) -> Contestant:
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=getattr(torch, dtype)).eval()
    quiet = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None, "repetition_penalty": 1.0}
    quiet |= {"eos_token_id": None, "pad_token_id": 0}

    def run(max_tokens: int) -> list[tuple[int, ...]]:
        texts = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                out = model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, **quiet
                )
            texts.append(tuple(out[0, len(prompt) :].tolist()))
        return texts

    return run


def headlong_contestant(llm: LLM, prompts: list[tuple[int, ...]], draft_tokens: int) -> Contestant:
    def run(max_tokens: int) -> list[tuple[int, ...]]:
        params = SamplingParams(max_tokens=max_tokens, draft_tokens=draft_tokens, ignore_eos=True)
        return [llm.generate(prompt, params).token_ids for prompt in prompts]

    return run


def decode_seconds(contestant: Contestant, max_tokens: int) -> float:
    started = time.perf_counter()
    contestant(1)
    prompt_only = time.perf_counter() - started
    started = time.perf_counter()
    contestant(max_tokens)
    return time.perf_counter() - started - prompt_only


def measure(dtype: str, draft_tokens: int, max_tokens: int, rounds: int) -> dict[str, object]:
    llm = LLM(dtype=dtype)
    prompts = [llm.service.text.encode_chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    contestants = {
        "transformers": transformers_contestant(dtype, prompts),
        "headlong plain": headlong_contestant(llm, prompts, 0),
        f"headlong K={draft_tokens}": headlong_contestant(llm, prompts, draft_tokens),
    }
    names = list(contestants)
    texts = {name: run(max_tokens) for name, run in contestants.items()}
    if texts[names[1]] != texts[names[2]]:
        raise SystemExit("tokens differ with drafting on: no speed is reported")
    agreement = sum(
        a == b
        for x, y in zip(texts[names[0]], texts[names[1]], strict=True)
        for a, b in zip(x, y, strict=True)
    )
    seconds = {name: [] for name in names}
    for _ in range(rounds):
        for name, run in contestants.items():
            seconds[name].append(decode_seconds(run, max_tokens))
    num_tokens = len(prompts) * (max_tokens - 1)

    def ratio(slow: str, fast: str) -> list[float]:
        ratios = sorted(a / b for a, b in zip(seconds[slow], seconds[fast], strict=True))
        return [round(value, 2) for value in (statistics.median(ratios), ratios[0], ratios[-1])]

    return {
        "dtype": dtype,
        "tokens_per_second": {n: round(num_tokens / statistics.median(s), 1) for n, s in seconds.items()},
        "plain_over_transformers": ratio(names[0], names[1]),
        "mtp_over_plain": ratio(names[1], names[2]),
        "same_tokens_as_transformers": f"{agreement}/{len(prompts) * max_tokens}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="float32,bfloat16")
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    results = [measure(d, args.draft_tokens, args.max_tokens, args.rounds) for d in args.dtype.split(",")]
    table = Table(
        title=f"decode, {torch.get_num_threads()} threads, {len(PROMPTS)} prompts × {args.max_tokens}"
    )
    for column in ("dtype", "contestant", "tokens/s", "ratio (min–max)"):
        table.add_column(column)
    for result in results:
        speeds = result["tokens_per_second"]
        notes = ("", result["plain_over_transformers"], result["mtp_over_plain"])
        bases = ("", "× transformers", "× plain")
        for (name, speed), note, base in zip(speeds.items(), notes, bases, strict=True):
            text = f"{note[0]} {base} ({note[1]}–{note[2]})" if note else ""
            table.add_row(result["dtype"], name, str(speed), text)
    Console().print(table)
    print(
        json.dumps(
            {
                "benchmark": "decode",
                "cpu": platform.processor(),
                "torch": torch.__version__,
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    main()
