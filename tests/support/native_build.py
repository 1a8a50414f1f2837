"""How pyproject.toml says the native library is built, for those who build it in another way."""

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def native_extension() -> dict[str, Any]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (native,) = project["tool"]["setuptools"]["ext-modules"]
    return native
