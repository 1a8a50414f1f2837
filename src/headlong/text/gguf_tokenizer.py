"""Tokenizers to and from the metadata of GGUF files: built, written as tokenizer.json, and made of one.

How a vocabulary is read is in `gguf_vocabulary.py`, how its text is split in `gguf_splitting.py`. Here is also the
way back, for byte-level BPE. A GGUF file has no place for how added tokens treat white space nor for a normalizer; the
first is lost, the second is kept under a key of our own that other readers pass over. Knows nothing of the container.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from headlong.errors import CheckpointError
from headlong.text.gguf_splitting import SPLITTINGS, recognise
from headlong.text.gguf_vocabulary import NORMALIZER_KEY, PREFIX, SPECIAL_ID_KEYS, tokenizer_files
from headlong.text.pieces import TokenType, backend_of
from headlong.text.tokenizer import Tokenizer, is_of_library


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer of a GGUF file; None when it has none."""
    if metadata.get(PREFIX + "model") in (None, "none", "no_vocab"):
        return None
    whole, config = tokenizer_files(metadata)
    return Tokenizer(_backend(whole), config)


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """Write the tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json."""
    whole, config = tokenizer_files(metadata)
    _backend(whole)
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, content in (("tokenizer.json", whole), ("tokenizer_config.json", config)):
        text = json.dumps(content, ensure_ascii=False, indent=2)
        (folder / name).write_text(text + "\n", encoding="utf-8")


def _backend(whole: dict[str, Any]) -> Backend:
    try:
        return backend_of(whole)
    except BaseException as error:  # the library raises bare `Exception` for every fault, or panics
        if not is_of_library(error):
            raise
        raise CheckpointError(
            f"metadata keys '{PREFIX}*' make no tokenizer ({error}); convert the model again"
        ) from error


def gguf_tokenizer_fields(
    tokenizer_json: dict[str, Any],
    tokenizer_config: dict[str, Any],
    vocab_size: int,
    model_pre: str | None = None,
) -> dict[str, Any]:
    """The metadata for a byte-level BPE tokenizer, given as its two files.

    `vocab_size` is the number of rows of the model's embedding; the vocabulary is filled up to it. `model_pre` is the
    name of the splitting, where the files' own is not to be recognised.
    """
    try:
        return _fields(tokenizer_json, tokenizer_config, vocab_size, model_pre)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"tokenizer.json: an entry is missing or malformed ({error!r}); download it again"
        ) from error


def _fields(
    tokenizer_json: dict[str, Any], config: dict[str, Any], vocab_size: int, pre: str | None
) -> dict[str, Any]:
    model, decoder = tokenizer_json["model"], tokenizer_json.get("decoder") or {}
    if model.get("type") != "BPE" or decoder.get("type") != "ByteLevel":
        raise CheckpointError("tokenizer.json: only byte-level BPE can be written to a GGUF file")
    if pre is not None and pre not in SPLITTINGS:
        raise CheckpointError(f"{PREFIX}pre {pre!r} is not known; known are {', '.join(SPLITTINGS)}")
    if pre is None:
        pre = recognise(tokenizer_json.get("pre_tokenizer") or {}, bool(model.get("ignore_merges")))
        if pre is None:
            raise CheckpointError(
                "tokenizer.json: its pre_tokenizer splits text in a way that no GGUF name stands for; "
                f"known are {', '.join(SPLITTINGS)}"
            )
    tokens, types = _tokens(tokenizer_json, config, vocab_size)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    special = _special_ids(config, tokens)
    return {
        PREFIX + "model": "gpt2",
        PREFIX + "pre": pre,
        PREFIX + "tokens": tokens,
        PREFIX + "token_type": types,
        PREFIX + "merges": merges,
        **{PREFIX + SPECIAL_ID_KEYS[name]: id for name, id in special.items()},
        **_ends(tokenizer_json.get("post_processor"), config),
        **_chat_templates(config.get("chat_template")),
        **_normalizer(tokenizer_json.get("normalizer"), SPLITTINGS[pre].normalizer),
    }


def _tokens(
    tokenizer_json: dict[str, Any], config: dict[str, Any], vocab_size: int
) -> tuple[list[str], list[int]]:
    """All tokens by id with their types, those that only tokenizer_config.json lists among them."""
    by_id = {id: (token, TokenType.NORMAL) for token, id in tokenizer_json["model"]["vocab"].items()}
    known = {entry["content"] for entry in tokenizer_json["added_tokens"]} | tokenizer_json["model"][
        "vocab"
    ].keys()
    declared = config.get("added_tokens_decoder") or {}
    added = [(entry["id"], entry) for entry in tokenizer_json["added_tokens"]]
    added += [(int(id), entry) for id, entry in declared.items() if entry["content"] not in known]
    for id, entry in added:
        by_id[id] = entry["content"], TokenType.CONTROL if entry.get("special") else TokenType.USER_DEFINED
    if max(by_id) >= vocab_size:
        raise CheckpointError(
            f"tokenizer.json: token {max(by_id)} is outside the model's vocabulary of {vocab_size}"
        )
    rows = [by_id.get(id, (f"[PAD{id}]", TokenType.UNUSED)) for id in range(vocab_size)]
    return [token for token, _ in rows], [int(kind) for _, kind in rows]


def _special_ids(config: dict[str, Any], tokens: list[str]) -> dict[str, int]:
    ids: dict[str, int] = {}
    for name in SPECIAL_ID_KEYS:
        token = config.get(name)
        token = token["content"] if isinstance(token, dict) else token
        if token is None:
            continue
        if token not in tokens:
            raise CheckpointError(f"tokenizer_config.json: {name} {token!r} is not a token of tokenizer.json")
        ids[name] = tokens.index(token)
    return ids


def _ends(post_processor: dict[str, Any] | None, config: dict[str, Any]) -> dict[str, bool]:
    """Whether the first and last token are put around a text; only these two can be."""
    stages = [post_processor] if post_processor else []
    if post_processor and post_processor["type"] == "Sequence":
        stages = post_processor["processors"]
    fields = {PREFIX + "add_bos_token": False, PREFIX + "add_eos_token": False}
    for stage in stages:
        if stage["type"] == "ByteLevel":  # of offsets only
            continue
        if stage["type"] != "TemplateProcessing":
            raise CheckpointError(
                f"tokenizer.json: a GGUF file cannot say what {stage['type']} does to a text"
            )
        pieces = [piece.get("SpecialToken", {}).get("id") for piece in stage["single"]]
        at = pieces.index(None)
        for name, found in (("bos", pieces[:at]), ("eos", pieces[at + 1 :])):
            token = config.get(f"{name}_token")
            if found and found != [token["content"] if isinstance(token, dict) else token]:
                raise CheckpointError(
                    f"tokenizer.json: puts {found} around a text, which is not the {name}_token"
                )
            fields[f"{PREFIX}add_{name}_token"] = bool(found)
    return fields


def _chat_templates(template: Any) -> dict[str, Any]:
    """The unnamed template under the plain key, each named one under its name."""
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    named = template if isinstance(template, dict) else {"default": template}
    key = "tokenizer.chat_template"
    fields: dict[str, Any] = {f"{key}.{name}": text for name, text in named.items() if name != "default"}
    if fields:
        fields["tokenizer.chat_templates"] = [name for name in named if name != "default"]
    return fields if named.get("default") is None else {key: named["default"], **fields}


def _normalizer(normalizer: dict[str, Any] | None, usual: str) -> dict[str, str]:
    """Named only where it is not the usual one of its `pre`."""
    name = "none" if normalizer is None else normalizer["type"]
    if name not in ("none", "NFC"):
        raise CheckpointError(f"tokenizer.json: a GGUF file cannot say what the normalizer {name} does")
    return {} if name == usual else {NORMALIZER_KEY: name}
