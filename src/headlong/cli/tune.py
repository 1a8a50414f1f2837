"""`headlong tune`: measures what drafting costs on this machine, and stores it for the engines that start here.

Flags and table; the measuring is in engine/tuning.py, the file in speculate/profile.py.
"""

import argparse
from typing import TYPE_CHECKING, Any

from headlong.cli import options
from headlong.cli.terminal import console, say
from headlong.errors import ConfigError
from headlong.progress import default_progress

if TYPE_CHECKING:
    from headlong.speculate.profile import Cost

ROWS = [1, 2, 4, 8, 16]
STEPS = 12
EPILOG = """\
With draft_tokens "auto" an engine finds out by itself what a draft costs and what it earns. With these costs it knows
the one from its first step on. They are kept in the user's cache folder, for the same model, head, dtype, device and
number of threads; nothing else is changed by them, the tokens least of all.

With --draft-vocab N the head's drafts are to be among N tokens. Which those are is counted first and kept for all
models with the same tokenizer: in text files like what the model will write, or, without --text, in a few answers of
its own.

examples:
  headlong tune
  headlong tune --draft-vocab 4096 --text letters.txt --text stories.txt
  headlong tune Qwen/Qwen3.5-0.8B --rows 1,4,16,32
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "tune",
        usage="headlong tune [options] [MODEL]",
        help="measure this machine, for the choice of draft depth",
        description="Measures the target's pass and the drafting for several row counts and depths.",
        epilog=EPILOG,
    )
    options.add_model(parser)
    parser.add_argument(
        "--rows", type=_rows, default=ROWS, metavar="LIST", help="row counts (default: 1,2,4,8,16)"
    )
    parser.add_argument(
        "--steps",
        type=options.whole,
        default=STEPS,
        metavar="N",
        help=f"steps of each kind (default: {STEPS})",
    )
    parser.add_argument(
        "--text",
        action="append",
        default=[],
        metavar="FILE",
        help="count the tokens of this text, for --draft-vocab N; may be given again",
    )
    options.add_engine(parser)
    parser.set_defaults(execute=execute)


def _rows(text: str) -> list[int]:
    return sorted({options.whole(part) for part in text.split(",")})


def execute(args: argparse.Namespace) -> int:
    if args.rows[0] < 1:
        raise ConfigError(f"--rows: {args.rows[0]} is below 1")
    if args.steps < 1:
        raise ConfigError(f"--steps must be at least 1, not {args.steps}")
    if args.mtp == "off":
        raise ConfigError("--mtp off leaves nothing to tune; leave it out")
    if args.text and not isinstance(args.draft_vocab, int):
        raise ConfigError("--text counts tokens for --draft-vocab N; say how many are to be kept")
    from headlong.cli.counting import count_and_store
    from headlong.config import EngineConfig
    from headlong.engine.tuning import measure
    from headlong.llm import LLM
    from headlong.speculate.profile import Profile, save

    progress = default_progress()
    wanted = options.engine_options(args) | {"mtp": "on", "max_rows": args.rows[-1]}
    EngineConfig(**wanted)
    if isinstance(args.draft_vocab, int):
        whole = {name: value for name, value in wanted.items() if name != "draft_vocab"}
        count_and_store(LLM(args.model, progress=progress, **whole), args.draft_vocab, args.text)
    engine = LLM(args.model, progress=progress, **wanted).engine
    costs = measure(engine, args.rows, range(engine.max_drafts + 1), args.steps, progress)
    file = save(Profile(engine.conditions, tuple(costs)))
    _print_table(costs, engine.max_drafts)
    say(f"stored in {file}")
    return 0


def _print_table(costs: "list[Cost]", max_drafts: int) -> None:
    from rich.table import Table

    title = "milliseconds of a step, by rows and drafts per row: the target's pass + drafting"
    table = Table("rows", *(f"K={depth}" for depth in range(max_drafts + 1)), title=title)
    for column in table.columns:
        column.justify = "right"
    by_rows: dict[int, list[str]] = {}
    for cost in costs:
        text = f"{1000 * cost.verify:.2f}" + (f" + {1000 * cost.draft:.2f}" if cost.depth else "")
        by_rows.setdefault(cost.rows, []).append(text)
    for rows, texts in by_rows.items():
        table.add_row(str(rows), *texts)
    console().print(table)
