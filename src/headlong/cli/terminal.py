"""Where text goes and whether it is coloured. Knows streams and the environment, no command."""

import os
import sys
from typing import IO, TYPE_CHECKING, Any

from headlong.printable import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from headlong.llm import LLM

WIDE = 200
"""Columns where nobody is watching, so that a pipe gets whole paths."""


def wants_colour(choice: str, stream: IO[str]) -> bool:
    """`choice` is that of --color; a NO_COLOR that is set and not empty says no to `auto`."""
    if choice != "auto":
        return choice == "always"
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def note(text: str) -> None:
    """One line for the person, on stderr, dim on a terminal."""
    text, dim = printable(text, keep="\n"), wants_colour("auto", sys.stderr)
    print(f"\x1b[2m{text}\x1b[22m" if dim else text, file=sys.stderr, flush=True)


def tell_if_slow(llm: "LLM") -> None:
    """Says on stderr what it costs that this machine lacks something, and how to get it."""
    if llm.description.slow is not None:
        note(llm.description.slow)


def say(text: str) -> None:
    """A line of the command's output."""
    print(printable(text, keep="\n"))


def console() -> "Console":
    """For tables on stdout."""
    from rich.console import Console

    class Plain(Console):
        def render_str(self, text: str, **how: Any) -> "Text":
            """Every string comes by here before it is measured: names are a checkpoint's, so they are neither markup
            nor commands to the terminal."""
            return super().render_str(printable(text, keep="\n"), **how)

        def on_broken_pipe(self) -> None:
            """Rich would leave with 1, which means something here; `main` knows better."""
            raise BrokenPipeError

    return Plain(
        file=sys.stdout,
        color_system="auto" if wants_colour("auto", sys.stdout) else None,
        width=None if sys.stdout.isatty() else WIDE,
        highlight=False,
        markup=False,
        emoji=False,
    )
