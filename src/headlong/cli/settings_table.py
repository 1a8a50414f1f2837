"""Writes the table of settings in docs/server.md from the settings themselves.

`python -m headlong.cli.settings_table` writes it; nothing needs it while a server runs.
"""

import sys
from pathlib import Path

from headlong.config import EngineConfig
from headlong.server.settings import DEFAULTS, OPTIONS

BEGIN, END = "<!-- settings -->\n", "<!-- end of settings -->"


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


def main(path: Path) -> None:
    """Puts the table between its two marks."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}{table()}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/server.md"))
