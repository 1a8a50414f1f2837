"""The tokenizer of a folder that has a SentencePiece model (`tokenizer.model`) and no tokenizer.json.

A text without special tokens becomes the ids that SentencePiece gives it. Special tokens written in a text are found
first, as `transformers` does: with `legacy` in tokenizer_config.json every part between them gets SentencePiece's space
in front, else only the beginning of the text.
"""

import hashlib
import logging
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Encoding, normalizers
from tokenizers import Tokenizer as Backend

from headlong.errors import CheckpointError
from headlong.text.charsmap import Charsmap
from headlong.text.pieces import SPACE, added_tokens, around, backend_of, bpe_of_scores, unescaping
from headlong.text.sentencepiece_model import UNIGRAM, SentencePieceModel, read_model
from headlong.text.tokenizer import SPECIAL_NAMES, Tokenizer, is_of_library, read_companions, read_config

log = logging.getLogger(__name__)
FILE = "tokenizer.model"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_BYTE = r"<(?=0x[0-9A-F]{2}>)"
"""Where a text looks like the name of a byte, which is no piece that a text can have."""


class SentencePieceTokenizer(Tokenizer):
    """Puts the first space before a text itself: the library would leave it out where a text begins with one. Replaces
    characters itself, too, since the library looks at clusters of them."""

    _begin: re.Pattern[str] | None = None
    _charsmap = b""

    def replace_characters(self, compiled: bytes) -> None:
        """Replaces characters by this table before what the library does to a text."""
        first = normalizers.Normalizer.custom(Charsmap(compiled))
        self._charsmap, self._rest = compiled, self._backend.normalizer
        self._backend.normalizer = normalizers.Sequence([first, self._rest])

    @cached_property
    def fingerprint(self) -> str:
        if not self._charsmap:
            return super().fingerprint
        # The library cannot write down a step that is not its own.
        written = Backend(self._backend.model)
        written.normalizer = self._rest
        written.pre_tokenizer, written.post_processor = (
            self._backend.pre_tokenizer,
            self._backend.post_processor,
        )
        written.add_tokens([token for _, token in sorted(self._backend.get_added_tokens_decoder().items())])
        return hashlib.sha256(written.to_str().encode() + self._charsmap).hexdigest()

    def begin_with_space(self) -> None:
        """Puts a space before every text that does not begin with a special token."""
        contents = {token.content for token in self._backend.get_added_tokens_decoder().values()}
        others = "|".join(map(re.escape, sorted(contents)))
        self._begin = re.compile(f"(?!{others})(?s:.)" if others else "(?s:.)")

    def _encoding(self, text: str, add_special_tokens: bool) -> Encoding:
        if self._begin is not None and isinstance(text, str) and self._begin.match(text):
            text = f" {text}"
        return super()._encoding(text, add_special_tokens)


def tokenizer_from_sentencepiece(folder: Path) -> Tokenizer | None:
    """None when the folder has no such model."""
    path = folder / FILE
    if not path.exists():
        return None
    model = read_model(path)
    config, template = read_companions(folder)
    try:
        config = _with_names(model, _with_older_files(folder, config))
        prefix = model.add_dummy_prefix and config.get("add_prefix_space") is not False
        everywhere = prefix and config.get("legacy") is True
        found = SentencePieceTokenizer(backend_of(_body(model, config, prefix, everywhere)), config, template)
        if model.charsmap:
            found.replace_characters(model.charsmap)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    except BaseException as error:  # the library raises bare `Exception` for every fault, or panics
        if not is_of_library(error):
            raise
        raise CheckpointError(
            f"{path} and the files beside it make no tokenizer ({error!r}); download them again"
        ) from error
    if model.model_type == UNIGRAM:
        log.warning(
            "%s: a unigram model: of two equally likely ways to cut a text SentencePiece, rounding, may take the other",
            path,
        )
    if prefix and not everywhere:
        found.begin_with_space()
    return found


def _with_older_files(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """What special_tokens_map.json and added_tokens.json say, where tokenizer_config.json does not."""
    config = read_config(folder / "special_tokens_map.json") | config
    if "added_tokens_decoder" in config:
        return config
    special = {_content(config.get(name)) for name in SPECIAL_NAMES}
    special |= set(map(_content, config.get("additional_special_tokens") or ()))
    declared = {
        str(id): {"content": token, "special": token in special, "normalized": False}
        for token, id in read_config(folder / "added_tokens.json").items()
    }
    return config | {"added_tokens_decoder": declared}


def _with_names(model: SentencePieceModel, config: dict[str, Any]) -> dict[str, Any]:
    own = {"bos_token": model.bos_id, "eos_token": model.eos_id, "pad_token": model.pad_id}
    named = {name: model.tokens[id] for name, id in own.items() if id >= 0}
    return (
        named | {"unk_token": model.tokens[model.unk_id]} | {k: v for k, v in config.items() if v is not None}
    )


def _content(token: Any) -> str | None:
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) else None


def _body(
    model: SentencePieceModel, config: Mapping[str, Any], prefix: bool, everywhere: bool
) -> dict[str, Any]:
    added = _added(model, config)
    ids = {token["content"]: token["id"] for token in added}
    bytes_apart = model.model_type == UNIGRAM and model.byte_fallback
    split = {"type": "Split", "pattern": {"Regex": _BYTE}, "behavior": "Isolated", "invert": False}
    ends = [
        _end(config, ids, f"{name}_token", config.get(f"add_{name}_token", default))
        for name, default in (("bos", "bos_token" in config), ("eos", False))
    ]
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": _normalizers(model, prefix, everywhere)},
        "pre_tokenizer": split if bytes_apart else None,
        "post_processor": around({id: token for token, id in ids.items()}, *ends),
        "decoder": unescaping(prefix),
        "model": _model(model),
    }


def _added(model: SentencePieceModel, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The model's own special tokens and those that files beside it add, in the order of their ids."""
    names = set(map(_content, map(config.get, SPECIAL_NAMES)))
    own = {id for id, token in enumerate(model.tokens) if token in names}
    # What holds the sign of a space is left to the model: a text has no such sign yet where tokens are found in it.
    found = {
        entry["id"]: entry
        for entry in added_tokens(model.tokens, model.types, own)
        if SPACE not in entry["content"]
    }
    size = len(model.tokens)
    for key, entry in sorted(config["added_tokens_decoder"].items(), key=lambda item: int(item[0])):
        id, content = int(key), entry["content"]
        if not 0 <= id <= size or (id < len(model.tokens) and model.tokens[id] != content):
            raise CheckpointError(
                f"the added token {content!r} cannot have the id {id}: tokenizer.model has {len(model.tokens)} pieces"
                + (f", of which that is {model.tokens[id]!r}" if 0 <= id < len(model.tokens) else "")
            )
        size = max(size, id + 1)
        found[id] = {"id": id, "content": content, **{name: entry[name] for name in _FLAGS if name in entry}}
    return [found[id] for id in sorted(found)]


def _end(config: Mapping[str, Any], ids: Mapping[str, int], name: str, wanted: bool) -> int | None:
    """The token that is put before or after a text, where it is wanted."""
    token = _content(config.get(name))
    if wanted and token not in ids:
        raise CheckpointError(
            f"tokenizer_config.json: add_{name} is true, but {name} {token!r} is no special token"
        )
    return ids[token] if wanted and token is not None else None


def _normalizers(model: SentencePieceModel, prefix: bool, everywhere: bool) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    if model.remove_extra_whitespaces:
        steps.append(_replaced({"Regex": " {2,}"}, " "))
        if everywhere or not prefix:
            steps.append(_replaced({"Regex": r"\A "}, ""))
    steps.append(_replaced({"String": " "}, SPACE))
    if model.remove_extra_whitespaces:
        steps.append(_replaced({"Regex": rf"{SPACE}+\z"}, ""))
    return [*steps, {"type": "Prepend", "prepend": SPACE}] if everywhere else steps


def _replaced(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _model(model: SentencePieceModel) -> dict[str, Any]:
    if model.model_type == UNIGRAM:
        vocabulary = list(zip(model.tokens, model.scores, strict=True))
        return {
            "type": "Unigram",
            "vocab": vocabulary,
            "unk_id": model.unk_id,
            "byte_fallback": model.byte_fallback,
        }
    unknown = model.tokens[model.unk_id]
    return bpe_of_scores(model.tokens, model.types, model.scores, unknown, model.byte_fallback)
