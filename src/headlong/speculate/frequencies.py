"""How often each token was seen in some text, and the tokens worth drafting by it.

Counts are kept in the user's cache folder, by tokenizer: `headlong tune` writes them, engines that draft among fewer
tokens read them. Lists that others made are read from files. Knows no engine and no tokenizer.
"""

import json
from collections.abc import Collection, Mapping
from functools import partial
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from headlong.errors import ConfigError
from headlong.small_files import read_bytes
from headlong.speculate import stored

VERSION = 1
MAX_BYTES = 1 << 26
FORMS = (
    "a JSON list of token ids, a JSON object of counts by token id, lines of an id and a count, or a .pt file"
)

Counts = Mapping[int, int]


def most_frequent(counts: Counts, size: int, vocab_size: int, always: Collection[int] = ()) -> Tensor:
    """`size` tokens, ascending: those of `always` first of all, then the most frequent. Among tokens seen as often the
    lower ids come first, since byte-pair vocabularies are in the order of their merges."""
    seen_V = torch.zeros(vocab_size, dtype=torch.double)
    if known := [token for token in counts if token < vocab_size]:
        seen_V[known] = torch.tensor([counts[token] for token in known], dtype=torch.double)
    if certain := sorted({token for token in always if 0 <= token < vocab_size}):
        seen_V[certain] = torch.inf
    order_V = seen_V.argsort(descending=True, stable=True)
    return order_V[: max(size, len(certain))].sort().values


def path_of(fingerprint: str) -> Path:
    return stored.place("tokens", fingerprint[:24])


def save(fingerprint: str, counts: Counts) -> Path:
    file = path_of(fingerprint)
    data = {"version": VERSION, "tokenizer": fingerprint, "counts": {str(t): n for t, n in counts.items()}}
    stored.write(file, data)
    return file


def load(fingerprint: str) -> Counts | None:
    """What `save` wrote for this tokenizer; None if nothing did."""
    return stored.load(
        partial(path_of, fingerprint), MAX_BYTES, {"version": VERSION, "tokenizer": fingerprint},
        lambda data: _counts(data["counts"].items()), "tune --draft-vocab",
    )  # fmt: skip


def read_list(path: str | Path, vocab_size: int) -> list[int]:
    """The tokens that a file lists, or has counts above 0 for."""
    file = Path(path).expanduser()
    try:
        data = read_bytes(file, MAX_BYTES)
        found = _unpickled(data) if file.suffix == ".pt" else _parsed(data.decode("utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"draft_vocab {str(path)!r}: there is no such file; give a number or a file"
        ) from None
    except (OSError, ValueError, TypeError, RecursionError, UnpicklingError) as error:
        raise ConfigError(
            f"draft_vocab {str(path)!r}: cannot be read ({error}); it must hold {FORMS}"
        ) from error
    tokens = [token for token, count in found.items() if count]
    if not tokens:
        raise ConfigError(f"draft_vocab {str(path)!r}: names no token; it must hold {FORMS}")
    if (highest := max(tokens)) >= vocab_size:
        raise ConfigError(
            f"draft_vocab {str(path)!r}: has token {highest}, but the model's vocabulary has {vocab_size}; "
            "use a list made for this model's tokenizer"
        )
    return tokens


def _parsed(text: str) -> Counts:
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    if isinstance(data, dict):
        counts = data.get("counts", data)
        if not isinstance(counts, dict):
            raise ValueError("its counts are no object")
        return _counts(counts.items())
    if isinstance(data, list):
        return _counts((token, 1) for token in data)
    lines = (line.split() for line in text.splitlines() if line.strip())
    return _counts(
        (words[0], words[1] if len(words) == 2 else 1 if len(words) == 1 else None) for words in lines
    )


def _unpickled(data: bytes) -> Counts:
    """A list or a tensor of ids; nothing else in such a file is looked at, let alone run."""
    found = torch.load(BytesIO(data), map_location="cpu", weights_only=True)
    return _counts((token, 1) for token in (found.tolist() if isinstance(found, Tensor) else found))


def _counts(pairs: Any) -> dict[int, int]:
    return {_whole(token): _whole(count) for token, count in pairs}


def _whole(value: Any) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise ValueError(f"{str(value)[:40]!r} is no whole number from 0 on")
    return value
