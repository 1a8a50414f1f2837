"""What a SentencePiece model (`tokenizer.model`) holds: pieces, scores, kinds, and how a text is normalised.

The file is a protocol buffer; of its messages only the fields that change what a text is encoded to are read. Knows
nothing of the tokenizer that is made of them.
"""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headlong.errors import CheckpointError
from headlong.small_files import read_bytes
from headlong.text.pieces import TokenType
from headlong.text.tokenizer_file import MAX_FILE_BYTES, MAX_ID, MAX_TOKEN_CHARS

UNIGRAM, BPE = 1, 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True)
class SentencePieceModel:
    """The names of fields are those of the format, its defaults among them."""

    tokens: list[str]
    scores: list[float]
    types: list[int]
    model_type: int
    byte_fallback: bool
    bos_id: int
    eos_id: int
    pad_id: int
    charsmap: bytes
    """How characters are replaced before all else, as the format has it compiled; often empty."""
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool

    @property
    def unk_id(self) -> int:
        """The piece that unknown characters become; the format demands exactly one."""
        return self.types.index(TokenType.UNKNOWN)


def read_model(path: Path) -> SentencePieceModel:
    """Raises a `CheckpointError` that names the file and what is wrong with it."""
    try:
        return _read(read_bytes(path, MAX_FILE_BYTES))
    except OSError as error:
        why = error.strerror or str(error)
    except (ValueError, struct.error) as error:
        why = str(error)
    raise CheckpointError(
        f"{path}: not a readable SentencePiece model ({why}); download it again, or put a tokenizer.json beside it"
    )


def _read(data: bytes) -> SentencePieceModel:
    tokens: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for field, value in _fields(data):
        if field == 1:
            token, score, kind = _piece(_message(value))
            tokens.append(token)
            scores.append(score)
            types.append(kind)
        elif field == 2:
            trainer = dict(_fields(_message(value)))
        elif field == 3:
            normalizer = dict(_fields(_message(value)))
    _check(tokens, scores, types)
    model_type = _number(trainer, 3, UNIGRAM)
    if model_type not in (UNIGRAM, BPE):
        raise ValueError(f"its type {model_type} is neither unigram nor BPE")
    if _number(trainer, 24, 0):
        raise ValueError("it puts spaces behind words, which is not supported")
    if not _number(normalizer, 5, 1):
        raise ValueError("it does not escape spaces, which is not supported")
    return SentencePieceModel(
        tokens=tokens,
        scores=scores,
        types=types,
        model_type=model_type,
        byte_fallback=bool(_number(trainer, 35, 0)),
        bos_id=_id(trainer, 41, 1, tokens),
        eos_id=_id(trainer, 42, 2, tokens),
        pad_id=_id(trainer, 43, -1, tokens),
        charsmap=_message(normalizer.get(2, b"")),
        add_dummy_prefix=bool(_number(normalizer, 3, 1)),
        remove_extra_whitespaces=bool(_number(normalizer, 4, 1)),
    )


def _piece(data: bytes) -> tuple[str, float, int]:
    token, score, kind = "", 0.0, int(TokenType.NORMAL)
    for field, value in _fields(data):
        if field == 1:
            token = _message(value).decode()
        elif field == 2:
            (score,) = struct.unpack("<f", _message(value))
        elif field == 3:
            kind = _whole(value)
    return token, score, kind


def _check(tokens: list[str], scores: list[float], types: list[int]) -> None:
    if not tokens:
        raise ValueError("it has no pieces")
    if len(tokens) > MAX_ID:
        raise ValueError(f"it has {len(tokens)} pieces, and {MAX_ID} are the most")
    if len(set(tokens)) < len(tokens):
        raise ValueError("a piece stands in it twice")
    if max(map(len, tokens)) > MAX_TOKEN_CHARS:
        raise ValueError(f"a piece has more than {MAX_TOKEN_CHARS} characters")
    if not all(map(math.isfinite, scores)):
        raise ValueError("a score is no finite number")
    if unknown := set(types) - set(TokenType) or set(types) & {TokenType.UNUSED}:
        raise ValueError(f"pieces of kind {min(unknown)} are not supported")
    if types.count(TokenType.UNKNOWN) != 1:
        raise ValueError("it needs one piece for what is unknown")


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message with their numbers; those of fixed length as bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        field, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield field, value
            continue
        if kind == _BYTES:
            length, at = _varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            length = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError("it is no protocol buffer")
        if at + length > len(data):
            raise ValueError("it is cut short")
        yield field, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("it is cut short")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("it is no protocol buffer")


def _message(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a field has another type than it should")
    return value


def _whole(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("a field has another type than it should")
    return value


def _number(message: dict[int, int | bytes], field: int, default: int) -> int:
    return _whole(message.get(field, default))


def _id(message: dict[int, int | bytes], field: int, default: int, tokens: list[str]) -> int:
    """The id of a special piece; -1 where there is none. Negative numbers are stored as their 64 bits."""
    value = _number(message, field, default)
    return value if 0 <= value < len(tokens) else -1
