"""Writes an answer as it comes, with the tokens that were drafted and accepted tinted on request.

A chunk's text is final but not cut by token; this finds the cuts again. Knows chunks and a tokenizer, no
engine.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from headlong.printable import printable_answer

if TYPE_CHECKING:
    from headlong.completion import Chunk
    from headlong.text.tokenizer import Tokenizer

TINT, UNTINT = "\x1b[32m", "\x1b[39m"


class Provenance:
    """Cuts each chunk's text into pieces and says of each whether it came from the head.

    The pieces of a chunk always join to its text: only their lengths are counted here. A character that
    several tokens share belongs to the one that completed it.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        from headlong.text.stream import Detokenizer

        self._detokenizer = Detokenizer(tokenizer)
        self._pending: deque[tuple[int, bool]] = deque()
        """(characters, drafted) decoded but not yet in any chunk: text is held while it may become a stop."""

    def pieces(self, chunk: "Chunk") -> Iterator[tuple[str, bool]]:
        for token, drafted in zip(chunk.token_ids, chunk.from_draft, strict=True):
            if text := self._detokenizer.push((token,)):
                self._pending.append((len(text), drafted))
        at = 0
        while at < len(chunk.text):
            # Past the last token lies only what the end of the text released, such as an unfinished character.
            count, drafted = self._pending.popleft() if self._pending else (len(chunk.text) - at, False)
            room = len(chunk.text) - at
            if count > room:
                self._pending.appendleft((count - room, drafted))
                count = room
            yield chunk.text[at : at + count], drafted
            at += count


class AnswerWriter:
    """Streams one answer to stdout: as it is into a pipe or a file, with control characters escaped on a terminal."""

    def __init__(self, tokenizer: "Tokenizer | None", tint: bool) -> None:
        self._provenance = Provenance(tokenizer) if tint and tokenizer is not None else None
        self._parts: list[str] = []
        self._shown: Callable[[str], str] = printable_answer if sys.stdout.isatty() else str

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def write(self, chunk: "Chunk") -> None:
        self._parts.append(chunk.text)
        if self._provenance is None:
            sys.stdout.write(self._shown(chunk.text))
        else:
            for piece, drafted in self._provenance.pieces(chunk):
                text = self._shown(piece)
                sys.stdout.write(f"{TINT}{text}{UNTINT}" if drafted else text)
        sys.stdout.flush()

    def end(self) -> None:
        """Leaves the cursor at the start of a line."""
        if not self._parts or not self.text.endswith("\n"):
            sys.stdout.write("\n")
        sys.stdout.flush()
