"""Text <-> token ids, from the tokenizer files of a checkpoint folder.

Owns what a token *is*: its text, its bytes, whether it is special. Knows nothing of streaming,
chat messages or the model that emits the ids. After construction nothing here is mutated except
a per-token cache whose entries are idempotent, so one instance may serve many threads.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Backend

from headlong.errors import CheckpointError, RequestError
from headlong.small_files import read_text
from headlong.text import tokenizer_file
from headlong.text.markup import markup_of
from headlong.text.tokenizer_trial import try_out

MAX_COMPANION_BYTES = 64 << 20
"""The most that tokenizer_config.json or a chat template may have."""

SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

MANY_CHARS = 8
"""Texts with more characters for each token that is allowed are read in part first."""
MIN_PROBE_CHARS = 1 << 14
MANY_IDS = 256
MAX_WHY_CHARS = 200


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's character for each byte: printable bytes stand for themselves, the rest follow U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + rank): byte for rank, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHAR = _byte_alphabet()


class Tokenizer:
    """A checkpoint's tokenizer. `decode` never tidies spaces: the text is what the tokens say."""

    def __init__(
        self, backend: Backend, config: Mapping[str, Any] | None = None, template: str | None = None
    ):
        """Take ownership of `backend`; `config` is the content of tokenizer_config.json."""
        config = config or {}
        # A file may carry the truncation and padding of its training run; prompts must have neither.
        backend.no_truncation()
        backend.no_padding()
        _add_declared_tokens(backend, config.get("added_tokens_decoder") or {})
        backend = _with_markup_as_text(backend)
        self._backend = backend
        self._special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self._added_ids = frozenset(backend.get_added_tokens_decoder())
        self._bytes: dict[int, bytes] = {}

        stages = _decoder_stages(backend)
        kinds = [stage["type"] for stage in stages if stage["type"] != "Fuse"]
        self.is_byte_level = kinds == ["ByteLevel"]
        self._has_byte_fallback = "ByteFallback" in kinds
        self._space_mark = _space_mark(stages)

        self.special_tokens: dict[str, str] = _special_tokens(config)
        self.chat_template: str | None = template or _configured_template(config)
        eos = self.special_tokens.get("eos_token")
        self.eos_token_id: int | None = None if eos is None else backend.token_to_id(eos)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size}, byte_level={self.is_byte_level})"

    @classmethod
    def from_folder(cls, folder: Path, *, apart: bool = False) -> "Tokenizer | None":
        """Read tokenizer.json and its companions; None when the folder has no tokenizer.json. With `apart` the file is
        first built by another process, which can be ended."""
        path = folder / "tokenizer.json"
        if not path.exists():
            return None
        if not path.is_file():
            raise CheckpointError(f"{path}: is no regular file; download it again")
        tokenizer_file.check(path)
        if apart:
            try_out(path)
        try:
            backend = Backend.from_file(str(path))
        except BaseException as error:  # the library raises bare `Exception` for every fault, or panics
            if not is_of_library(error):
                raise
            raise CheckpointError(f"{path}: not a readable tokenizer ({error}); download it again") from error
        config, template = read_companions(folder)
        try:
            return cls(backend, config, template)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            path = folder / "tokenizer_config.json"
            raise CheckpointError(f"{path}: an entry is malformed ({error!r}); download it again") from error

    def encode(self, text: str, add_special_tokens: bool = True, *, most: int | None = None) -> list[int]:
        """Ids of `text`. Special tokens written out in the text are recognised either way;
        `add_special_tokens` is only about those the tokenizer puts around it (BOS and the like). Other threads run
        meanwhile. A text of more than `most` tokens is refused, and a much longer one is not read to its end."""
        size = max(MIN_PROBE_CHARS, MANY_CHARS * (most or 0))
        while most is not None and size < len(text):
            # What is cut in two at the end of a part changes few tokens, never half of them.
            if len(self._encoding(text[:size], False)) > 2 * most:
                raise _too_long(most)
            size *= 4
        encoding = self._encoding(text, add_special_tokens)
        if most is not None and len(encoding) > most:
            raise _too_long(most)
        return encoding.ids

    def _encoding(self, text: str, add_special_tokens: bool) -> Encoding:
        try:
            # The library lets go of the interpreter's lock for batches alone.
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except (TypeError, UnicodeEncodeError) as error:
            raise RequestError(
                "prompt: must be a string of valid Unicode; remove lone surrogates (\\ud800 to \\udfff)"
            ) from error
        except BaseException as error:
            raise _failure(error, "prompt") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; broken UTF-8 becomes U+FFFD and ids outside the vocabulary add nothing. Other threads run
        meanwhile where there are many."""
        if len(ids) < MANY_IDS:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes that one token adds to a text; b"" for an id outside the vocabulary.

        On a byte-level vocabulary these are the decoder's own bytes for every token, so that their
        concatenation is always what `decode` reads.
        """
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._compute_bytes(token_id)
        return found

    def token_text(self, token_id: int) -> str:
        """Text of one token alone; U+FFFD where it holds only a part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        """Whether `decode` leaves this token out when it skips special tokens."""
        return token_id in self._special_ids

    def is_known(self, token_id: int) -> bool:
        """Whether the vocabulary has this id; a model's padded embedding can emit others."""
        return self._backend.id_to_token(token_id) is not None

    def token_id(self, token: str) -> int | None:
        """The id of an added token by its content; None if there is none."""
        found = self._backend.token_to_id(token)
        return found if found in self._added_ids else None

    def is_byte_piece(self, token_id: int) -> bool:
        """Whether this is a `<0xAB>` token, whose text depends on the run of such tokens around it."""
        return self._has_byte_fallback and _fallback_byte(self._backend.id_to_token(token_id)) is not None

    @cached_property
    def fingerprint(self) -> str:
        """A hash that two tokenizers share if they encode text alike."""
        return hashlib.sha256(self._backend.to_str().encode()).hexdigest()

    @property
    def structural_ids(self) -> frozenset[int]:
        """Tokens that end an answer or give it its structure: what the chat template writes, and markup."""
        added, template = self._backend.get_added_tokens_decoder(), self.chat_template or ""
        markup = markup_of(token.content for token in added.values())
        found = {i for i, token in added.items() if token.content in markup or token.content in template}
        return frozenset(found if self.eos_token_id is None else {*found, self.eos_token_id})

    def _compute_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            try:
                return bytes([_BYTE_OF_CHAR[char] for char in token])
            except KeyError:  # an added token written in ordinary characters
                return token.encode()
        if token_id in self._added_ids:
            return token.encode()
        if self._has_byte_fallback and (byte := _fallback_byte(token)) is not None:
            return bytes([byte])
        return (token.replace(self._space_mark, " ") if self._space_mark else token).encode()


def _too_long(most: int) -> RequestError:
    return RequestError(f"prompt has more than {most} tokens; send less")


def _failure(error: BaseException, field: str) -> BaseException:
    """What to raise for an error of the library: a panic of its own, which is no `Exception`, concerns one text."""
    if not is_of_library(error):
        return error
    return RequestError(f"{field}: this model's tokenizer cannot read it ({str(error)[:MAX_WHY_CHARS]})")


def is_of_library(error: BaseException) -> bool:
    """Whether the `tokenizers` library may have raised it: bare `Exception` for every fault, or a panic."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _fallback_byte(token: str | None) -> int | None:
    if token is None or len(token) != 6 or not (token.startswith("<0x") and token.endswith(">")):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


def _decoder_stages(backend: Backend) -> list[dict[str, Any]]:
    """The decoder as a flat list of its stages, in the form tokenizer.json has them."""
    decoder: Any = backend.decoder
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _space_mark(stages: list[dict[str, Any]]) -> str | None:
    """The character that stands for a space in the vocabulary (SentencePiece's U+2581), if any."""
    for stage in stages:
        if stage["type"] == "Metaspace":
            return stage["replacement"]
        if stage["type"] == "Replace" and stage["content"] == " ":
            return stage["pattern"].get("String")
    return None


def _add_declared_tokens(backend: Backend, declared: Mapping[str, Any]) -> None:
    """Add the tokens that only tokenizer_config.json lists, in id order so that new ones get their id."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for _, entry in sorted(declared.items(), key=lambda item: int(item[0])):
        if entry["content"] not in known:
            backend.add_tokens([AddedToken(entry["content"], **{k: entry[k] for k in flags if k in entry})])


def _with_markup_as_text(backend: Backend) -> Backend:
    """The library keeps a token's first kind for ever, so the tokens are added to a new tokenizer of the same parts."""
    added = sorted(backend.get_added_tokens_decoder().items())
    markup = markup_of(token.content for _, token in added)
    if not any(token.special and token.content in markup for _, token in added):
        return backend
    other = Backend(backend.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (own := getattr(backend, part)) is not None:
            setattr(other, part, own)
    for _, token in added:
        token.special = token.special and token.content not in markup
    other.add_tokens([token for _, token in added])
    return other


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _configured_template(config: Mapping[str, Any]) -> str | None:
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, Mapping):
        template = template.get("default")
    return template if isinstance(template, str) else None


def read_companions(folder: Path) -> tuple[dict[str, Any], str | None]:
    """What tokenizer_config.json says, and the chat template that lies in a file of its own."""
    jinja = folder / "chat_template.jinja"
    return read_config(folder / "tokenizer_config.json"), _read_text(jinja) if jinja.exists() else None


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in a file of the tokenizer's; an empty one where the file is missing."""
    if not path.exists():
        return {}
    try:
        config = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); download it again") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: must hold a JSON object; download it again")
    return config


def _read_text(path: Path) -> str:
    try:
        return read_text(path, MAX_COMPANION_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read as UTF-8 text ({error}); download it again") from error
