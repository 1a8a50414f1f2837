"""Where commands that write checkpoints write, and what they say of it. Knows no command."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headlong.cli.terminal import note, say
from headlong.errors import ConfigError

if TYPE_CHECKING:
    from headlong.convert.to_gguf import Written


def out_path(args: argparse.Namespace) -> Path:
    """Where to write, once what runs that were killed left there is gone, which is told."""
    from headlong.checkpoint.leftovers import clear_leftovers

    if not args.out.strip():
        raise ConfigError("--out: the name is empty; name a folder or a file to write")
    out = Path(args.out).expanduser()
    for sentence in clear_leftovers(out):
        note(f"note: {sentence}")
    return out


def report(done: "Written") -> int:
    """Says what was written; returns the exit code."""
    from rich.filesize import decimal

    for sentence in done.notes:
        note(f"note: {sentence}")
    head = "with an MTP head" if done.has_head else "no MTP head"
    say(f"{done.path}: {done.num_tensors} tensors, {decimal(done.nbytes)}, {head}")
    return 0
