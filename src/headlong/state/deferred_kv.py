"""Pairs (target hidden, next token) whose keys and values the head has yet to write, by the page they belong on.

Pages may be offered to others without them: whoever is about to draft over such a page has them written first. Most
pages are never drafted over again, and cost nothing. Knows no head.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

ROOM = 64 << 20
"""Bytes of hidden states in host memory whose pairs may be deferred; further pairs are written at once. On other
devices all are written at once: memory is dearer there, and writing cheaper."""


class OnPage(NamedTuple):
    """Pairs at positions `start`, `start` + 1, … of a sequence, all on one page."""

    page: int
    start: int
    hidden_ND: Tensor
    tokens_N: Tensor

    @property
    def num_pairs(self) -> int:
        return self.tokens_N.shape[0]


class DeferredKv:
    """The deferred pairs of one state, by page."""

    def __init__(self, limit: int) -> None:
        """`limit` is the largest number of pairs that may be kept, of all pages."""
        self._limit = limit
        self._pieces: dict[int, tuple[OnPage, ...]] = {}
        self.num_pairs = 0

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def add(self, pieces: Sequence[OnPage]) -> bool:
        """Keeps copies of the pairs; False, and no change, if there would be more than the limit."""
        if self.num_pairs + sum(piece.num_pairs for piece in pieces) > self._limit:
            return False
        for piece in pieces:
            # Their tensors may be parts of much larger ones.
            own = piece._replace(hidden_ND=piece.hidden_ND.clone(), tokens_N=piece.tokens_N.clone())
            self._put(piece.page, (*self._pieces.get(piece.page, ()), own))
        return True

    def on(self, pages: Iterable[int]) -> list[OnPage]:
        """The pairs that these pages lack, in the order in which they were added."""
        return [piece for page in dict.fromkeys(pages) for piece in self._pieces.get(page, ())]

    def drop(self, pages: Iterable[int]) -> None:
        """Forgets the pairs of these pages: they were written, or the pages are to hold something else."""
        if self._pieces:
            for page in pages:
                self._put(page, ())

    def copy(self, page: int, to: int) -> None:
        """Notes that the one page was copied to the other, which now lacks the same pairs."""
        self._put(to, tuple(piece._replace(page=to) for piece in self._pieces.get(page, ())))

    def check(self, page_size: int) -> None:
        assert self.num_pairs == sum(piece.num_pairs for own in self._pieces.values() for piece in own)
        for page, own in self._pieces.items():
            for piece in own:
                assert piece.page == page and piece.num_pairs == piece.hidden_ND.shape[0] > 0
                assert piece.start % page_size + piece.num_pairs <= page_size, (
                    f"page {page} lacks too many pairs"
                )

    def _put(self, page: int, pieces: tuple[OnPage, ...]) -> None:
        before = self._pieces.pop(page, ())
        if pieces:
            self._pieces[page] = pieces
        self.num_pairs += sum(piece.num_pairs for piece in pieces) - sum(piece.num_pairs for piece in before)
