"""Typed reads of a config.json, which may be hostile: every complaint names the field."""

import math
from collections.abc import Mapping
from typing import Any

from headlong.errors import ConfigError


class Fields:
    """Typed reads from a config that may be hostile; every complaint names the field."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def int(self, name: str, default: int | None = None, *, low: int = 1, high: int = 1 << 24) -> int:
        value = self.data.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(
                f"{self.where}: {name} must be a whole number from {low} to {high}, not {value!r}"
            )
        return value

    def float(self, name: str, default: float | None = None, *, low: float, high: float) -> float:
        value = self.data.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ConfigError(f"{self.where}: {name} must be a finite number, not {value!r}")
        if not low < value <= high:
            raise ConfigError(
                f"{self.where}: {name} must be above {low:g} and at most {high:g}, not {value!r}"
            )
        return float(value)

    def bool(self, name: str, default: bool) -> bool:
        value = self.data.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {name} must be true or false, not {value!r}")
        return value
