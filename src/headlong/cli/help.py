"""Prints docs/help.md: every help text, as the parser has it. `python -m headlong.cli.help > docs/help.md`"""

import argparse
from functools import partial

from headlong.cli.main import build_parser

WIDTH = 100
INTRODUCTION = """\
# Command line

Generated from the parser; `python -m headlong.cli.help > docs/help.md` writes it again.
"""


def page() -> str:
    """The whole page, the same in every terminal."""
    parser, commands = build_parser()
    sections = [("headlong", parser), *((f"headlong {name}", own) for name, own in commands.items())]
    texts = []
    for title, own in sections:
        own.formatter_class = partial(argparse.RawDescriptionHelpFormatter, width=WIDTH)  # type: ignore[assignment]
        own.color = False  # type: ignore[attr-defined]  # Python 3.14 colours help; older ones do not look at this
        texts.append(f"## {title}\n\n```text\n{own.format_help().rstrip()}\n```\n")
    return "\n".join([INTRODUCTION, *texts])


if __name__ == "__main__":
    print(page(), end="")
