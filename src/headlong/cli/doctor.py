"""`headlong doctor`: what this machine can do, what it lacks, and which models fit. Prints facts, finds none."""

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from headlong.cli.terminal import console

if TYPE_CHECKING:
    from headlong.cli.machine import Fit

EPILOG = """\
Sizes of models that are not on this machine are those of their files in bfloat16, about; packed ones take a half to
a quarter. `headlong inspect MODEL` counts exactly.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        usage="headlong doctor [--json]",
        help="say what this machine can do",
        description="Says what this machine computes with, what it lacks, and which models fit into its memory.",
        epilog=EPILOG,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    from headlong.cli import machine

    findings, fits = machine.findings(), machine.fits()
    if args.json:
        print(
            json.dumps(
                {
                    "findings": [asdict(one) for one in findings],
                    "free_bytes": machine.free_memory(),
                    "models": [asdict(one) for one in fits],
                },
                indent=2,
            )
        )
        return 0
    out = console()
    width = max(len(one.name) for one in findings)
    for one in findings:
        out.print(f"{one.name:<{width}}  {one.found}")
    for one in findings:
        if one.advice is not None:
            out.print(f"{'to do':<{width}}  {one.advice}")
    _print_models(fits)
    return 0


def _print_models(fits: "list[Fit]") -> None:
    from rich.filesize import decimal
    from rich.table import Table

    table = Table("model", "weights", "fits", "here")
    table.columns[1].justify = "right"
    words = {True: "yes", False: "no", None: "unknown"}
    for one in fits:
        size = decimal(one.nbytes) if one.local else f"~{decimal(one.nbytes)}"
        table.add_row(one.name, size, words[one.fits], "yes" if one.local else "headlong pull")
    console().print(table)
