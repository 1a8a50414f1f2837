"""The parts of a tokenizer.json that vocabularies of other containers are brought into, and the object made of them.

Shared by GGUF metadata and SentencePiece models, whose kinds of tokens have the same numbers. Knows no files.
"""

import json
from collections.abc import Container, Mapping, Sequence
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, Unigram

SPACE = "\u2581"
"""What stands for a space in a vocabulary of SentencePiece."""
MAX_MERGED = 256
"""Characters of a SentencePiece token that can still come from merging; longer ones are only found whole."""


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def ids_of(tokens: Sequence[str]) -> dict[str, int]:
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    ids.pop("", None)
    return ids


def added_tokens(
    tokens: Sequence[str], types: Sequence[int], ends: Container[int | None]
) -> list[dict[str, Any]]:
    """The tokens that are found in a text as they are written. The ids in `ends` are special whatever their type."""
    special = {int(TokenType.CONTROL), int(TokenType.UNKNOWN)}
    found = special | {int(TokenType.USER_DEFINED)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": id, "content": tokens[id], **flags, "special": kind in special or id in ends}
        for id, kind in enumerate(types)
        if (kind in found or id in ends) and tokens[id]
    ]


def around(
    tokens: Sequence[str] | Mapping[int, str], first: int | None, last: int | None
) -> dict[str, Any] | None:
    """The post-processor that puts the first and last token around a text."""
    ids = {tokens[end]: end for end in (first, last) if end is not None}
    if not ids:
        return None
    before, after = (
        [] if end is None else [{"SpecialToken": {"id": tokens[end], "type_id": 0}}] for end in (first, last)
    )
    single = [*before, {"Sequence": {"id": "A", "type_id": 0}}, *after]
    table = {token: {"id": token, "ids": [id], "tokens": [token]} for token, id in ids.items()}
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": table}


def merges_of_scores(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Every merge of two tokens into a third, the token of the highest score first.

    SentencePiece merges the leftmost of the pairs with one score. A list of merges has no equal ranks, so where two
    overlapping pairs make the same token (`a aa` and `aa a`) the order of their ids decides instead.
    """
    whole = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.BYTE)
    ids = {token: id for id, token in enumerate(tokens) if token and types[id] not in whole}
    ways: list[tuple[float, int, int]] = []
    for token, id in ids.items():
        if len(token) <= MAX_MERGED:
            for cut in range(1, len(token)):
                left, right = ids.get(token[:cut]), ids.get(token[cut:])
                if left is not None and right is not None:
                    ways.append((-scores[id], left, right))
    return [(tokens[left], tokens[right]) for _, left, right in sorted(ways)]


def bpe_of_scores(
    tokens: Sequence[str],
    types: Sequence[int],
    scores: Sequence[float],
    unknown: str | None,
    byte_fallback: bool = True,
) -> dict[str, Any]:
    """SentencePiece's BPE as the model of a tokenizer.json."""
    model = {"type": "BPE", "dropout": None, "unk_token": unknown, "fuse_unk": True}
    model |= {"byte_fallback": byte_fallback, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    return model | {
        "ignore_merges": False,
        "vocab": ids_of(tokens),
        "merges": merges_of_scores(tokens, types, scores),
    }


def unescaping(prefix: bool) -> dict[str, Any]:
    """SentencePiece's decoder; `prefix` says whether a text's first space is one that was put there."""
    stages: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {"type": "Sequence", "decoders": [*stages, *strip]}


def backend_of(whole: Mapping[str, Any]) -> Backend:
    """The `tokenizers` object that a tokenizer.json describes. The vocabulary is handed over as Python objects, since
    writing it as JSON and reading it again would take ten times as long. Raises what the library does."""
    settings = {name: value for name, value in whole["model"].items() if value is not None}
    kind = {"BPE": BPE, "Unigram": Unigram}[settings.pop("type")]
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    backend = Backend.from_str(json.dumps({**whole, "model": empty, "added_tokens": []}))
    backend.model = kind(**settings)
    backend.add_tokens(
        [
            AddedToken(**{name: value for name, value in entry.items() if name != "id"})
            for entry in whole["added_tokens"]
        ]
    )
    return backend
