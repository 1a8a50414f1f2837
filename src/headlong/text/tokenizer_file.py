"""What a tokenizer.json may hold, checked before the library builds it: a file can ask for gigabytes or hours.

Normalizers that write more than they read are multiplied with each other, regular expressions are bounded in length and
repetitions, ids in size. Knows no tokens.
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headlong.errors import CheckpointError
from headlong.small_files import read_bytes

MAX_FILE_BYTES = 256 << 20
MAX_ID = 1 << 22
MAX_TOKEN_CHARS = 1 << 16
MAX_ADDED = 1 << 16
MAX_STEPS = 64
"""The most steps of each stage, such as the normalizer."""
MAX_GROWTH = 64
"""How many times as long as it was a text may become by all steps together."""
MAX_PATTERN_CHARS = 1 << 13
MAX_REPETITIONS = 1000
_REPEATED = re.compile(r"\{(\d+)?(?:,(\d*))?\}")
_NESTED = re.compile(r"[+*}]\??\+?\)[+*{]")


def check(path: Path) -> None:
    """Raises a `CheckpointError` that names the file and what is wrong with it."""
    try:
        whole = json.loads(read_bytes(path, MAX_FILE_BYTES))
    except OSError as error:
        raise _fault(path, error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise _fault(path, str(error) or "it is nested too deeply") from error
    if not isinstance(whole, dict):
        raise _fault(path, "it is not a JSON object")
    why = next(_faults(whole), None)
    if why is not None:
        raise _fault(path, why)


def _fault(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path}: not a readable tokenizer ({why}); download it again")


def _faults(whole: dict[str, Any]) -> Iterator[str]:
    added = whole.get("added_tokens")
    if isinstance(added, list) and len(added) > MAX_ADDED:
        yield f"it has {len(added)} added tokens, and {MAX_ADDED} are the most"
    ids = [token.get("id") for token in added or () if isinstance(token, dict)]
    model = whole.get("model")
    model = model if isinstance(model, dict) else {}
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        ids += vocabulary.values()
        if max(map(len, vocabulary), default=0) > MAX_TOKEN_CHARS:
            yield f"a token has more than {MAX_TOKEN_CHARS} characters"
        unknown = model.get("unk_token")
        if (
            isinstance(unknown, str)
            and unknown not in vocabulary
            and model.get("type") in ("WordLevel", "WordPiece")
        ):
            yield f"its unknown token {unknown[:40]!r} is not in its vocabulary"
    if any(isinstance(one, int) and not 0 <= one <= MAX_ID for one in ids):
        yield f"the id of a token is not from 0 to {MAX_ID}"
    for stage in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        yield from _stage_faults(stage, list(_steps(whole.get(stage))))


def _stage_faults(stage: str, steps: list[dict[str, Any]]) -> Iterator[str]:
    if len(steps) > MAX_STEPS:
        yield f"its {stage} has {len(steps)} steps, and {MAX_STEPS} are the most"
    growth = 1.0
    for step in steps:
        growth *= _growth(step)
        pattern = step.get("pattern")
        if isinstance(pattern, dict) and isinstance(pattern.get("Regex"), str):
            yield from _pattern_faults(stage, pattern["Regex"])
    if growth > MAX_GROWTH:
        yield f"its {stage} makes texts more than {MAX_GROWTH} times as long"


def _steps(stage: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """The steps of a stage, sequences inside of sequences written out."""
    if not isinstance(stage, dict) or depth > MAX_STEPS:
        return
    yield stage
    for name in ("normalizers", "pretokenizers", "processors", "decoders"):
        inner = stage.get(name)
        for one in inner if isinstance(inner, list) else ():
            yield from _steps(one, depth + 1)


def _growth(step: dict[str, Any]) -> float:
    """How much longer a step may make a text of two characters or more."""
    content = step.get("content")
    if step.get("type") == "Prepend":
        return 1 + len(str(step.get("prepend"))) / 2
    if step.get("type") != "Replace" or not isinstance(content, str):
        return 1.0
    pattern = step.get("pattern")
    replaced = pattern.get("String") if isinstance(pattern, dict) else None
    # An empty pattern, and any expression, may fit between all characters.
    return max(1.0, len(content) / len(replaced)) if replaced else 1.0 + len(content)


def _pattern_faults(stage: str, pattern: str) -> Iterator[str]:
    if len(pattern) > MAX_PATTERN_CHARS:
        yield f"a pattern of its {stage} has more than {MAX_PATTERN_CHARS} characters"
    counts = [max(int(low or 1), int(high or 1)) for low, high in _REPEATED.findall(pattern)]
    if math.prod(count for count in counts if count) > MAX_REPETITIONS:
        yield f"a pattern of its {stage} repeats more than {MAX_REPETITIONS} times"
    if _NESTED.search(pattern):
        yield f"a pattern of its {stage} repeats what is repeated inside"
