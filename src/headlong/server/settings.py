"""Every setting of the server, in one table: name, default, range, group, and what it means.

`Settings` checks itself; flags, environment, config.yml, the command's help and the docs' table are all derived
from the fields below. Engine options and sampling have no defaults here: what is not set stays unset, so theirs
apply. Imports no torch: help must answer at once.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from headlong.errors import ConfigError, RequestError
from headlong.params import SamplingParams
from headlong.server import keys

Kind = Literal["text", "whole", "number", "switch", "choice", "depth", "tokens", "list", "keys", "sampling"]
SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_ORIGIN = re.compile(r"\*|https?://[A-Za-z0-9.\-\[\]:]+")


@dataclass(frozen=True)
class Spec:
    """What may stand in a field, and how people are told."""

    group: str
    kind: Kind
    help: str
    choices: tuple[str, ...] = ()
    low: float = 0
    high: float = math.inf
    flags: tuple[str, ...] = ()
    """Further names of its flag, as other servers have them."""


def _setting(group: str, default: Any, kind: Kind, text: str, **limits: Any) -> Any:
    metadata = {"spec": Spec(group, kind, text, **limits)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


_network = partial(_setting, "network")
_access = partial(_setting, "access")
_models = partial(_setting, "models")
_engine = partial(_setting, "engine", None)
_output = partial(_setting, "output")
_limits = partial(_setting, "limits")
_logs = partial(_setting, "logs")


def _seconds(default: float, text: str) -> Any:
    return _limits(default, "number", text, low=0.05, high=86400)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The whole server's. An attribute that is None was left to whoever it concerns."""

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
    model_dir: str | None = _models(None, "text", "folder whose models admins may list and load by name")
    inline_loading: bool = _models(
        False, "switch", "load the model an admin's request names, if it lies under model_dir"
    )
    max_models: int = _models(
        1, "whole", "models served at once; one more retires the longest unused", low=1, high=64
    )

    mtp: str | None = _engine(
        "choice",
        "auto drafts if the model has a usable head, on insists, off never drafts",
        choices=("auto", "on", "off"),
    )
    draft_tokens: int | str | None = _engine("depth", "tokens drafted per step, or auto; 0 is plain decoding")
    max_draft_tokens: int | None = _engine("whole", "the deepest draft a request may ask for")
    draft_quantization: str | None = _engine(
        "choice",
        "the head as stored (auto), unpacked (none), packed on load (fp8, int8, int4), or its GPTQ version",
        choices=("auto", "none", "fp8", "int8", "int4", "gptq", "gptq_v2"),
    )
    draft_dtype: str | None = _engine("text", "what the head's unpacked matrices are kept in; auto as stored")
    draft_vocab: int | str | None = _engine(
        "tokens", "draft among so many tokens alone, the most frequent, or those a file lists; by default all"
    )
    draft_device: str | None = _engine(
        "text", "where the head drafts, if not on the model's device: cpu, cuda:1"
    )
    proposer: str | None = _engine(
        "text", "who drafts: mtp, ngram, draft, or a chain such as ngram+mtp; auto is mtp"
    )
    drafter: str | None = _engine("text", "the model that drafts, for the proposer draft")
    prefix_cache: bool | None = _engine("switch", "keep what rows computed, for prompts that begin alike")
    device: str | None = _engine("text", "auto, cpu, cuda or cuda:1")
    dtype: str | None = _engine("text", "auto, bfloat16, float16, float32 or float64")
    max_rows: int | None = _engine(
        "whole", "sequences that run at the same time; more wait", flags=("--max-num-seqs",)
    )
    max_context: int | None = _engine(
        "whole", "tokens of prompt and output together", flags=("--max-model-len",)
    )
    cache_tokens: int | None = _engine("whole", "tokens the paged cache holds in all")
    gpu_memory_fraction: float | None = _engine(
        "number",
        "share of a GPU's memory the engine may take, weights included; not for CPUs",
        high=1,
        flags=("--gpu-memory-utilization",),
    )
    page_size: int | None = _engine("whole", "tokens per page of the cache")
    chunk_tokens: int | None = _engine("whole", "prompt tokens read in one step")
    prefix_device_bytes: int | None = _engine("whole", "checkpoints of recurrent state kept on the device")
    prefix_host_bytes: int | None = _engine("whole", "and of those pushed out of it, in host memory")
    check_every_step: bool | None = _engine("switch", "verify pages, slots and hashes after every step; slow")

    sampling: Mapping[str, float] = _output(
        {}, "sampling", 'what requests leave open, as JSON: {"temperature": 0.7}'
    )
    reasoning_format: str = _output(
        "auto", "choice", "how reasoning is told from the answer", choices=("auto", "none", "think")
    )
    tool_format: str = _output(
        "auto",
        "choice",
        "how the model writes tool calls",
        choices=("auto", "none", "hermes", "qwen3_coder"),
    )
    max_tokens_limit: int | None = _output(
        None, "whole", "the most tokens a request may ask for", low=1, high=1 << 30
    )

    max_queue: int = _limits(
        256, "whole", "sequences that may wait for each model; more get 429", low=1, high=1_000_000
    )
    max_body_bytes: int = _limits(8 << 20, "whole", "largest request body", low=1024, high=1 << 30)
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
    log_prompts: bool = _logs(False, "switch", "log what people write and what models answer")

    def __post_init__(self) -> None:
        for name in FIELDS:
            value = getattr(self, name)
            if value is not None or FIELDS[name].default is not None:
                object.__setattr__(self, name, check(name, value, name))

    def engine_with(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Keywords for `EngineConfig`: what was set, and changes for one model."""
        given = {name: value for name in ENGINE_FIELDS if (value := getattr(self, name)) is not None}
        return deepened(given | dict(changes))


FIELDS = {field.name: field for field in dataclasses.fields(Settings)}
SPECS: dict[str, Spec] = {name: field.metadata["spec"] for name, field in FIELDS.items()}
ENGINE_FIELDS = tuple(name for name, spec in SPECS.items() if spec.group == "engine")


def deepened(engine: dict[str, Any]) -> dict[str, Any]:
    """Who asks for deep drafts alone also gets room for them."""
    drafts = engine.get("draft_tokens")
    if not isinstance(drafts, int) or "max_draft_tokens" in engine:
        return engine
    from headlong.config import MAX_DRAFTS, EngineConfig

    return engine | {"max_draft_tokens": min(max(drafts, EngineConfig.max_draft_tokens), MAX_DRAFTS)}


def check(name: str, value: Any, origin: str) -> Any:
    """The value as `Settings` holds it, or an error that begins with `origin`. Never repeats a key."""
    spec = SPECS[name]
    match spec.kind:
        case "text":
            return _checked(value, isinstance(value, str) and bool(value.strip()), origin, "be a text")
        case "switch":
            return _checked(value, isinstance(value, bool), origin, "be true or false")
        case "choice":
            if isinstance(value, bool) and "off" in spec.choices:
                value = "on" if value else "off"  # YAML reads the bare words as booleans
            return _checked(value, value in spec.choices, origin, f"be one of {', '.join(spec.choices)}")
        case "depth":
            return _checked(value, value == "auto" or _is_whole(value), origin, "be a whole number or auto")
        case "tokens":
            right = _is_whole(value) or (isinstance(value, str) and bool(value.strip()))
            return _checked(value, right, origin, "be a whole number or a file")
        case "whole" if spec.group == "engine":
            return _checked(value, _is_whole(value), origin, "be a whole number")
        case "whole":
            wanted = f"be a whole number from {spec.low} to {spec.high}"
            return _checked(value, _is_whole(value) and spec.low <= value <= spec.high, origin, wanted)
        case "number":
            wanted = f"be a number from {spec.low:g} to {spec.high:g}"
            return float(
                _checked(value, _is_number(value) and spec.low <= value <= spec.high, origin, wanted)
            )
        case "list":
            return _check_list(name, value, origin)
        case "keys":
            return _check_keys(value, origin)
        case "sampling":
            return _check_sampling(value, origin)


def _checked(value: Any, right: bool, origin: str, wanted: str) -> Any:
    if not right:
        raise ConfigError(f"{origin} must {wanted}, not {value!r}")
    return value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_list(name: str, value: Any, origin: str) -> tuple[str, ...]:
    right = isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)
    _checked(value, right, origin, "be a list of texts")
    for item in value:
        if name == "cors_origins":
            _checked(
                item, bool(_ORIGIN.fullmatch(item)), origin, "hold origins such as https://example.org, or *"
            )
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
