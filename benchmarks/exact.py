"""Are the tokens those of plain decoding? Every K against K = 0, in every format, greedy and sampled, batches mixed.

    python benchmarks/exact.py [--formats bf16,float32,f16,int8,int4,q8_0,q4_0,q4_1,fp8] [--depths 1,...,8]
                               [--tokens 50000] [--rows 16] [--smollm2]

The embedded model is packed into a temporary folder. Rows join and leave at different times, half of them greedy, half
sampled by seeds of their own. `--tokens` counts what is compared in each format. `--smollm2` adds that model, fetched
if need be (Q4_1, its head bfloat16). Counts, not times: it needs no quiet machine. Ends in one JSON line; exits with 1
if a token differs.
"""

import argparse
import json
import math
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from headlong import LLM, SamplingParams
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.source import EMBEDDED
from headlong.convert.quantize import quantize
from headlong.convert.to_gguf import to_gguf
from headlong.progress import silent

FORMATS = ("bf16", "float32", "f16", "int8", "int4", "q8_0", "q4_0", "q4_1", "fp8")
STORIES = (
    "Write a short story about a shy dragon who learns to share.",
    "Explain rain to a child.",
    "Give me three tips for sleeping better.",
    "Write a poem about the sea.",
    "red, blue, green, red, blue, green, red, blue,",
    "Write a dialogue between a boy and a robot.",
)
LENGTHS = (24, 57, 96, 160)
"""Of the texts, in turn."""


def model(folder: Path, format: str) -> tuple[Path, str]:
    """Where the embedded model lies in this format, and the dtype it is computed in."""
    if format in ("bf16", "float32"):
        return EMBEDDED, "auto" if format == "bf16" else format
    out = folder / (f"{format}.gguf" if format[0] in "qf" and format != "fp8" else format)
    if format in ("f16", "q4_1"):
        to_gguf(Checkpoint.open(EMBEDDED), out, type=format)
    else:
        quantize(Checkpoint.open(EMBEDDED), out, format=format, head=format)
    return out, "auto"


def texts(llm: LLM, count: int, drafts: int) -> list[tuple[int, ...]]:
    """Tokens of `count` rows that were served together."""
    prompts, params = [], []
    for number in range(count):
        message = {"role": "user", "content": STORIES[number % len(STORIES)]}
        prompts.append(llm.service.text.encode_chat([message]))
        sampled = {"temperature": 0.8, "top_p": 0.95, "seed": number} if number % 2 else {"temperature": 0.0}
        length = LENGTHS[number % len(LENGTHS)]
        params.append(SamplingParams(max_tokens=length, ignore_eos=True, draft_tokens=drafts, **sampled))
    return [completion.token_ids for completion in llm.generate(prompts, params)]


def compare(llm: LLM, depths: list[int], tokens: int, progress: Progress, name: str) -> tuple[int, int, int]:
    """Tokens compared, tokens that differ, and the rows they are of."""
    each = sum(LENGTHS) / len(LENGTHS)
    count = math.ceil(tokens / len(depths) / each) + 2
    task = progress.add_task(name, total=len(depths) + 1)
    truth = texts(llm, count, 0)
    progress.advance(task)
    compared = differing = 0
    for depth in depths:
        found = texts(llm, count, depth)
        for ours, theirs in zip(found, truth, strict=True):
            compared += len(theirs)
            differing += sum(a != b for a, b in zip(ours, theirs, strict=True))
        progress.advance(task)
    return compared, differing, count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--depths", default="1,2,3,4,5,6,7,8")
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--smollm2", action="store_true")
    args = parser.parse_args()
    depths = [int(depth) for depth in args.depths.split(",")]
    table, results = Table("format", "rows", "tokens compared", "differing"), {}
    with tempfile.TemporaryDirectory() as folder, Progress(console=Console(stderr=True)) as progress:
        wanted = {name: model(Path(folder), name) for name in args.formats.split(",") if name}
        if args.smollm2:
            wanted["smollm2 q4_1"] = (Path("smollm2"), "auto")
        for name, (path, dtype) in wanted.items():
            llm = LLM(
                str(path),
                device="cpu",
                dtype=dtype,
                mtp="on",
                max_rows=args.rows,
                max_draft_tokens=max(depths),
                progress=silent,
            )
            compared, differing, count = compare(llm, depths, args.tokens, progress, name)
            table.add_row(name, str(count), f"{compared:,}", str(differing))
            results[name] = {"rows": count, "compared": compared, "differing": differing}
    Console().print(table)
    print(json.dumps({"benchmark": "exact", "depths": depths, "results": results}))
    if any(result["differing"] for result in results.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
