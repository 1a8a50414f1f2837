"""Every environment variable Headlong reads. A value that cannot be parsed is an error, not a default.

HEADLONG_NATIVE and HEADLONG_CONFIG have their functions here; every setting of the server has a variable too, named
after its field, which `server/settings_sources.py` reads through `settings_given`.
"""

import os

from headlong.errors import ConfigError

PREFIX = "HEADLONG_"


def native_ops_wanted() -> bool:
    """HEADLONG_NATIVE: 1 (default) uses the compiled CPU kernels where they were built, 0 never does."""
    return _flag("HEADLONG_NATIVE", default=True)


def config_file() -> str | None:
    """HEADLONG_CONFIG: the server's config.yml; without it none is read."""
    return os.environ.get("HEADLONG_CONFIG")


def settings_given() -> dict[str, str]:
    """Every other HEADLONG_ variable, by its whole name."""
    own = ("HEADLONG_NATIVE", "HEADLONG_CONFIG")
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIX) and name not in own}


def _flag(name: str, *, default: bool) -> bool:
    value = os.environ.get(name, "1" if default else "0")
    if value not in ("0", "1"):
        raise ConfigError(f"environment variable {name} must be 0 or 1, not {value!r}")
    return value == "1"
