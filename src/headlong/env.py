"""Every environment variable Headlong reads. A value that cannot be parsed is an error, not a default."""

import os

from headlong.errors import ConfigError


def native_ops_wanted() -> bool:
    """HEADLONG_NATIVE: 1 (default) uses the compiled CPU kernels where they were built, 0 never does."""
    return _flag("HEADLONG_NATIVE", default=True)


def _flag(name: str, *, default: bool) -> bool:
    value = os.environ.get(name, "1" if default else "0")
    if value not in ("0", "1"):
        raise ConfigError(f"environment variable {name} must be 0 or 1, not {value!r}")
    return value == "1"
