"""Writes the tables of settings and of vLLM's flags in docs/server.md from the settings and flags themselves.

`python -m headlong.cli.settings_table` writes them; nothing needs it while a server runs.
"""

import sys
from pathlib import Path

from headlong.cli.vllm_flags import FLAGS, SHARED, Flag
from headlong.config import EngineConfig
from headlong.server.settings import DEFAULTS, OPTIONS

BEGIN, END = "<!-- settings -->\n", "<!-- end of settings -->"
FLAGS_BEGIN, FLAGS_END = "<!-- flags of vLLM -->\n", "<!-- end of the flags of vLLM -->"


def table() -> str:
    lines = ["| setting | default | meaning |", "|---|---|---|"]
    group = None
    for name, option in OPTIONS.items():
        if option.group != group:
            group = option.group
            lines.append(f"| **{group}** | | |")
        meaning = option.help
        if option.choices:
            meaning += f"; one of {', '.join(f'`{choice}`' for choice in option.choices)}"
        lines.append(f"| `{name}` | {_default(name)} | {meaning} |")
    return "\n".join(lines) + "\n"


def _default(name: str) -> str:
    value = DEFAULTS[name] if name in DEFAULTS else getattr(EngineConfig, name)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return f"`{value}`" if isinstance(value, str) else str(value) if isinstance(value, int) else ""


def flags_table() -> str:
    """What every flag of vLLM's does here, those that the settings have under the same name among them."""
    lines = ["| vLLM's flag | here | |", "|---|---|---|"]
    own = {
        flag: name
        for name, option in OPTIONS.items()
        for flag in (f"--{name.replace('_', '-')}", *option.flags)
        if flag in SHARED
    }
    lines += [f"| `{flag}` | `{own[flag]}` | |" for flag in SHARED]
    for flag in FLAGS:
        names = ", ".join(f"`{name}`" for name in flag.names)
        lines.append(f"| {names} | {flag.kind} | {_words(flag)}{flag.here} |")
    return "\n".join(lines) + "\n"


def _words(flag: Flag) -> str:
    """The values that a flag takes here, where they are not all."""
    return ", ".join(f"`{word}`" for word in flag.words) + " alone: " if flag.words else ""


def main(path: Path) -> None:
    """Puts each table between its two marks."""
    text = path.read_text(encoding="utf-8")
    for begin, end, content in ((BEGIN, END, table()), (FLAGS_BEGIN, FLAGS_END, flags_table())):
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}{content}{end}{after}"
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/server.md"))
