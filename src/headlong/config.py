"""What a user may choose about an engine, checked once; architecture sizes never come from here.

The one table of engine options: the server's settings, load requests and every command's flags are made from it.
Imports torch only where a device or a dtype is wanted: help must answer at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headlong.errors import ConfigError
from headlong.option import Option, ValueType, field_for, options_of

if TYPE_CHECKING:
    import torch

MAX_DRAFTS = 16
DTYPES = ("bfloat16", "float16", "float32", "float64")
DTYPE_ALIASES = {
    "half": "float16",
    "float": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
}
REPACKED = ("none", "fp8", "int8", "int4")
"""Formats that a head's matrices can be turned into on load; "none" unpacks them."""
DRAFT_QUANTIZATIONS = ("auto", *REPACKED, "gptq", "gptq_v2")


CHUNK_TOKENS, GPU_CHUNK_TOKENS = 512, 2048
"""How many tokens of prompts a step reads by default; GPUs read more of them at once more quickly."""


def _option(default: Any, type: ValueType, help: str, **more: Any) -> Any:
    return field_for(Option("engine", type, help, **more), default)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Every field has a default that suits the embedded model on a laptop."""

    mtp: Literal["auto", "on", "off"] = _option(
        "auto",
        "choice",
        "auto drafts if the model has a usable head, on insists, off never drafts",
        choices=("auto", "on", "off"),
    )
    draft_tokens: int | Literal["auto"] = _option(
        "auto", "depth", "tokens drafted per step, or auto; 0 is plain decoding"
    )
    """Drafts per step where a request does not say; "auto" chooses what pays at this moment, step by step."""
    max_draft_tokens: int = _option(8, "whole", "the deepest draft a request may ask for")
    """The most drafts that a row may have in one step; the state is sized for this many."""
    draft_quantization: str = _option(
        "auto",
        "choice",
        "the head as stored (auto), unpacked (none), packed on load (fp8, int8, int4), or its GPTQ version",
        choices=DRAFT_QUANTIZATIONS,
    )
    """How the head is kept: as its tensors say, unpacked (none), packed on load (fp8, int8, int4); gptq and gptq_v2
    say which zero points a GPTQ head has, which its tensors cannot."""
    draft_dtype: str = _option(
        "auto", "text", "what the head's unpacked matrices are kept in; auto as stored", metavar="NAME"
    )
    """The dtype of the head's matrices; "auto" keeps them as they are stored, where that is fast."""
    draft_vocab: int | str | Path | None = _option(  # noqa: RUF009 - a field, made by a function
        None,
        "tokens",
        "draft among so many tokens alone, the most frequent, or those a file lists; by default all",
    )
    """Shortens the head's lm_head to some tokens, where it takes a good part of a draft's time; the target still
    decides among all. A number keeps the most frequent tokens where `headlong tune` counted them, else the first, which
    byte-pair vocabularies have in the order of their merges; a file names the tokens one by one."""
    draft_device: str | None = _option(
        None, "text", "where the head drafts, if not on the model's device: cpu, cuda:1", metavar="NAME"
    )
    """The device where the head drafts, with a copy of all it needs and state of its own; None is where the model is.
    The model's device is then free of the head's weights, and each step's hidden states travel."""
    proposer: str = _option(
        "auto", "text", "who drafts: mtp, ngram, draft, or a chain such as ngram+mtp; auto is mtp"
    )
    """Who makes drafts; "auto" is `mtp` where there is a head."""
    drafter: str | None = _option(
        None, "text", "the model that drafts, for the proposer draft", low=1, high=512
    )
    """The model that drafts with the proposer `draft`: a folder, a .gguf file or a repository id."""
    generation_config: str = _option(
        "auto",
        "text",
        "sampling where a request names nothing: the model's generation_config.json (auto), none, or that of a folder",
        metavar="auto|none|DIR",
        local=True,
    )
    """The generation_config.json that says how to sample where a request does not."""
    chat_template: str | None = _option(
        None,
        "text",
        "a Jinja file, or the template itself, in place of the model's own",
        metavar="FILE",
        local=True,
    )
    """The chat template to use in place of the one that comes with the model."""
    prefix_cache: bool = _option(
        True,
        "switch",
        "keep what rows computed, for prompts that begin alike",
        flags=("--enable-prefix-caching",),
    )
    device: str = _option("auto", "text", "auto, cpu, cuda or cuda:1", metavar="NAME")
    dtype: str = _option(
        "auto", "text", "auto, bfloat16, float16 (half), float32 (float) or float64", metavar="NAME"
    )
    max_rows: int = _option(
        16, "whole", "sequences that run at the same time; more wait", flags=("--max-num-seqs",)
    )
    max_context: int | None = _option(
        None,
        "whole",
        "tokens of prompt and output together",
        flags=("--max-model-len",),
        aliases=("max_seq_len", "max_model_len"),
    )
    """The longest sequence in tokens; None is what the model allows, within `cache_tokens`."""
    cache_tokens: int | None = _option(None, "whole", "tokens the paged cache holds in all")
    """Tokens that the KV cache holds; None is what `max_rows` full contexts need, on a GPU as far as memory allows,
    elsewhere at most 65,536."""
    gpu_memory_fraction: float = _option(
        0.9,
        "number",
        "share of a GPU's memory the engine may take, weights included; not for CPUs",
        high=1,
        flags=("--gpu-memory-utilization",),
        aliases=("gpu_memory_utilization",),
    )
    page_size: int = _option(64, "whole", "tokens per page of the cache", flags=("--block-size",))
    chunk_tokens: int | None = _option(
        None,
        "whole",
        "prompt tokens read in one step, by default 2048 on a GPU, else 512",
        flags=("--max-num-batched-tokens",),
    )
    """Prompt tokens read in one step, at most. None is 2,048 on a GPU, where fewer are read while other rows decode, by
    what these take, and 512 elsewhere."""
    prefix_device_bytes: int | None = _option(
        None, "whole", "checkpoints of recurrent state kept on the device"
    )
    """Bytes of the prefix cache on the device; None is twice what all rows' own recurrent state takes."""
    prefix_host_bytes: int | None = _option(None, "whole", "and of those pushed out of it, in host memory")
    """Bytes of the prefix cache on the host; None is four times as much as on the device. On a CPU the two are
    one."""
    step_timeout: float | None = _option(
        None,
        "number",
        "seconds after which a step counts as hung, and the server ends; 0 never, by default 120 on a GPU, else 600",
        high=86400,
    )
    """Seconds after which an engine that is stepped in a thread of its own is given up, because a step of it does not
    end; 0 waits for ever. None is 120 on a GPU and 600 elsewhere, or one for each of `chunk_tokens`."""
    check_every_step: bool = _option(False, "switch", "verify pages, slots and hashes after every step; slow")
    """Checks the state's invariants after every step; this is for finding faults."""

    map_files: bool = True
    """Whether weights are laid out from a mapping of their file. Whoever truncates a mapped file ends the process that
    uses it, so a server, which others depend on, reads. No option: nobody else has a reason to choose."""

    def __post_init__(self) -> None:
        if self.mtp not in ("auto", "on", "off"):
            raise ConfigError(f"mtp must be 'auto', 'on' or 'off', not {self.mtp!r}")
        for name in ("dtype", "draft_dtype"):
            object.__setattr__(self, name, DTYPE_ALIASES.get(getattr(self, name), getattr(self, name)))
            if (value := getattr(self, name)) != "auto" and value not in DTYPES:
                raise ConfigError(f"{name} must be 'auto' or one of {', '.join(DTYPES)}, not {value!r}")
        if self.draft_quantization not in DRAFT_QUANTIZATIONS:
            raise ConfigError(
                f"draft_quantization must be one of {', '.join(DRAFT_QUANTIZATIONS)}, not {self.draft_quantization!r}"
            )
        _check("max_rows", self.max_rows, 1, 4096)
        _check("page_size", self.page_size, 16, 1024)
        if self.chunk_tokens is not None:
            _check("chunk_tokens", self.chunk_tokens, 1, 1 << 20)
        _check("max_draft_tokens", self.max_draft_tokens, 1, min(MAX_DRAFTS, self.page_size))
        _check_fraction("gpu_memory_fraction", self.gpu_memory_fraction)
        if self.step_timeout is not None and not 0 <= self.step_timeout <= 86400:
            raise ConfigError(f"step_timeout must be a number from 0 to 86400, not {self.step_timeout!r}")
        if self.draft_tokens != "auto":
            _check("draft_tokens", self.draft_tokens, 0, self.max_draft_tokens)
        if isinstance(self.draft_vocab, str | Path):
            if not str(self.draft_vocab).strip():
                raise ConfigError("draft_vocab is empty; give a number of tokens or a file that lists them")
        elif self.draft_vocab is not None:
            _check("draft_vocab", self.draft_vocab, 1, 1 << 30)
        for name, low, high in (
            ("max_context", 1, 1 << 30),
            ("cache_tokens", 1, 1 << 30),
            ("prefix_device_bytes", 0, 1 << 50),
            ("prefix_host_bytes", 0, 1 << 50),
        ):
            value = getattr(self, name)
            if value is not None:
                _check(name, value, low, high)

    @property
    def drafts(self) -> int:
        """How many drafts a step has where neither the request says nor the engine chooses."""
        chosen = self.max_draft_tokens if self.draft_tokens == "auto" else self.draft_tokens
        return min(chosen, self.max_draft_tokens)

    def resolve_step_timeout(self) -> float | None:
        """Returns the seconds that a step may take, or None where it may take for ever."""
        if self.step_timeout is not None:
            return self.step_timeout or None
        on_gpu = self.resolve_device().type == "cuda"
        return 120.0 if on_gpu else max(600.0, float(self.resolve_chunk_tokens()))

    def resolve_chunk_tokens(self) -> int:
        """Returns how many tokens of prompts one step reads at most."""
        if self.chunk_tokens is not None:
            return self.chunk_tokens
        return GPU_CHUNK_TOKENS if self.resolve_device().type == "cuda" else CHUNK_TOKENS

    def resolve_device(self) -> "torch.device":
        if self.device == "auto":
            import torch

            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return _device("device", self.device, "'auto', ")

    def resolve_draft_device(self) -> "torch.device | None":
        """Returns the head's own device, or None if the head stays with the model."""
        return None if self.draft_device is None else _device("draft_device", self.draft_device)

    def resolve_dtype(self) -> "torch.dtype | None":
        """Returns the dtype of the weights, or None to leave the choice to the checkpoint and the device."""
        return _dtype(self.dtype)

    def resolve_draft_dtype(self) -> "torch.dtype | None":
        """Returns the dtype of the head's unpacked matrices, or None to keep them as they are stored, where that is
        fast."""
        return _dtype(self.draft_dtype)

    def longest(self, max_position: int) -> int:
        """Returns the longest sequence that is wanted, which must be one that the model was made for."""
        context = self.max_context or max_position
        if context > max_position:
            raise ConfigError(
                f"max_context {context} is above the {max_position} tokens this model was made for; ask for at most "
                "that many, or leave it out"
            )
        return context

    def resolve_context(self, max_position: int) -> tuple[int, int]:
        """Returns the longest sequence and the number of the cache's pages. A sequence must fit in the cache with its
        drafts."""
        context = self.longest(max_position)
        wanted = self.cache_tokens or min(self.max_rows * context, max(context, 65536))
        num_pages = -(-wanted // self.page_size)
        fits = num_pages * self.page_size
        if self.max_context is not None and context > fits:
            raise ConfigError(
                f"max_context {context} does not fit in cache_tokens {wanted}; raise cache_tokens"
            )
        return min(context, fits), num_pages


ENGINE_OPTIONS = options_of(EngineConfig)


def with_room_for_drafts(options: Mapping[str, Any]) -> dict[str, Any]:
    """Makes keywords for `EngineConfig` in which whoever asks for deep drafts alone also gets memory for them. More
    than an engine can do is left to the engine's own complaint."""
    drafts = options.get("draft_tokens")
    if not isinstance(drafts, int) or "max_draft_tokens" in options:
        return dict(options)
    return dict(options) | {"max_draft_tokens": min(max(drafts, EngineConfig.max_draft_tokens), MAX_DRAFTS)}


def _dtype(name: str) -> "torch.dtype | None":
    import torch

    return None if name == "auto" else getattr(torch, name)


def _device(name: str, wanted: str, others: str = "") -> "torch.device":
    """Parses a device's name. `others` are further values that the field may have; the complaint names them."""
    import torch

    try:
        device = torch.device(wanted)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"{name} must be {others}'cpu' or 'cuda[:n]', not {wanted!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"{name} must be {others}'cpu' or 'cuda[:n]', not {wanted!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"{name} {wanted!r} was asked for, but torch sees no CUDA device; use 'cpu'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"{name} {wanted!r} was asked for, but torch sees {torch.cuda.device_count()} of them"
        )
    return device


def _check(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} must be a whole number from {low} to {high}, not {value!r}")


def _check_fraction(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(f"{name} must be a number above 0 and at most 1, such as 0.9, not {value!r}")
