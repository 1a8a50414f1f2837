"""Flags that several commands share, and what they mean in the library's terms.

A flag that was not given is None and passed to nobody, so every default stays where it belongs: in
`EngineConfig`, `SamplingParams` or the checkpoint. Ranges are checked there too. Knows no command.
"""

import argparse
import difflib
import re
from collections.abc import Callable
from typing import Any, NoReturn

from headlong.config import ENGINE_OPTIONS, EngineConfig, with_room_for_drafts
from headlong.option import ValueType, metavar
from headlong.params import SamplingParams

MODEL_HELP = "a folder, a .gguf file, a Hugging Face repository id or smollm2; without it, the embedded model"
SAMPLING = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "min_tokens",
    "ignore_eos",
    "verify",
)
HEAD_OPTIONS = ("mtp", "draft_quantization", "draft_dtype", "draft_vocab", "draft_device")
DEVICE_OPTIONS = ("device", "dtype", "gpu_memory_fraction")
"""The engine options that every command has which loads a model to generate."""


LIKENESS = 0.75
_WRONG_COMMAND = re.compile(r"argument COMMAND: invalid choice: '([^']*)'")


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one sentence instead of a page of usage."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}{self._meant(message)}; see `{self.prog} --help`\n")

    def _meant(self, message: str) -> str:
        """The likeliest spelling of a flag or a command that there is not, as the end of a sentence."""
        if message.startswith("unrecognized arguments: --"):
            wrong = message.split()[2].partition("=")[0]
            known = [name for name in self._option_string_actions if name.startswith("--")]
        elif (found := _WRONG_COMMAND.match(message)) and self._subparsers is not None:
            wrong = found[1]
            known = [name for action in self._subparsers._group_actions for name in action.choices or ()]
        else:
            return ""
        near = difflib.get_close_matches(wrong, known, n=1, cutoff=LIKENESS)
        return f" (did you mean {near[0]}?)" if near else ""


def whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None


def depth(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number or 'auto', not {text!r}") from None


def tokens(text: str) -> int | str:
    """A number of tokens, or a file that lists them."""
    return int(text) if text.lstrip("+-").isdecimal() else text


_READERS: dict[ValueType, Callable[[str], Any]] = {
    "whole": whole,
    "number": number,
    "depth": depth,
    "tokens": tokens,
}


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)


def add_engine(parser: argparse.ArgumentParser, *, mtp: bool = True) -> None:
    group = parser.add_argument_group("engine")
    for name in (*HEAD_OPTIONS, *DEVICE_OPTIONS) if mtp else DEVICE_OPTIONS:
        _add_engine_option(group, name)
    group.add_argument("-v", "--verbose", action="store_true", help="say on stderr what was chosen and why")


def _add_engine_option(group: Any, name: str) -> None:
    option, default = ENGINE_OPTIONS[name], getattr(EngineConfig, name)
    group.add_argument(
        f"--{name.replace('_', '-')}",
        type=_READERS.get(option.type),
        choices=option.choices or None,
        metavar=metavar(option),
        help=option.help if default is None else f"{option.help} (default: {default})",
    )


def add_generation_config(parser: argparse.ArgumentParser) -> None:
    _add_engine_option(parser, "generation_config")


def add_chat_template(parser: argparse.ArgumentParser) -> None:
    _add_engine_option(parser, "chat_template")


def add_draft_tokens(parser: argparse.ArgumentParser) -> None:
    _add_engine_option(parser, "draft_tokens")


def add_sampling(parser: argparse.ArgumentParser, *, max_tokens: int, verify: bool = True) -> None:
    group = parser.add_argument_group("sampling")

    def add(flag: str, kind: Any, metavar: str, text: str) -> None:
        group.add_argument(flag, type=kind, metavar=metavar, help=text)

    add("--max-tokens", whole, "N", f"stop after this many tokens (default: {max_tokens})")
    add("--temperature", number, "X", "0 always takes the likeliest token")
    add("--top-k", whole, "N", "keep the N likeliest tokens; 0 keeps all")
    add("--top-p", number, "X", "keep the likeliest tokens that add up to X")
    add("--min-p", number, "X", "drop tokens below X times the likeliest")
    add("--seed", whole, "N", "repeat the same text, with drafting on or off")
    add("--repetition-penalty", number, "X", "above 1 discourages tokens of prompt and output")
    add("--presence-penalty", number, "X", "subtracted once from tokens of the output")
    add("--frequency-penalty", number, "X", "subtracted for every time a token is in the output")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be given again"
    )
    add("--min-tokens", whole, "N", "no stop before this many tokens")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on past the end token")
    if verify:
        group.add_argument(
            "--verify",
            choices=("coupled", "ratio", "block"),
            metavar="coupled|ratio|block",
            help="coupled: the very tokens of plain decoding (default); ratio and block: the same "
            "distribution, more drafts accepted",
        )


def add_colour(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--show-drafts", action="store_true", help="tint the tokens that were drafted and accepted"
    )
    parser.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        metavar="auto|always|never",
        help="auto colours on a terminal unless NO_COLOR is set (default: auto)",
    )


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords for `LLM`, of the flags that were given."""
    given = {name: value for name in ENGINE_OPTIONS if (value := getattr(args, name, None)) is not None}
    return with_room_for_drafts(given)


def sampling_options(args: argparse.Namespace, **defaults: Any) -> dict[str, Any]:
    """Keywords for `SamplingParams`: the flags that were given, over the command's own `defaults`. Wrong
    ones are refused here, before a model is loaded for nothing."""
    given = {name: value for name in SAMPLING if (value := getattr(args, name, None)) is not None}
    SamplingParams(**(defaults | given))
    return defaults | given
