"""Every setting of the server, in one table: name, default, range, group, and what it means.

`Settings` checks itself; flags, environment, config.yml, the command's help and the docs' table are all derived
from the fields below and from those of `EngineConfig`. Engine options and sampling have no defaults here: what is not
set stays unset, so theirs apply. Imports no torch: help must answer at once.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from headlong.config import ENGINE_OPTIONS, with_room_for_drafts
from headlong.errors import ConfigError, RequestError
from headlong.option import Option, ValueType, field_for, options_of
from headlong.params import SamplingParams
from headlong.server import keys
from headlong.text.format_names import REASONING_FORMATS, TOOL_FORMATS

GROUPS = ("network", "access", "models", "engine", "output", "limits", "logs")
"""The groups of settings, in the order of the table in the docs."""
SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
KEY_PREFIX = "key_"
"""What the names of limits for each key begin with."""
_ORIGIN = re.compile(r"\*|https?://[A-Za-z0-9.\-\[\]:]+")


def _setting(group: str, default: Any, type: ValueType, help: str, **more: Any) -> Any:
    return field_for(Option(group, type, help, **more), default)


_network = partial(_setting, "network")
_access = partial(_setting, "access")
_models = partial(_setting, "models")
_output = partial(_setting, "output")
_limits = partial(_setting, "limits")
_logs = partial(_setting, "logs")


def _seconds(default: float, text: str) -> Any:
    return _limits(default, "number", text, low=0.05, high=86400)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of the whole server. An attribute that is None was left to the part of the server that it
    concerns."""

    host: str = _network("127.0.0.1", "text", "address to listen on; others than loopback expose the server")
    port: int = _network(8000, "whole", "port to listen on; 0 takes a free one and prints it", high=65535)
    cors_origins: tuple[str, ...] = _network(
        (), "list", "web origins whose pages may call the server, or *", flags=("--allowed-origins",)
    )
    page: bool = _network(True, "switch", "serve the page at /")

    api_keys: tuple[str, ...] = _access(
        (), "keys", "keys that may use the models; without one everybody may", flags=("--api-key",)
    )
    admin_keys: tuple[str, ...] = _access(
        (), "keys", "keys that may also load, unload and list models", flags=("--admin-key",)
    )

    model: str | None = _models(None, "text", "a folder, a name under model_dir, or a repository id")
    served_names: tuple[str, ...] = _models(
        (),
        "list",
        "names clients call the first model by, instead of its own",
        flags=("--served-model-name",),
    )
    aliases: tuple[str, ...] = _models(
        (), "list", "further names of models, each as NAME=MODEL", flags=("--alias",)
    )
    any_model: bool = _models(
        False, "switch", "answer requests for any other name with the model that serves by default"
    )
    model_dir: str | None = _models(None, "text", "folder whose models admins may list and load by name")
    inline_loading: bool = _models(
        False, "switch", "load the model an admin's request names, if it lies under model_dir"
    )
    max_models: int = _models(
        1, "whole", "models served at once; one more retires the longest unused", low=1, high=64
    )

    engine_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What was set of `EngineConfig`, by name; its own defaults hold for the rest."""

    sampling: Mapping[str, float] = _output(
        {},
        "sampling",
        'what requests leave open, as JSON: {"temperature": 0.7}',
        flags=("--override-generation-config",),
    )
    reasoning_format: str = _output(
        "auto",
        "choice",
        "how reasoning is told from the answer",
        choices=("auto", "none", *REASONING_FORMATS),
    )
    tool_format: str = _output(
        "auto",
        "choice",
        "how the model writes tool calls",
        choices=("auto", "none", *TOOL_FORMATS),
    )
    max_tokens_limit: int | None = _output(
        None, "whole", "the most tokens a request may ask for", low=1, high=1 << 30
    )
    strict_fields: bool = _output(
        False, "switch", "refuse fields that nobody has classified, instead of naming them in a header"
    )

    max_queue: int = _limits(
        256, "whole", "sequences that may wait for each model; more get 429", low=1, high=1_000_000
    )
    key_requests_per_minute: int | None = _limits(
        None, "whole", "requests a minute that each API key may send; more get 429", low=1, high=1_000_000
    )
    key_tokens_per_minute: int | None = _limits(
        None, "whole", "tokens a minute, prompts and answers, that each API key may use", low=1, high=1 << 40
    )
    key_rows: int | None = _limits(
        None, "whole", "sequences that each API key may have running or waiting", low=1, high=1_000_000
    )
    key_grammar_seconds: float | None = _limits(
        None,
        "number",
        "seconds a minute that grammars of each API key may take to compile",
        low=0.01,
        high=60,
    )
    key_limits: Mapping[str, Mapping[str, float | None]] = _limits(
        {},
        "key limits",
        "other limits for single keys, by hash: {sha256:…: {rows: 64, tokens_per_minute: null}}; null is no limit",
    )
    max_body_bytes: int = _limits(8 << 20, "whole", "largest request body", low=1024, high=1 << 30)
    response_store_bytes: int = _limits(
        64 << 20,
        "whole",
        "memory for responses that later ones go on from; 0 stores none",
        low=0,
        high=1 << 34,
    )
    max_header_bytes: int = _limits(65536, "whole", "largest request head", low=1024, high=1 << 20)
    max_connections: int = _limits(1024, "whole", "open connections; more get 503", low=1, high=1_000_000)
    request_timeout: float = _seconds(600.0, "seconds a request may take in all")
    header_timeout: float = _seconds(10.0, "seconds a client may take to send a request's head")
    body_timeout: float = _seconds(30.0, "seconds it may take to send the body")
    write_timeout: float = _seconds(30.0, "seconds it may leave a full buffer unread")
    keep_alive: float = _seconds(30.0, "seconds an idle connection stays open")
    drain_timeout: float = _seconds(30.0, "seconds running requests get to finish at shutdown")

    log_level: str = _logs(
        "info", "choice", "the least that is logged", choices=("debug", "info", "warning", "error")
    )
    log_format: str = _logs(
        "auto", "choice", "auto: text on a terminal, json elsewhere", choices=("auto", "json", "text")
    )
    log_prompts: bool = _logs(
        False, "switch", "log what people write and what models answer", flags=("--enable-log-requests",)
    )

    def __post_init__(self) -> None:
        for name in OWN_OPTIONS:
            value = getattr(self, name)
            if value is not None or DEFAULTS[name] is not None:
                object.__setattr__(self, name, check(name, value, name))
        checked = {name: check(name, value, name) for name, value in self.engine_options.items()}
        object.__setattr__(self, "engine_options", checked)
        if unknown := [number for number, key in enumerate(self.key_limits) if key not in self.api_keys]:
            raise ConfigError(
                f"key_limits: entry {unknown[0]} is for a key that is not among api_keys; add its hash there"
            )

    @property
    def model_of_alias(self) -> dict[str, str]:
        """The models' names by their aliases."""
        pairs = (one.partition("=") for one in self.aliases)
        return {name.strip(): model.strip() for name, _, model in pairs}

    @classmethod
    def of(cls, **given: Any) -> "Settings":
        """Makes settings of values by name, whether they are the server's own or the engine's; None leaves one
        unset."""
        engine = {
            name: value for name, value in given.items() if name in ENGINE_OPTIONS and value is not None
        }
        own = {name: value for name, value in given.items() if name not in ENGINE_OPTIONS}
        return cls(**own, engine_options=engine)

    def engine_with(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Keywords for `EngineConfig`: what was set, and changes for one model."""
        return with_room_for_drafts({**self.engine_options, **changes})


OWN_OPTIONS = options_of(Settings)
DEFAULTS: dict[str, Any] = {
    field.name: field.default for field in dataclasses.fields(Settings) if field.name in OWN_OPTIONS
}
OPTIONS: dict[str, Option] = {
    name: option
    for group in GROUPS
    for name, option in (OWN_OPTIONS | ENGINE_OPTIONS).items()
    if option.group == group
}
"""Every setting of the server and of its engines, by name."""


def check(name: str, value: Any, origin: str) -> Any:
    """The value as `Settings` holds it, or an error that begins with `origin`. Never repeats a key."""
    option = OPTIONS[name]
    match option.type:
        case "text":
            return _checked(value, isinstance(value, str) and bool(value.strip()), origin, "be a text")
        case "switch":
            return _checked(value, isinstance(value, bool), origin, "be true or false")
        case "choice":
            if isinstance(value, bool) and "off" in option.choices:
                value = "on" if value else "off"  # YAML reads the bare words as booleans
            return _checked(value, value in option.choices, origin, f"be one of {', '.join(option.choices)}")
        case "depth":
            return _checked(value, value == "auto" or _is_whole(value), origin, "be a whole number or auto")
        case "tokens":
            right = _is_whole(value) or (isinstance(value, str) and bool(value.strip()))
            return _checked(value, right, origin, "be a whole number or a file")
        case "whole" if option.group == "engine":
            return _checked(value, _is_whole(value), origin, "be a whole number")
        case "whole":
            wanted = f"be a whole number from {option.low} to {option.high}"
            return _checked(value, _is_whole(value) and option.low <= value <= option.high, origin, wanted)
        case "number":
            wanted = f"be a number from {option.low:g} to {option.high:g}"
            return float(
                _checked(value, _is_number(value) and option.low <= value <= option.high, origin, wanted)
            )
        case "list":
            return _check_list(name, value, origin)
        case "keys":
            return _check_keys(value, origin)
        case "sampling":
            return _check_sampling(value, origin)
        case "key limits":
            return _check_key_limits(value, origin)


def _checked(value: Any, right: bool, origin: str, wanted: str) -> Any:
    if not right:
        raise ConfigError(f"{origin} must {wanted}, not {value!r}")
    return value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_list(name: str, value: Any, origin: str) -> tuple[str, ...]:
    if name == "aliases" and isinstance(value, Mapping):
        value = [f"{alias}={model}" for alias, model in value.items()]
    right = isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)
    _checked(value, right, origin, "be a list of texts")
    for item in value:
        if name == "cors_origins":
            _checked(
                item, bool(_ORIGIN.fullmatch(item)), origin, "hold origins such as https://example.org, or *"
            )
        elif name == "aliases":
            alias, _, model = item.partition("=")
            right = item.isprintable() and bool(alias.strip()) and bool(model.strip()) and len(item) <= 1024
            _checked(item, right, origin, "hold NAME=MODEL, such as gpt-4o=tale-20m")
        else:
            _checked(
                item, item.isprintable() and 0 < len(item.strip()) <= 128, origin, "hold printable names"
            )
    return tuple(dict.fromkeys(value))


def _check_keys(value: Any, origin: str) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{origin} must be a list of hashes; `headlong keys` makes a key and its hash")
    for number, item in enumerate(value):
        if not keys.is_hash(item):
            raise ConfigError(
                f"{origin}[{number}] must be sha256: and 64 hexadecimal digits, never the key itself; "
                "`headlong keys` makes a new key and its hash, `headlong keys --stdin` hashes one you have"
            )
    return tuple(dict.fromkeys(item.lower() for item in value))


def _check_key_limits(value: Any, origin: str) -> dict[str, dict[str, float | None]]:
    limits = [name.removeprefix(KEY_PREFIX) for name in OPTIONS if name.startswith(KEY_PREFIX)]
    limits.remove("limits")
    _checked(value, isinstance(value, Mapping), origin, "map hashes of API keys to limits")
    found = {}
    for number, (key, own) in enumerate(value.items()):
        if not isinstance(key, str) or not keys.is_hash(key):
            raise ConfigError(
                f"{origin}: entry {number} must be named by a hash of api_keys, sha256: and 64 hexadecimal digits"
            )
        where = f"{origin} of entry {number}"
        _checked(own, isinstance(own, Mapping), where, f"map {', '.join(limits)} to numbers or null")
        for name in own:
            if name not in limits:
                raise ConfigError(f"{where} has no {name!r}; it may hold {', '.join(limits)}")
        found[key.lower()] = {
            name: None if one is None else check(KEY_PREFIX + name, one, f"{where}: {name}")
            for name, one in own.items()
        }
    return found


def _check_sampling(value: Any, origin: str) -> dict[str, float]:
    _checked(value, isinstance(value, Mapping), origin, f"map {', '.join(SAMPLING_FIELDS)} to numbers")
    for name in value:
        if name not in SAMPLING_FIELDS:
            raise ConfigError(f"{origin} has no {name!r}; it may hold {', '.join(SAMPLING_FIELDS)}")
    try:
        SamplingParams(**value)
    except RequestError as error:
        raise ConfigError(f"{origin}: {error}") from None
    return dict(value)
