"""The embedded model in every format Headlong writes: size, memory, acceptance, speed beside the original.

    python benchmarks/formats.py [--max-tokens 96] [--rounds 3] [--draft-tokens 3]

The model is packed into a temporary folder, its head left in BF16 or packed alike. In each format drafting must give
the tokens of plain decoding, or nothing is reported. Formats take turns within a round; speeds are ratios to the
original's plain decoding in the same round. Ends in one JSON line.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from headlong import LLM, Completion, SamplingParams
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.source import EMBEDDED
from headlong.convert.quantize import quantize

PROMPTS = (
    "Write a short story about a mouse who wants to see the sea.",
    "Explain why the sky is blue to a child.",
    "Give me three tips for learning a language.",
    "Write a short poem about a quiet river.",
    "Write a letter to my future self.",
    "Write a dialogue between a boy and a robot.",
)
FORMATS = {
    # format -> the heads that go with it
    "fp8": ("keep", "fp8"),
    "fp8_block": ("keep", "fp8_block"),
    "int8": ("keep", "int8"),
    "int4": ("keep", "int4"),
    "q8_0": ("keep", "q8_0"),
    "q4_0": ("keep", "q4_0"),
}


def packed(folder: Path, format: str, head: str) -> Path:
    out = folder / (f"{format}-{head}.gguf" if format.startswith("q") else f"{format}-{head}")
    quantize(Checkpoint.open(EMBEDDED), out, format=format, head=head)
    return out


def size(path: Path) -> int:
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)


def timed(llm: LLM, max_tokens: int, drafts: int) -> tuple[float, list[Completion]]:
    """Tokens per second, one prompt after the other, and the completions."""
    params = SamplingParams(max_tokens=max_tokens, draft_tokens=drafts)
    start = time.perf_counter()
    done = [llm.chat([{"role": "user", "content": prompt}], params) for prompt in PROMPTS]
    seconds = time.perf_counter() - start
    return sum(len(completion.token_ids) for completion in done) / seconds, done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draft-tokens", type=int, default=3)
    args = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        paths = {("bf16", "keep"): EMBEDDED}
        for format, heads in FORMATS.items():
            for head in heads:
                paths[format, head] = packed(Path(folder), format, head)
        engines = {key: LLM(path, device="cpu", mtp="on") for key, path in paths.items()}
        sizes = {key: size(path) for key, path in paths.items()}
        rows = measure(engines, args, console)
    table = Table(
        "format", "head", "MB", "tokens/step", "accepted", "plain", f"K = {args.draft_tokens}", "K/plain"
    )
    for (format, head), row in rows.items():
        table.add_row(
            format,
            head,
            f"{sizes[format, head] / 1e6:.1f}",
            f"{row['tokens_per_step']:.2f}",
            f"{row['accepted']:.3f}",
            f"{row['plain']:.2f}x",
            f"{row['drafting']:.2f}x",
            f"{row['drafting'] / row['plain']:.2f}",
        )
    console.print(table)
    print(json.dumps([{"format": f, "head": h, "bytes": sizes[f, h], **row} for (f, h), row in rows.items()]))


def measure(engines: dict, args: argparse.Namespace, console: Console) -> dict:
    plain, drafting, last = {key: [] for key in engines}, {key: [] for key in engines}, {}
    for round_number in range(args.rounds + 1):
        console.print(f"round {round_number} of {args.rounds}" + (" (warm-up)" if not round_number else ""))
        base = None
        for key, llm in engines.items():
            slow, expected = timed(llm, args.max_tokens, 0)
            fast, drafted = timed(llm, args.max_tokens, args.draft_tokens)
            if [c.token_ids for c in drafted] != [c.token_ids for c in expected]:
                raise SystemExit(f"{key}: drafting changed tokens; nothing is reported")
            base = base or slow
            last[key] = drafted
            if round_number:
                plain[key].append(slow / base)
                drafting[key].append(fast / base)
    return {
        key: {
            "plain": statistics.median(plain[key]),
            "drafting": statistics.median(drafting[key]),
            "accepted": sum(c.stats.accepted for c in done) / sum(c.stats.drafted for c in done),
            "tokens_per_step": sum(len(c.token_ids) - 1 for c in done) / sum(c.stats.steps for c in done),
        }
        for key, done in last.items()
    }


if __name__ == "__main__":
    main()
