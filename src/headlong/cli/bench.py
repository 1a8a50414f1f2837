"""`headlong bench`: plain decoding against each depth of drafting, and a table of it.

Flags, table and the closing JSON line; the measuring itself is in measure.py.
"""

import argparse
import json
import subprocess
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import headlong
from headlong.cli import options, summary
from headlong.cli.prompts import encode, read_prompts
from headlong.cli.terminal import console, tell_if_slow
from headlong.config import with_room_for_drafts
from headlong.errors import RequestError
from headlong.params import SamplingParams
from headlong.progress import default_progress

if TYPE_CHECKING:
    from headlong.cli.measure import Result
    from headlong.llm import LLM

MAX_TOKENS = 128
EXIT_DIFFERENT = 1
EPILOG = """\
Every depth must give the tokens of plain decoding, or no speed is reported and the exit code is 1. The last
line of stdout is a JSON object with the same numbers and the conditions they were measured under.
FILE holds one prompt per line; in a .jsonl file each line has "prompt", "turns" or "messages".
A server is measured with `headlong bench serve`; a model folder of that name is ./serve.

examples:
  headlong bench
  headlong bench --draft-tokens 0,2,4 --max-tokens 256 --rounds 5
  headlong bench Qwen/Qwen3.5-0.8B --prompts questions.jsonl --rows 4 | tail -n 1 > result.json
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        usage="headlong bench [options] [MODEL]",
        help="measure drafting against plain decoding",
        description="Measures each depth of drafting against plain decoding on the same prompts, in turns.",
        epilog=EPILOG,
    )
    options.add_model(parser)
    parser.add_argument("--prompts", metavar="FILE", help="prompts to use (default: six of our own)")
    parser.add_argument(
        "--raw", action="store_true", help="pass prompts as they are, without a chat template"
    )
    parser.add_argument(
        "--draft-tokens",
        type=_depths,
        default=[0, 1, 2, 3, 4],
        metavar="LIST",
        help="depths to measure; plain decoding is always among them (default: 0,1,2,3,4)",
    )
    parser.add_argument("--rounds", type=_count, default=3, metavar="N", help="passes of each (default: 3)")
    parser.add_argument(
        "--rows",
        type=_count,
        default=1,
        metavar="N",
        help="prompts that run at once (default: 1); fewer prompts are repeated",
    )
    options.add_engine(parser, mtp=False)
    options.add_sampling(parser, max_tokens=MAX_TOKENS, verify=False)
    parser.set_defaults(execute=execute)


def _depths(text: str) -> list[int]:
    return sorted({0, *(options.whole(part) for part in text.split(","))})


def _count(text: str) -> int:
    if (value := options.whole(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def execute(args: argparse.Namespace) -> int:
    # A seed even where nobody asked: sampled text must be the same in every pass.
    params = SamplingParams(**options.sampling_options(args, max_tokens=MAX_TOKENS, seed=0))
    prompts = read_prompts(args.prompts)
    # Fewer prompts than rows would leave rows empty: they are used again.
    prompts = list(islice(cycle(prompts), max(len(prompts), args.rows)))
    depths: list[int] = args.draft_tokens
    if depths[0] < 0:
        raise RequestError(f"--draft-tokens: {depths[0]} is below 0, which is plain decoding")
    from headlong.cli import measure
    from headlong.llm import LLM

    progress = default_progress()
    wanted = options.engine_options(args) | {
        "mtp": "on" if depths[-1] else "off",
        "draft_tokens": depths[-1],
    }
    wanted = with_room_for_drafts(wanted)
    llm = LLM(args.model, max_rows=args.rows, progress=progress, **wanted)
    tell_if_slow(llm)
    encoded = [encode(llm, prompt, raw=args.raw) for prompt in prompts]
    try:
        results = measure.measure(llm, encoded, params, depths, args.rounds, args.rows, progress)
    except measure.TokensDiffer as difference:
        console().print(f"no speed to report: {difference}")
        print(json.dumps(_conditions(args, llm, len(prompts), params) | {"identical": False, "results": []}))
        return EXIT_DIFFERENT
    _print_table(results, args, len(prompts))
    record = _conditions(args, llm, len(prompts), params)
    print(json.dumps(record | {"identical": True, "results": [result.as_json() for result in results]}))
    return 0


def _print_table(results: "list[Result]", args: argparse.Namespace, num_prompts: int) -> None:
    from rich.table import Table

    title = (
        f"{summary.counted(num_prompts, 'prompt')}, {args.rows} at once, "
        f"medians of {summary.counted(args.rounds, 'round')}, identical tokens"
    )
    table = Table("K", "tokens/step", "accepted", "ms/step", "tokens/s", "speed-up", title=title)
    for column in table.columns:
        column.justify = "right"
    for result in results:
        low, high = min(result.speed_ups), max(result.speed_ups)
        table.add_row(
            str(result.depth),
            f"{result.tokens_per_step:.2f}",
            summary.percentages(result.acceptance) or "-",
            f"{result.ms_per_step:.2f}",
            f"{result.tokens_per_second:.1f}",
            f"{result.speed_up:.2f}x ({low:.2f}-{high:.2f})" if result.depth else "1.00x",
        )
    console().print(table)


def _conditions(
    args: argparse.Namespace, llm: "LLM", num_prompts: int, params: SamplingParams
) -> dict[str, Any]:
    import torch

    device = torch.device(llm.description.device)
    return {
        "headlong": headlong.__version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "model": args.model or Path(llm.description.folder).name,
        "device": llm.description.device,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "dtype": llm.description.dtype,
        "torch_threads": torch.get_num_threads(),
        "prompts_from": args.prompts or "built-in",
        "prompts": num_prompts,
        "rows": args.rows,
        "rounds": args.rounds,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
    }


def _commit() -> str | None:
    """The commit this package was run from, `-dirty` if changed since; None outside its own repository."""
    package = Path(headlong.__file__)

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=package.parent, capture_output=True, text=True, check=True, timeout=10
        )
        return done.stdout.strip()

    try:
        # An installed copy may lie inside somebody else's repository.
        git("ls-files", "--error-unmatch", package.name)
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None
