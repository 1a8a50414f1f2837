"""The vocabulary in the metadata of a GGUF file, `tokenizer.ggml.*`, brought into the form of a tokenizer.json.

Two kinds: "gpt2" is byte-level BPE with its merges in the file; "llama" is SentencePiece, where the pair that makes the
token of the highest score is merged first. The format says nothing of white space around added tokens, and names no
normalizer: that of the models of the same `pre` is taken, unless a key of our own names one. Knows no files.
"""

import math
from collections.abc import Mapping
from itertools import repeat
from typing import Any

from headlong.errors import CheckpointError
from headlong.text.gguf_splitting import SPLITTINGS, pre_tokenizer
from headlong.text.pieces import SPACE, TokenType, added_tokens, around, bpe_of_scores, ids_of, unescaping

PREFIX = "tokenizer.ggml."
NORMALIZER_KEY = "headlong.tokenizer.normalizer"
SPECIAL_ID_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
"""The separator's is spelt so in the format."""
_NO_TOKEN = (-1, 2**32 - 1)
_LLAMA_IDS = {"bos_token": 1, "eos_token": 2, "unk_token": 0}
"""What the format means where a "llama" vocabulary does not say."""


def tokenizer_files(metadata: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What tokenizer.json and tokenizer_config.json would hold."""
    kind = metadata.get(PREFIX + "model")
    if kind not in ("gpt2", "llama"):
        raise _fault(
            "model", f"{kind!r} is not supported; gpt2 (byte-level BPE) and llama (SentencePiece) are"
        )
    tokens, types = _tokens(metadata)
    special = _special_ids(metadata, len(tokens), _LLAMA_IDS if kind == "llama" else {})
    if kind == "gpt2":
        body, add_bos = _byte_level(metadata, tokens)
    else:
        body, add_bos = _sentencepiece(metadata, tokens, types, special), True
    add_bos = _truth(metadata, "add_bos_token", add_bos)
    add_eos = _truth(metadata, "add_eos_token", False)
    config: dict[str, Any] = {"add_bos_token": add_bos, "add_eos_token": add_eos}
    config |= {name: tokens[id] for name, id in special.items()}
    if (template := _chat_template(metadata)) is not None:
        config["chat_template"] = template
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(tokens, types, {special.get("bos_token"), special.get("eos_token")}),
        "post_processor": around(
            tokens, _end(special, "bos_token", add_bos), _end(special, "eos_token", add_eos)
        ),
    }
    return whole | body, config


def _fault(key: str, what: str) -> CheckpointError:
    return CheckpointError(f"metadata key '{PREFIX}{key}': {what}")


def _array(
    metadata: Mapping[str, Any], key: str, kinds: tuple[type, ...], length: int | None = None
) -> list[Any]:
    values = metadata.get(PREFIX + key)
    if not isinstance(values, list) or not set(map(type, values)) <= set(kinds):
        raise _fault(key, f"must be an array of {kinds[0].__name__}; convert the model again")
    if length is not None and len(values) != length:
        raise _fault(key, f"{len(values)} entries for {length} tokens; convert the model again")
    return values


def _truth(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    value = metadata.get(PREFIX + key, default)
    if not isinstance(value, bool):
        raise _fault(key, f"must be true or false, found {value!r}")
    return value


def _tokens(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Tokens and their types, without the unused ones that fill the end of the embedding."""
    tokens = _array(metadata, "tokens", (str,))
    types: list[int] = [TokenType.NORMAL] * len(tokens)
    if PREFIX + "token_type" in metadata:
        types = _array(metadata, "token_type", (int,), len(tokens))
    size = len(tokens)
    while size and types[size - 1] == TokenType.UNUSED:
        size -= 1
    tokens, types = tokens[:size], types[:size]
    if len(set(tokens)) + max(0, tokens.count("") - 1) < size:
        first, second = _twins(tokens)
        raise _fault(
            "tokens", f"tokens {first} and {second} are both {tokens[first]!r}; convert the model again"
        )
    return tokens, types


def _twins(tokens: list[str]) -> tuple[int, int]:
    """The ids of the first two tokens that are the same."""
    seen: dict[str, int] = {}
    for id, token in enumerate(tokens):
        if token and token in seen:
            return seen[token], id
        seen[token] = id
    raise AssertionError("no token occurs twice")


def _special_ids(metadata: Mapping[str, Any], size: int, defaults: Mapping[str, int]) -> dict[str, int]:
    ids = {name: id for name, id in defaults.items() if id < size}
    for name, key in SPECIAL_ID_KEYS.items():
        value = metadata.get(PREFIX + key)
        if value is None or value in _NO_TOKEN:
            continue
        total = len(metadata[PREFIX + "tokens"])
        if type(value) is not int or not 0 <= value < total:
            raise _fault(key, f"must be one of the {total} token ids, found {value!r}")
        if value < size:  # some files pad with an unused token, which is no text
            ids[name] = value
    return ids


def _end(special: dict[str, int], name: str, wanted: bool) -> int | None:
    """The token that is put before or after a text, where it is wanted."""
    if wanted and name not in special:
        raise _fault(f"add_{name}", f"is true, but the file has no '{PREFIX}{SPECIAL_ID_KEYS[name]}'")
    return special[name] if wanted else None


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[dict[str, Any], bool]:
    """The parts of tokenizer.json for a byte-level vocabulary, and whether text gets the first token where the file
    does not say."""
    pre = metadata.get(PREFIX + "pre", "default")
    if not isinstance(pre, str) or pre not in SPLITTINGS:
        raise _fault("pre", f"{pre!r} is not known; known are {', '.join(SPLITTINGS)}")
    splitting = SPLITTINGS[pre]
    normalizer = metadata.get(NORMALIZER_KEY, splitting.normalizer)
    if normalizer not in ("none", "NFC"):
        raise CheckpointError(
            f"metadata key '{NORMALIZER_KEY}': {normalizer!r} is not known; none and NFC are"
        )
    model = {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False}
    model |= {"continuing_subword_prefix": None, "end_of_word_suffix": None}
    model |= {"ignore_merges": splitting.ignore_merges, "vocab": ids_of(tokens), "merges": _merges(metadata)}
    body = {
        "normalizer": None if normalizer == "none" else {"type": normalizer},
        "pre_tokenizer": pre_tokenizer(splitting),
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        },
        "model": model,
    }
    return body, splitting.add_bos


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    stored = _array(metadata, "merges", (str,))
    parts = map(str.partition, stored, repeat(" "))
    return [(left, right) if left and space else _cut(left + space + right) for left, space, right in parts]


def _cut(merge: str) -> tuple[str, str]:
    """The two tokens of a merge. They are cut at the first space that is not the first character: a token may begin
    with a space, but none ends before one."""
    cut = merge.find(" ", 1)
    if cut < 0:
        raise _fault("merges", f"{merge!r} is not two tokens with a space between; convert the model again")
    return merge[:cut], merge[cut + 1 :]


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], special: dict[str, int]
) -> dict[str, Any]:
    scores = _array(metadata, "scores", (float, int))[: len(tokens)]
    if len(scores) != len(tokens) or not all(map(math.isfinite, scores)):
        raise _fault(
            "scores", f"must be a finite number for each of {len(tokens)} tokens; convert the model again"
        )
    prefix = _truth(metadata, "add_space_prefix", True)
    unknown = tokens[special["unk_token"]] if "unk_token" in special else None
    escape = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepend = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, escape]},
        "pre_tokenizer": None,
        "decoder": unescaping(prefix),
        "model": bpe_of_scores(tokens, types, scores, unknown),
    }


def _chat_template(metadata: Mapping[str, Any]) -> str | list[dict[str, str]] | None:
    """The chat template, or a list of named ones in the form of tokenizer_config.json, the unnamed one as `default`."""
    key = "tokenizer.chat_template"
    named = {"default": metadata.get(key)}
    named |= {
        name.removeprefix(key + "."): text for name, text in metadata.items() if name.startswith(key + ".")
    }
    templates = [{"name": name, "template": text} for name, text in named.items() if isinstance(text, str)]
    if [entry["name"] for entry in templates] == ["default"]:
        return templates[0]["template"]
    return templates or None
