"""A row's constraint by a grammar whose masks may take long: others wait for them a moment and no longer.

What a grammar needs is computed by other threads. Whether that takes long is seen by waiting: a step waits for a few
milliseconds, and goes on without the row, or with fewer of its drafts, if there is no answer by then. A row has a bound
on what all of it may take. Knows paths through grammars; no model and no sampling.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from headlong.text.constraint import MAX_MASK_SECONDS, MAX_READING_SECONDS, GrammarPath

MAX_ROW_SECONDS = 30.0
"""The processor time that all slow masks of a row may take."""
_aside = ThreadPoolExecutor(1, "headlong-masks")
"""Makes masks of rows that are known to be slow one after the other, so that they take no more than one processor from
the model."""
_tries = ThreadPoolExecutor(4, "headlong-mask-tries")
"""Makes masks that are hardly ever slow."""


class GrammarConstraint:
    """One row's output under a grammar. While another thread is at work on the path, what is known may be read, and
    tokens that were emitted meanwhile are followed later."""

    def __init__(self, path: GrammarPath, *, plain: bool) -> None:
        """`plain` grammars take no time, and no other thread."""
        self._path = path
        self._plain = plain
        self._work: Future[list[bytes | None]] | None = None
        self._begun = 0.0
        self._unread: list[int] = []
        """Tokens that were emitted and are still to be followed."""
        self.failure: str | None = None

    @property
    def slow(self) -> bool:
        return self._path.slow

    @property
    def grace(self) -> float:
        """How much longer others may wait for what is under way, in seconds."""
        if self._work is None or self._path.slow:
            return 0.0
        return max(0.0, self._begun + MAX_MASK_SECONDS - time.monotonic())

    def ready(self, seconds: float = 0.0) -> bool:
        if not self._is_done(seconds):
            return False
        if self.failure or (not self._unread and (self._path.at_once or (self._plain and not self.slow))):
            return True
        self._start([], 0, 1)
        return self._is_done(seconds)

    def foresee(self, drafts: Sequence[int]) -> int:
        if self._is_done(self.grace):
            if self._plain or self.failure or len(self._path.known(drafts)) > len(drafts):
                return len(drafts)
            self._start(drafts, 0, len(drafts) + 1)
            if self._is_done(self.grace):
                return len(drafts)
        return max(0, len(self._path.known(drafts)) - 1)

    def advance(self, tokens: Sequence[int]) -> int:
        is_free = self._is_done(0.0) and not self._unread
        if self.failure is not None:
            return 0
        late = not self._plain and (self.slow or self._path.is_long(tokens))
        if not is_free or (late and not self._path.has_read(tokens)):
            self._unread += tokens
            return len(tokens)
        count = self._path.advance(tokens)
        self.failure = self._path.failure or self._too_slow()
        return count

    def masks(
        self, drafts: Sequence[int], first: int, count: int, *, patient: bool = True
    ) -> list[bytes | None]:
        known = [] if self._unread else self._path.known(drafts)[first : first + count]
        if len(known) == count or self.failure is not None:
            return known if self.failure is None else [None] * count
        if patient or self._plain:
            self._is_done(None)
            if self.failure is None and self._unread:
                self._path.advance(self._unread)
                self.failure = self._path.failure
            self._unread = []
        elif self._is_done(self.grace):
            self._start(drafts, first, count)
        if self._is_done(self.grace):
            return [None] * count if self.failure else self._path.masks(drafts, first, count)
        known = self._path.known(drafts)[first : first + count]
        return [*known, *[None] * (count - len(known))]

    def _start(self, drafts: Sequence[int], first: int, count: int) -> None:
        """Has another thread follow what was emitted, and make masks."""
        unread, self._unread = self._unread, []
        given = list(drafts)

        def work() -> list[bytes | None]:
            if unread and self._path.advance(unread) < len(unread):
                return []
            return self._path.masks(given, first, count)

        self._begun = time.monotonic()
        self._work = (_aside if self.slow else _tries).submit(work)

    def _is_done(self, seconds: float | None) -> bool:
        """Whether nothing is under way any more; waits for so long, or to the end."""
        if self._work is None:
            return True
        wait([self._work], seconds)
        if not self._work.done():
            return False
        work, self._work = self._work, None
        work.result()
        self.failure = self._path.failure or self._too_slow()
        return True

    def _too_slow(self) -> str | None:
        for spent, most, what in (
            (self._path.slow_reading, MAX_READING_SECONDS, "to read slow tokens by the grammar"),
            (self._path.slow_seconds, MAX_ROW_SECONDS, "to follow the grammar"),
        ):
            if spent > most:
                return (
                    f"{what} took more than {most:g} seconds of processor time; simplify it, so that a text can be "
                    "read in one way only, or lower max_tokens"
                )
        return None
