"""Where settings come from: flags, environment, config.yml, and which of them wins.

A flag wins over an environment variable, that over config.yml, that over the default; each setting on its own. Every
error names the place the value came from. Knows no setting by name but for the aliases.
"""

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from headlong import env
from headlong.config import ENGINE_OPTIONS, EngineConfig, with_room_for_drafts
from headlong.errors import ConfigError
from headlong.server import keys
from headlong.server.aliases import DRAFTING, TABBY_SECTIONS, drafting, unknown
from headlong.server.settings import OPTIONS, Settings, check

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_PLAIN_KEYS = {"HEADLONG_API_KEY": "api_keys", "HEADLONG_ADMIN_KEY": "admin_keys"}
_SPECULATIVE = "speculative_config"
_UNITS = {"k": 1, "m": 2, "g": 3}
_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([kKmMgG])")


@dataclass(frozen=True)
class Given:
    """A checked value and the place it came from."""

    value: Any
    origin: str


def load(flags: Mapping[str, Any], config: str | None = None) -> Settings:
    """The settings of a server. `flags` maps fields (and `speculative_config`) to texts, lists of texts, booleans
    or None for those not given; `config` is the path of config.yml."""
    path = config or env.config_file()
    layers = [from_file(Path(path).expanduser())] if path else []
    layers += [from_environment(env.settings_given()), from_flags(flags)]
    given: dict[str, Given] = {}
    for layer in layers:
        given |= layer
    _check_engine(given)
    return Settings.of(**{name: one.value for name, one in given.items()})


def from_flags(flags: Mapping[str, Any]) -> dict[str, Given]:
    layer = _Layer()
    for name, value in flags.items():
        if value is None:
            continue
        origin = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
        if name == _SPECULATIVE:
            layer.add_drafting(name, _json(value, origin), origin)
        else:
            layer.add(name, _parse(name, value, origin), origin)
    return layer.given


def from_environment(variables: Mapping[str, str]) -> dict[str, Given]:
    """Unknown variables are left alone: `suspicious_variables` tells of them."""
    layer = _Layer()
    for variable, text in variables.items():
        origin = f"environment variable {variable}"
        name = _PLAIN_KEYS.get(variable, variable.removeprefix(env.PREFIX).lower())
        if name not in OPTIONS and name != _SPECULATIVE:
            continue
        if not text.strip():
            raise ConfigError(f"{origin} is empty; give it a value or unset it")
        if name == _SPECULATIVE:
            layer.add_drafting(name, _json(text, origin), origin)
        else:
            layer.add(name, _parse(name, text, origin), origin)
    return layer.given


def suspicious_variables() -> list[str]:
    """One sentence for each HEADLONG_ variable that means nothing."""
    known = [f"{env.PREFIX}{name.upper()}" for name in (*OPTIONS, _SPECULATIVE)]
    known += [*_PLAIN_KEYS, "HEADLONG_NATIVE", "HEADLONG_CONFIG"]
    return [
        f"environment variable {name} has no meaning: {unknown(name, known)}"
        for name in env.settings_given()
        if name not in known
    ]


def from_file(path: Path) -> dict[str, Given]:
    from headlong.server import config_file

    layer = _Layer()
    for key, value in config_file.read(path).items():
        origin = f"{path}: {key}"
        if key in DRAFTING:
            layer.add_drafting(key, value, origin)
        elif key in TABBY_SECTIONS and isinstance(value, dict):
            names = TABBY_SECTIONS[key]
            for inner, part in value.items():
                if inner not in names:
                    raise ConfigError(f"{origin}: {unknown(inner, names)}")
                layer.add_from_file(names[inner], part, f"{origin}.{inner}")
        elif key in OPTIONS:
            layer.add_from_file(key, value, origin)
        else:
            raise ConfigError(f"{path}: {unknown(key, (*OPTIONS, *DRAFTING, *TABBY_SECTIONS))}")
    return layer.given


class _Layer:
    """The settings that one source gives. It may give one twice, but not two different values."""

    def __init__(self) -> None:
        self.given: dict[str, Given] = {}

    def add(self, name: str, value: Any, origin: str) -> None:
        value = check(name, value, origin)
        before = self.given.get(name)
        if before is not None and before.value != value:
            raise ConfigError(f"{origin} contradicts {before.origin}: both set {name}; keep one of them")
        self.given[name] = Given(value, origin)

    def add_from_file(self, name: str, value: Any, origin: str) -> None:
        """A key without a value is as good as no key, unless somebody might rely on its protection."""
        if value is None and OPTIONS[name].type == "keys":
            raise ConfigError(f"{origin} is empty; list hashes made by `headlong keys`, or remove the line")
        if value is not None:
            self.add(name, value, origin)

    def add_drafting(self, section: str, content: Any, origin: str) -> None:
        for name, value in drafting(section, content, origin).items():
            self.add(name, value, origin)


def _parse(name: str, value: Any, origin: str) -> Any:
    """A text of a flag or a variable as a value of its setting's type; `check` looks at ranges afterwards."""
    if isinstance(value, bool):
        return value
    match OPTIONS[name].type:
        case "whole":
            return _convert(_size, value, origin, "a whole number")
        case "number":
            return _convert(float, value, origin, "a number")
        case "depth":
            return value if value == "auto" else _convert(int, value, origin, "a whole number or auto")
        case "tokens":
            return int(value) if value.lstrip("+-").isdecimal() else value
        case "switch":
            if value.lower() not in _TRUE + _FALSE:
                raise ConfigError(f"{origin} must be true or false, not {value!r}")
            return value.lower() in _TRUE
        case "list":
            return _items(value)
        case "keys":
            return [_hashed(item, origin) for item in _items(value)]
        case "sampling" | "key limits":
            return _json(value, origin)
        case _:
            return value


def _convert(kind: Callable[[str], Any], text: str, origin: str, wanted: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{origin} must be {wanted}, not {text[:80]!r}") from None


def _size(text: str) -> int:
    """A whole number, or one like 32k: as vLLM reads them, small letters count in thousands and capitals in 1024s."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        return int(text)
    size = Decimal(found[1]) * (1000 if found[2].islower() else 1024) ** _UNITS[found[2].lower()]
    if size != int(size):
        raise ValueError(text)
    return int(size)


def _items(value: str | list[str]) -> list[str]:
    """Splits a list that is written with commas, or as JSON, in one text or several."""
    texts = [value] if isinstance(value, str) else value
    if len(texts) == 1 and texts[0].startswith("["):
        with contextlib.suppress(ValueError):
            listed = json.loads(texts[0])
            if all(isinstance(item, str) for item in listed):
                return listed
    return [item.strip() for text in texts for item in text.split(",")]


def _hashed(key: str, origin: str) -> str:
    if keys.is_hash(key):
        return key
    if not keys.is_usable(key):
        raise ConfigError(
            f"{origin} must hold keys of {keys.MIN_LENGTH} to {keys.MAX_LENGTH} visible ASCII characters; "
            "`headlong keys` makes one"
        )
    return keys.hash_key(key)


def _json(text: str, origin: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(f"{origin} must be a JSON object, not {text[:80]!r}") from None


def _check_engine(given: Mapping[str, Given]) -> None:
    """Ranges are the engine's own; its errors begin with the field, which tells where it was set."""
    engine = {name: given[name].value for name in ENGINE_OPTIONS if name in given}
    if not engine:
        return
    try:
        EngineConfig(**with_room_for_drafts(engine))
    except ConfigError as error:
        culprit = str(error).split()[0]
        origin = f"{given[culprit].origin}: " if culprit in given else ""
        raise ConfigError(f"{origin}{error}") from None
