"""The tokens of one model as pieces of text, and a marker that is searched for among them. Knows no grammar."""

from functools import cached_property

import numpy as np

from headlong.text.tokenizer import Tokenizer


class Vocabulary:
    """What each token id of the model adds to a text. The model's embedding may have more rows than the tokenizer
    has tokens; those add nothing and no grammar allows them."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int, eos_ids: frozenset[int]) -> None:
        self.eos_ids = eos_ids
        self.eos_token_id = min(eos_ids)
        self.tokens = [tokenizer.token_bytes(token) for token in range(size)]
        # An end-of-sequence token that were plain text would be allowed inside a string, and end the row there.
        self.special_token_ids = sorted(
            {token for token in range(size) if tokenizer.is_special(token)} | eos_ids
        )
        self.special = frozenset(self.special_token_ids)
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """Tokenizes `text`. The grammar library calls the vocabulary for this."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    @cached_property
    def _of_bytes(self) -> dict[bytes, int]:
        return {
            text: token
            for token, text in enumerate(self.tokens)
            if len(text) == 1 and token not in self.special
        }

    def in_bytes(self, token: int) -> tuple[int, ...]:
        """Tokens of one byte each that add the same to a text; the token alone where there are no such."""
        if token in self.special:
            return (token,)
        found = [self._of_bytes.get(bytes([byte])) for byte in self.tokens[token]]
        return tuple(one for one in found if one is not None) if found and None not in found else (token,)

    @cached_property
    def blank(self) -> frozenset[int]:
        """The tokens that consist of white space alone."""
        return frozenset(
            token for token, text in enumerate(self.tokens) if text.isspace() and token not in self.special
        )

    @cached_property
    def blank_mask(self) -> np.ndarray:
        return np.frombuffer(self.pack(self.blank), dtype=np.uint8)

    def pack(self, tokens: frozenset[int]) -> bytes:
        """One bit per token, lowest bit first, as the library's masks have them."""
        bits = np.zeros(len(self.tokens), dtype=np.uint8)
        bits[list(tokens)] = 1
        return np.packbits(bits, bitorder="little").tobytes()


class Marker:
    """A text that is searched for in the output, however the tokens cut it."""

    def __init__(self, text: bytes, vocabulary: Vocabulary) -> None:
        self.blank, self.blank_mask = vocabulary.blank, vocabulary.blank_mask
        """The white-space tokens that may follow the marker. They are computed here, since computing them for a large
        vocabulary inside a step would stall it."""
        self._text = text
        self._vocabulary = vocabulary
        self._borders = _borders(text)
        rests = tuple(text[start:] for start in range(1, len(text)))
        self._finishing = [
            token
            for token, piece in enumerate(vocabulary.tokens)
            if (text in piece or piece.startswith(rests)) and token not in vocabulary.special
        ]
        """The tokens that can complete the marker."""
        self._masks: dict[int, bytes | None] = {}

    def read(self, matched: int, token: int) -> tuple[int, bytes | None]:
        """How many bytes of the marker the output ends with after `token`, and once it is complete what the token
        says beyond it. Special tokens are no text; one whose name is the marker is the marker."""
        piece = self._vocabulary.tokens[token]
        if token in self._vocabulary.special:
            return (len(piece), b"") if piece == self._text else (matched, None)
        text, borders = self._text, self._borders
        for place, byte in enumerate(piece):
            while matched and byte != text[matched]:
                matched = borders[matched - 1]
            matched += byte == text[matched]
            if matched == len(text):
                return matched, piece[place + 1 :]
        return matched, None

    def mask(self, matched: int) -> bytes | None:
        """All tokens but those that complete the marker and say more, which the grammar would not see from its
        first byte; None if there are none."""
        if matched not in self._masks:
            past = frozenset(t for t in self._finishing if says_more(self.read(matched, t)[1]))
            refused = np.frombuffer(self._vocabulary.pack(past), dtype=np.uint8)
            self._masks[matched] = (~refused).tobytes() if past else None
        return self._masks[matched]


def says_more(rest: bytes | None) -> bool:
    return bool(rest) and not rest.isspace()


def _borders(text: bytes) -> list[int]:
    """Knuth-Morris-Pratt: of each prefix, the longest proper prefix that is also its suffix."""
    borders, length = [0] * len(text), 0
    for place in range(1, len(text)):
        while length and text[place] != text[length]:
            length = borders[length - 1]
        length += text[place] == text[length]
        borders[place] = length
    return borders
