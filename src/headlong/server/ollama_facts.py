"""What Ollama's clients are told of a model's files: their form, size and architecture, read from headers alone.

Knows no endpoint. A model whose files cannot be read from here has none of these facts.
"""

import functools
import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.tensor_info import FLOAT_DTYPES
from headlong.errors import HeadlongError
from headlong.models.registry import config_of

_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
_INFO = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
"""Ollama's names for fields of config.json."""


@dataclass(frozen=True)
class FileFacts:
    """What is told of a model's files; empty where they cannot be read."""

    digest: str
    """A hash of the names, sizes and times of the files: it changes when the model does."""
    format: str = ""
    architecture: str = ""
    nbytes: int = 0
    parameters: int | None = None
    """How many weights there are; None where they are packed in a way that headers do not count."""
    quantization: str = ""
    modified: float = 0.0
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def details(self) -> dict[str, Any]:
        """Ollama's `details` object."""
        return {
            "parent_model": "",
            "format": self.format,
            "family": self.architecture,
            "families": [self.architecture] if self.architecture else [],
            "parameter_size": "" if self.parameters is None else _rounded(self.parameters),
            "quantization_level": self.quantization,
        }


def facts_of(name: str, path: Path | None) -> FileFacts:
    """Reads the headers of a model's files, once for as long as they stay the same. Not for the event loop."""
    try:
        return _no_facts(name) if path is None else _read(path, _stamp(path))
    except (HeadlongError, OSError):
        return _no_facts(name)


def _no_facts(name: str) -> FileFacts:
    return FileFacts(hashlib.sha256(name.encode("utf-8", "replace")).hexdigest())


def _stamp(path: Path) -> tuple[tuple[str, int, int], ...]:
    files = [path] if path.is_file() else sorted(one for one in path.iterdir() if one.is_file())
    return tuple((one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in files)


@functools.lru_cache(maxsize=256)
def _read(path: Path, stamp: tuple[tuple[str, int, int], ...]) -> FileFacts:
    checkpoint = Checkpoint.open(path)
    config = config_of(checkpoint)
    architecture = str(config.get("model_type", "unknown"))
    text = config.get("text_config", config)
    tensors = checkpoint.tensors.values()
    known = checkpoint.is_gguf or all(one.dtype in FLOAT_DTYPES for one in tensors)
    count = sum(math.prod(one.shape) for one in tensors) if known else None
    sizes: Counter[str] = Counter()
    for one in tensors:
        sizes[one.dtype] += one.nbytes
    method = (config.get("quantization_config") or {}).get("quant_method")
    info = {ours: text[theirs] for ours, theirs in _INFO.items() if isinstance(text.get(theirs), int)}
    return FileFacts(
        digest=hashlib.sha256(repr(stamp).encode()).hexdigest(),
        format="gguf" if checkpoint.is_gguf else "safetensors",
        architecture=architecture,
        nbytes=checkpoint.nbytes,
        parameters=count,
        quantization=str(method).upper() if method else max(sizes, key=sizes.__getitem__, default=""),
        modified=max((time for _, _, time in stamp), default=0) / 1e9,
        info=info,
    )


def _rounded(count: int) -> str:
    for unit, letter in _UNITS:
        if count >= unit:
            return f"{count / unit:.1f}{letter}"
    return str(count)
