"""`headlong serve`: flags for every setting of the server, made from the settings themselves. Serves nothing itself."""

import argparse
from typing import Any

from headlong.cli import options, vllm_flags
from headlong.cli.terminal import note
from headlong.env import wait_passively
from headlong.errors import ConfigError
from headlong.option import METAVARS, Option, metavar
from headlong.server.settings import DEFAULTS, OPTIONS, Settings

EPILOG = """\
A flag wins over an environment variable (HEADLONG_PORT for --port), that over config.yml, that over the
default. Other users of the machine can see keys on a command line: prefer HEADLONG_API_KEY, or hashes in
config.yml. Sizes may be written as 32k (thousands) or 32K (1024s). vLLM's flags work under their names, or say
what to use instead: docs/server.md has the table.

examples:
  headlong serve
  headlong serve Qwen/Qwen3.5-0.8B --port 8080 --draft-tokens 4
  headlong serve --config config.yml
  HEADLONG_API_KEY=$KEY headlong serve --host 0.0.0.0
"""
TITLES = {"output": "requests' defaults and limits"}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        usage="headlong serve [options] [MODEL]",
        help="serve a model over HTTP, OpenAI-compatible",
        description="Serves a model over HTTP: OpenAI's and Anthropic's endpoints, and a page at /.",
        epilog=EPILOG,
    )
    add_settings(parser)
    parser.set_defaults(execute=execute)


def add_settings(parser: Any) -> None:
    """Every setting of a server as a flag, and MODEL."""
    options.add_model(parser)
    parser.add_argument(
        "--config", metavar="FILE", help="settings in YAML; without it HEADLONG_CONFIG, or none"
    )
    groups = {}
    for name, option in OPTIONS.items():
        if name == "model":
            continue
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(TITLES.get(option.group, option.group))
        _add_flag(groups[option.group], name, option)
    groups["engine"].add_argument(
        "--speculative-config",
        metavar="JSON",
        help='the same as vLLM writes it: {"method": "mtp", "num_speculative_tokens": 3}',
    )
    vllm_flags.add(parser)


def _add_flag(group: Any, name: str, option: Option) -> None:
    flags = (f"--{name.replace('_', '-')}", *option.flags)
    text = option.help + _default(name)
    if option.type == "switch":
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, help=text, default=None)
    elif name == "served_names":  # vLLM takes several after one flag
        text = f"{text}; several in a row, separated by commas, or given again"
        group.add_argument(*flags, dest=name, action="append", nargs="+", metavar="NAME", help=text)
    elif option.type in ("list", "keys"):
        text = f"{text}; separated by commas, or given again"
        group.add_argument(*flags, dest=name, action="append", metavar=METAVARS[option.type], help=text)
    else:
        group.add_argument(*flags, dest=name, metavar=metavar(option), help=text)


def _default(name: str) -> str:
    """The end of an option's help text that tells its default: for the server's own settings alone, since what is not
    set of the engine's is left to the engine."""
    value = DEFAULTS.get(name)
    if value is True or value is False:
        return f" (default: {'yes' if value else 'no'})"
    if isinstance(value, float):
        return f" (default: {value:g})"
    return f" (default: {value})" if isinstance(value, (str, int)) else ""


def settings_of(args: argparse.Namespace) -> Settings:
    """What the flags say, over the environment and config.yml."""
    from headlong.server.settings_sources import load

    return load(_given(args), args.config)


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """The flags by the settings that they set, vLLM's among them. Those that change nothing are told of."""
    flags = {name: getattr(args, name) for name in (*OPTIONS, "speculative_config")}
    translated, notes = vllm_flags.translate(args.vllm)
    for sentence in notes:
        note(f"headlong {args.command}: {sentence}")
    flags = vllm_flags.merge(flags, translated)
    if flags["max_context"] in ("auto", "-1"):  # vLLM's words for as many as fit
        flags["max_context"] = None
    names = flags["served_names"]
    if names is not None:
        if flags["model"] is None and any(len(group) > 1 for group in names):
            raise ConfigError(
                f"--served-model-name takes every word after it, {names[-1][-1]!r} too; put MODEL before it, or commas "
                "between names"
            )
        flags["served_names"] = [name for group in names for name in group]
    return flags


def execute(args: argparse.Namespace) -> int:
    wait_passively()
    settings = settings_of(args)
    from headlong.engine.local import LocalEngines
    from headlong.server.run import serve

    return serve(settings, LocalEngines())
