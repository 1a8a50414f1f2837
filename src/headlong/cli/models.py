"""`headlong list`: the models on this machine, read from their headers. Loads nothing."""

import argparse
from typing import TYPE_CHECKING, Any

from headlong.cli.terminal import console

if TYPE_CHECKING:
    from pathlib import Path

EPILOG = """\
Lists the embedded model, smollm2 once it was fetched, and the Hugging Face cache. The MTP head is `yes`,
`no`, `broken` (its tensors do not fit) or `-` (Headlong does not serve this model); `headlong inspect NAME`
says why.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "list",
        usage="headlong list",
        help="list the models on this machine",
        description="Lists the models that need no download.",
        epilog=EPILOG,
    )
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:  # noqa: ARG001 - every command takes its flags
    from rich.filesize import decimal
    from rich.table import Table

    from headlong.checkpoint import source

    table = Table("name", "architecture", "size", "MTP head", "path")
    table.columns[2].justify = "right"
    for column in table.columns:
        column.overflow = "fold"
    for model in source.list_local():
        table.add_row(
            model.name, model.model_type, decimal(model.nbytes), head_of(model.path), str(model.path)
        )
    console().print(table)
    return 0


def head_of(path: "Path") -> str:
    """Whether a model has an MTP head that can be used, in the words of the list."""
    from headlong.checkpoint.checkpoint import Checkpoint
    from headlong.engine.build import survey
    from headlong.errors import HeadError, HeadlongError

    try:
        return "yes" if survey(Checkpoint.open(path)).head_refusal is None else "no"
    except HeadError:
        return "broken"
    except HeadlongError:
        return "-"
