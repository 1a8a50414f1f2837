"""JSON objects from files nobody vouches for: one parser, one kind of error.

Refuses what JSON readers quietly disagree about (duplicate keys, NaN, Infinity, numbers that overflow) and
what crashes them (invalid UTF-8, bottomless nesting, absurd sizes). Knows nothing of what the object means.
"""

import json
import math
from pathlib import Path
from typing import Any

from headlong.errors import CheckpointError
from headlong.small_files import read_bytes

MAX_JSON_BYTES = 100_000_000
"""Far above any real header or index, far below what would exhaust memory while parsing."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} occurs twice")
        result[key] = value
    return result


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:40]} is out of range")
    return value


def parse_object(data: bytes, where: str, *, infinities: bool = False) -> dict[str, Any]:
    """Parses UTF-8 `data` as one JSON object; `where` opens every error message. `infinities` are no JSON, but real
    configs have them."""
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=float if infinities else _no_constant,
            parse_float=_finite,
        )
    except RecursionError:
        raise CheckpointError(f"{where}: JSON nested too deeply; the file is damaged or hostile") from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError and integers too long to convert
        raise CheckpointError(f"{where}: not valid JSON ({error}); fetch the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def read_object(path: Path, *, infinities: bool = False) -> dict[str, Any]:
    """Reads the JSON object in the file `path`."""
    try:
        data = read_bytes(path, MAX_JSON_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    return parse_object(data, str(path), infinities=infinities)
