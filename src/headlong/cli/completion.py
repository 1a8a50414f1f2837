"""`headlong completion`: a script that lets a shell complete commands, flags and their words.

Made from the parser, so it knows what the help knows. Knows three shells and no command by name.
"""

import argparse
from functools import partial
from typing import Any

SHELLS = ("bash", "zsh", "fish")
EPILOG = """\
examples:
  headlong completion bash > ~/.local/share/bash-completion/completions/headlong
  headlong completion zsh >> ~/.zshrc
  headlong completion fish > ~/.config/fish/completions/headlong.fish
"""
BASH = """\
# Completes `headlong`; made by `headlong completion`.
_headlong() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}"
    local command="${{COMP_WORDS[1]}}" words="" second=""
    COMPREPLY=()
    if (( COMP_CWORD == 1 )); then
        COMPREPLY=( $(compgen -W "{commands}" -- "$cur") )
        return
    fi
    case "$command ${{COMP_WORDS[2]}}" in
{pairs}
    esac
    case "$command $prev" in
{values}
    esac
    case "$command" in
{flags}
    esac
    if [[ "$cur" == -* ]]; then
        COMPREPLY=( $(compgen -W "$words" -- "$cur") )
    else
        COMPREPLY=( $(compgen -W "$second {models}" -- "$cur") $(compgen -f -- "$cur") )
    fi
}}
complete -o filenames -F _headlong headlong
"""
ZSH = "#compdef headlong\nautoload -U +X bashcompinit && bashcompinit\n"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "completion",
        usage="headlong completion bash|zsh|fish",
        help="print a script for a shell to complete commands with",
        description="Prints a script with which a shell completes commands, flags and their words.",
        epilog=EPILOG,
    )
    parser.add_argument("shell", choices=SHELLS, metavar="bash|zsh|fish", help="the shell")
    parser.set_defaults(execute=partial(execute, commands.choices))


def execute(commands: dict[str, Any], args: argparse.Namespace) -> int:
    """Prints the script for all `commands`, which are there by the time that one of them runs."""
    script = _fish(commands) if args.shell == "fish" else _bash(commands)
    print((ZSH if args.shell == "zsh" else "") + script, end="")
    return 0


def _bash(commands: dict[str, Any]) -> str:
    pairs, values, flags = [], [], []
    for name, parser in commands.items():
        if " " in name:
            first, second = name.split()
            chosen = f'if (( COMP_CWORD > 2 )); then command="{name}"; else second="{second}"; fi'
            pairs.append(f'        "{name}") {chosen} ;;')
            pairs.append(f'        "{first} "*) (( COMP_CWORD == 2 )) && second="{second}" ;;')
        own = _options(parser)
        flags.append(
            f'        "{name}") words="{" ".join(flag for option in own for flag in option.option_strings)}" ;;'
        )
        for option in own:
            if words := _words(option):
                places = "|".join(f'"{name} {flag}"' for flag in option.option_strings)
                values.append(
                    f'        {places}) COMPREPLY=( $(compgen -W "{" ".join(words)}" -- "$cur") ); return ;;'
                )
    single = [name for name in commands if " " not in name]
    return BASH.format(
        commands=" ".join(single),
        pairs="\n".join(pairs),
        values="\n".join(values),
        flags="\n".join(flags),
        models=" ".join(_models()),
    )


def _fish(commands: dict[str, Any]) -> str:
    lines = ["# Completes `headlong`; made by `headlong completion`."]
    for name, parser in commands.items():
        first, _, second = name.partition(" ")
        if second:
            lines.append(f"complete -c headlong -n '__fish_seen_subcommand_from {first}' -a {second}")
            seen = f"__fish_seen_subcommand_from {first}; and __fish_seen_subcommand_from {second}"
        else:
            lines.append(
                f"complete -c headlong -n __fish_use_subcommand -a {name} -d {_quoted(parser.description)}"
            )
            seen = f"__fish_seen_subcommand_from {first}"
        for option in _options(parser):
            names = " ".join(
                f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
                for flag in option.option_strings
            )
            words = _words(option)
            takes = "" if option.nargs == 0 else f" -x -a {_quoted(' '.join(words))}" if words else " -r"
            lines.append(f"complete -c headlong -n '{seen}' {names}{takes} -d {_quoted(option.help)}")
    models = " ".join(_models())
    lines.append(f"complete -c headlong -n 'not __fish_use_subcommand' -a {_quoted(models)} -d 'a model'")
    return "\n".join(lines) + "\n"


def _models() -> list[str]:
    """The names of models that every installation knows."""
    from headlong.checkpoint.packages import PACKAGES
    from headlong.checkpoint.source import EMBEDDED_NAME

    return [EMBEDDED_NAME, *PACKAGES]


def _options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The flags that the help shows."""
    return [one for one in parser._actions if one.option_strings and one.help != argparse.SUPPRESS]


def _words(option: argparse.Action) -> list[str]:
    """The words that a flag takes, where it takes few."""
    if option.choices:
        return [str(choice) for choice in option.choices]
    shown = option.metavar if isinstance(option.metavar, str) else ""
    return [word for word in shown.split("|") if word.islower()] if "|" in shown else []


def _quoted(text: str | None) -> str:
    return "'" + (text or "").replace("\\", "\\\\").replace("'", "\\'") + "'"
