"""How a SentencePiece model replaces characters before all else (`precompiled_charsmap`): the longest of its keys that
a text goes on with, again and again. Knows no tokens.

The `tokenizers` library has the same table, but looks at clusters of characters and at the shortest key in each, so
that what follows a replaced character in its cluster is lost.

The table is the number of bytes of a trie, the trie, and the replacements, each ended by a zero. The trie is a double
array of 32-bit units. A unit has the byte that leads to it, the distance to its children, and whether a key ends there;
the child by byte 0 of such a unit has the place of the replacement.
"""

import re
import struct
import sys
from array import array
from functools import cached_property

from tokenizers import NormalizedString, Regex

MAX_KEY_BYTES = 256
"""Keys are not followed further: those of real tables are of a few characters."""
_IS_LEAF, _IS_FAR = 1 << 8, 1 << 9
_LABEL, _VALUE = (1 << 31) | 0xFF, (1 << 31) - 1
_WHOLE = Regex(r"\A[\s\S]+\z")


class Charsmap:
    """The table of one model. Raises `ValueError` for bytes that are none."""

    def __init__(self, compiled: bytes) -> None:
        if len(compiled) < 4:
            raise ValueError("its table of characters is cut short")
        (size,) = struct.unpack_from("<I", compiled)
        if size % 4 or not 0 < size <= len(compiled) - 4:
            raise ValueError("its table of characters is cut short")
        self._units = array("I", compiled[4 : 4 + size])
        if sys.byteorder == "big":
            self._units.byteswap()
        self._replacements = compiled[4 + size :]

    def replaced(self, text: str) -> str:
        """The text with the longest key at each place replaced; characters without any stay."""
        stored, parts, done = text.encode(), [], 0
        for match in self._starts.finditer(stored):
            if match.start() < done:
                continue
            length, replacement = self._longest(stored, match.start())
            if length:
                parts += [stored[done : match.start()], replacement]
                done = match.start() + length
        return b"".join([*parts, stored[done:]]).decode("utf-8", "replace") if parts else text

    def normalize(self, normalized: NormalizedString) -> None:
        """The same, as a step of the library's. What is raised here the library swallows, so nothing is."""
        text = normalized.normalized
        if (other := self.replaced(text)) != text:
            normalized.replace(_WHOLE, other)

    @cached_property
    def _starts(self) -> re.Pattern[bytes]:
        """Characters whose first byte some key begins with."""
        first = b"".join(
            re.escape(bytes([byte]))
            for byte in range(1, 256)
            if self._child(self._child_base(0), byte) is not None
        )
        return re.compile(b"[" + first + b"]" if first else b"(?!)")

    def _longest(self, stored: bytes, start: int) -> tuple[int, bytes]:
        """The length of the longest key there and what it becomes; 0 where there is none."""
        length, place, base = 0, 0, self._child_base(0)
        for at in range(start, min(start + MAX_KEY_BYTES, len(stored))):
            unit = self._child(base, stored[at])
            if unit is None:
                break
            base = self._child_base(unit)
            if self._units[unit] & _IS_LEAF and base < len(self._units):
                length, place = at + 1 - start, self._units[base] & _VALUE
        if not length:
            return 0, b""
        end = self._replacements.find(b"\0", place)
        return length, self._replacements[place : end if end >= 0 else None]

    def _child_base(self, unit: int) -> int:
        """Where the children of a unit begin, each as far from there as its byte says."""
        found = self._units[unit]
        return unit ^ ((found >> 10) << (8 if found & _IS_FAR else 0))

    def _child(self, base: int, byte: int) -> int | None:
        unit = base ^ byte
        return unit if unit < len(self._units) and self._units[unit] & _LABEL == byte else None
