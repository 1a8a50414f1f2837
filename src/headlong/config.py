"""What a user may choose about an engine, checked once; architecture sizes never come from here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from headlong.errors import ConfigError

MAX_DRAFTS = 16
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
REPACKED = ("none", "fp8", "int8", "int4")
"""What a head's matrices can be turned into on load; "none" unpacks them."""
DRAFT_QUANTIZATIONS = ("auto", *REPACKED, "gptq", "gptq_v2")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Every field has a default that suits the embedded model on a laptop."""

    mtp: Literal["auto", "on", "off"] = "auto"
    draft_tokens: int | Literal["auto"] = "auto"
    """Drafts per step where a request does not say; auto is what pays at this moment, step by step."""
    draft_quantization: str = "auto"
    """How the head is kept: as its tensors say, unpacked (none), packed on load (fp8, int8, int4); gptq and gptq_v2
    say which zero points a GPTQ head has, which its tensors cannot."""
    draft_dtype: str = "auto"
    """What the head's unpacked matrices are kept in; by default as they are stored, where that is fast."""
    draft_vocab: int | str | Path | None = None
    """Draft among so many tokens alone: an lm_head that is a good part of a draft's time gets shorter. The target
    decides as ever. They are the most frequent ones where `headlong tune` counted them, else the first, which byte-pair
    vocabularies have in the order of their merges; a file names them one by one."""
    draft_device: str | None = None
    """Where the head drafts, with a copy of all it needs and state of its own; by default where the model is. The
    model's device is then free of the head's weights, and each step's hidden states travel."""
    device: str = "auto"
    dtype: str = "auto"
    max_rows: int = 16
    """Sequences that run at the same time; more wait."""
    max_context: int | None = None
    """Tokens of prompt and output together; by default what the model allows, within `cache_tokens`."""
    cache_tokens: int | None = None
    """Tokens the paged cache holds in all; by default what `max_rows` full contexts need, on a GPU as far as there is
    room, elsewhere at most 65,536."""
    gpu_memory_fraction: float = 0.9
    """Share of a GPU's whole memory that the engine may take, weights included. Without meaning elsewhere."""
    page_size: int = 64
    chunk_tokens: int = 512
    """Prompt tokens read in one step."""
    max_draft_tokens: int = 8
    """The deepest draft a request may ask for; state is sized for it."""
    proposer: str = "auto"
    """Who drafts: mtp, ngram, draft, or a chain such as ngram+mtp; auto is mtp where there is a head."""
    drafter: str | None = None
    """The model that drafts, for the proposer `draft`: a folder, a .gguf file or a repository id."""
    prefix_cache: bool = True
    """Keep what rows computed, for prompts that begin alike."""
    prefix_device_bytes: int | None = None
    """Of recurrent checkpoints on the device; by default as much as all rows' own recurrent state, twice."""
    prefix_host_bytes: int | None = None
    """Of those that were pushed out, in host memory; by default four times as much. On CPU the two are one."""
    check_every_step: bool = False
    """Verify pages, slots, counts and hashes after every step: slow, for finding faults."""

    def __post_init__(self) -> None:
        if self.mtp not in ("auto", "on", "off"):
            raise ConfigError(f"mtp must be 'auto', 'on' or 'off', not {self.mtp!r}")
        for name in ("dtype", "draft_dtype"):
            if (value := getattr(self, name)) != "auto" and value not in DTYPES:
                raise ConfigError(f"{name} must be 'auto' or one of {', '.join(DTYPES)}, not {value!r}")
        if self.draft_quantization not in DRAFT_QUANTIZATIONS:
            raise ConfigError(
                f"draft_quantization must be one of {', '.join(DRAFT_QUANTIZATIONS)}, not {self.draft_quantization!r}"
            )
        _check("max_rows", self.max_rows, 1, 4096)
        _check("page_size", self.page_size, 16, 1024)
        _check("chunk_tokens", self.chunk_tokens, 1, 1 << 20)
        _check("max_draft_tokens", self.max_draft_tokens, 1, min(MAX_DRAFTS, self.page_size))
        _check_fraction("gpu_memory_fraction", self.gpu_memory_fraction)
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
        """Where a request does not say and the engine may not choose by itself."""
        chosen = self.max_draft_tokens if self.draft_tokens == "auto" else self.draft_tokens
        return min(chosen, self.max_draft_tokens)

    def resolve_device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return _device("device", self.device, "'auto', ")

    def resolve_draft_device(self) -> torch.device | None:
        """None if the head stays with the model."""
        return None if self.draft_device is None else _device("draft_device", self.draft_device)

    def resolve_dtype(self) -> torch.dtype | None:
        """None leaves the choice to the checkpoint and the device."""
        return None if self.dtype == "auto" else DTYPES[self.dtype]

    def resolve_context(self, max_position: int) -> tuple[int, int]:
        """(longest sequence, pages of the cache). A sequence must fit in the cache with its drafts."""
        context = min(self.max_context or max_position, max_position)
        wanted = self.cache_tokens or min(self.max_rows * context, max(context, 65536))
        num_pages = -(-wanted // self.page_size)
        fits = num_pages * self.page_size
        if self.max_context is not None and context > fits:
            raise ConfigError(
                f"max_context {context} does not fit in cache_tokens {wanted}; raise cache_tokens"
            )
        return min(context, fits), num_pages


def _device(name: str, wanted: str, others: str = "") -> torch.device:
    """`others` are further values the field may have, for the complaint."""
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
