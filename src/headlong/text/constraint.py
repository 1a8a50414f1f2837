"""Follows one row's output through a grammar: which tokens may stand next, after each of a step's drafts.

Up to a marker, such as the end of reasoning, every token is allowed; then comes a little white space, then text that
the grammar describes, then the end of the sequence. Knows tokens, their bytes and the grammar library's matcher; knows
no model and no sampling.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Literal, TypeVar

import numpy as np
from llguidance import LLMatcher

from headlong.errors import RequestError
from headlong.text.vocabulary import Marker, Vocabulary, says_more

Answer = TypeVar("Answer")
MAX_GAP_TOKENS = 4
"""The most white-space tokens between the marker and the grammar's text. Models write a blank line there, and without
a limit might write white space for ever."""
MAX_MASK_SECONDS = 0.004
"""The processor time of a mask that others may wait for."""
MAX_READING_SECONDS = 0.2
"""The processor time that a row's slow tokens may take to be read."""
WARY_MASKS = 16
"""A mask that took longer makes so many that follow it be made aside."""
MANY_BYTES = 128
"""The most bytes that are followed while others wait."""
BYTES_PER_SECOND = 32 << 20
"""What a lexer may grow by while it makes masks."""


class CompiledGrammar:
    """A compiled grammar, from which any number of matchers can be made. The library's copies of a matcher share one
    lexer, which makes copies cheap; a lexer that ran into a limit is useless to all of them."""

    def __init__(
        self,
        prototype: LLMatcher,
        rebuild: Callable[[], LLMatcher],
        num_bytes: int = 0,
        *,
        plain: bool = False,
    ) -> None:
        self._prototype = prototype
        self._num_bytes = num_bytes
        self.plain = plain
        """Whether its masks cannot take long, so that nobody need be on guard."""
        self.seconds = 0.0
        """Processor time that masks took with the present lexer. What takes time is making states, which stay."""
        self._rebuild = rebuild
        self._lock = Lock()

    @property
    def num_bytes(self) -> int:
        """An estimate of its size, with what its lexer has grown by."""
        return self._num_bytes + int(self.seconds * BYTES_PER_SECOND)

    def matcher(self) -> LLMatcher:
        """A new matcher at the beginning of the grammar."""
        with self._lock:
            return self._prototype.deep_copy()

    def renew(self) -> None:
        """Replaces the shared lexer: matchers that are made from now on have a new one."""
        try:
            fresh = self._rebuild()
        except (RequestError, TimeoutError) as error:  # it was built before; now the machine is too busy
            raise MatcherFailed(f"it cannot be compiled again ({error!r})") from error
        with self._lock:
            self._prototype, self.seconds = fresh, 0.0


class MatcherFailed(Exception):
    """The matcher cannot go on: it ran into a limit of the library, or no token of the vocabulary fits."""


class Matcher:
    """A matcher of the library and the tokens it has read. An error ends the library's matcher for good; this one then
    builds another and reads its tokens again.

    Reading keeps the interpreter's lock, and under an ambiguous grammar a token of a hundred spaces takes seconds. So
    tokens are read byte by byte, which comes to the same, unless the grammar is plain."""

    def __init__(self, grammar: CompiledGrammar, in_bytes: Callable[[int], tuple[int, ...]]) -> None:
        """`in_bytes` gives the tokens of one byte that a token is the same as."""
        self._grammar = grammar
        self._in_bytes = (lambda token: (token,)) if grammar.plain else in_bytes
        self._read: list[tuple[int, ...]] = []
        self._wary = 0
        """The masks to come that are taken to be slow."""
        self.slow_seconds = 0.0
        """Processor time of all that took longer than others may wait for."""
        self.slow_reading = 0.0
        """What of it tokens took to read."""
        self._restart()

    @property
    def slow(self) -> bool:
        """Whether one of the last masks took long."""
        return self._wary > 0

    def mask(self) -> bytes:
        started = time.thread_time()
        mask = self._ask(lambda matcher: matcher.compute_bitmask())
        took_long = time.thread_time() - started > MAX_MASK_SECONDS
        self._wary = WARY_MASKS if took_long else max(0, self._wary - 1)
        return mask

    def take(self, token: int) -> bool:
        """Reads a token; False, and no change, if the grammar does not allow it here."""

        pieces, until = self._in_bytes(token), time.thread_time() + MAX_READING_SECONDS - self.slow_reading

        def read(matcher: LLMatcher) -> bool | None:
            for count, piece in enumerate(pieces):
                late = time.thread_time() > until
                if not late and matcher.try_consume_tokens([piece]):
                    continue
                if count and not matcher.is_error():
                    matcher.rollback(count)
                if late:
                    raise MatcherFailed(TOO_SLOW)
                break
            else:
                return True
            # A lexer that met a limit refuses everything, without a word.
            allowed = matcher.compute_bitmask()[token >> 3] >> (token & 7) & 1
            return None if allowed else False

        before = self.slow_seconds
        try:
            taken = self._ask(read)
        finally:
            self.slow_reading += self.slow_seconds - before
        if taken:
            self._read.append(pieces)
        return taken

    def may_end(self) -> bool:
        return self._ask(lambda matcher: matcher.is_accepting())

    def back_to(self, count: int) -> None:
        """Unreads all but the first `count` tokens."""
        surplus = sum(map(len, self._read[count:]))
        del self._read[count:]
        if surplus and not self._matcher.rollback(surplus):
            self._restart()

    def _ask(self, question: Callable[[LLMatcher], Answer | None]) -> Answer:
        """The matcher's answer to `question`. Where it gives None or an error, a matcher with a new lexer is asked once
        more before `MatcherFailed` is raised."""
        why = ""
        for _ in range(2):
            started = time.thread_time()
            try:
                answer = question(self._matcher)
            finally:
                spent = time.thread_time() - started
                self._grammar.seconds += spent
                if spent > MAX_MASK_SECONDS:
                    self.slow_seconds += spent
            if answer is not None and not self._matcher.is_error():
                return answer
            why = self._matcher.get_error()
            self._grammar.renew()
            self._restart()
        raise MatcherFailed(explain(why))

    def _restart(self) -> None:
        self._matcher = self._grammar.matcher()
        for pieces in self._read:
            for piece in pieces:  # one at a time: the interpreter's lock is kept for each
                self._matcher.try_consume_tokens([piece])


TOO_SLOW = (
    f"reading its tokens took more than {MAX_READING_SECONDS:g} seconds of processor time; simplify it, so that a text "
    "can be read in one way only, or lower max_tokens"
)


def explain(error: str) -> str:
    """The library's message in one line, without its stack and internal state."""
    if not error or error.startswith("NoExtensionBias"):
        return "no token can come next"
    return " ".join(error.replace("<non-verbose/>", "").split())[:600]


@dataclass(slots=True)
class _Position:
    """A position of the output: which part of it this is, and the mask of the next tokens once that was computed."""

    part: Literal["free", "gap", "text", "ended"]
    count: int
    """In `free`, how many bytes of the marker the output ends with; in `gap`, how many white-space tokens are left."""
    num_read: int
    """How many tokens the matcher has read up to this position."""
    asked: bool = False
    mask: bytes | None = None
    failure: str | None = None


class GrammarPath:
    """One row's output followed through a grammar. Drafts are read on trial: what was computed for a draft is kept and
    used again when the same draft is verified and accepted. Another thread may look at what is `known` meanwhile."""

    def __init__(self, grammar: CompiledGrammar, vocabulary: Vocabulary, marker: Marker | None) -> None:
        self.failure: str | None = None
        self._vocabulary = vocabulary
        self._marker = marker
        self._matcher = Matcher(grammar, vocabulary.in_bytes)
        self._drafts: list[int] = []
        """The drafts that were read on trial after the accepted output."""
        self._positions = [_Position("text" if marker is None else "free", 0, 0)]
        """The position at the end of the accepted output, and the one after each of the drafts."""

    @property
    def slow(self) -> bool:
        return self._matcher.slow

    @property
    def slow_seconds(self) -> float:
        return self._matcher.slow_seconds

    @property
    def slow_reading(self) -> float:
        return self._matcher.slow_reading

    @property
    def at_once(self) -> bool:
        """Whether the mask after the accepted output is there or needs no grammar."""
        position = self._positions[0]
        return position.asked or position.part not in ("gap", "text")

    def known(self, drafts: Sequence[int]) -> list[bytes | None]:
        """The masks that are there, from the one after the accepted output on, and the ones after these drafts."""
        found: list[bytes | None] = []
        for number, position in enumerate(list(self._positions)[: len(drafts) + 1]):
            if not position.asked or self._drafts[:number] != list(drafts[:number]):
                break
            found.append(position.mask)
        return found

    def is_long(self, tokens: Sequence[int]) -> bool:
        """Whether reading these may take long although no mask did: they are many bytes."""
        return sum(len(self._vocabulary.tokens[token]) for token in tokens) > MANY_BYTES

    def has_read(self, tokens: Sequence[int]) -> bool:
        """Whether all of these were read on trial, so that to follow them takes no time."""
        return self._drafts[: len(tokens)] == list(tokens)

    def advance(self, tokens: Sequence[int]) -> int:
        if self.failure is not None:
            return 0
        self._retreat(tokens)
        for number, token in enumerate(tokens):
            self.failure = self._positions[number].failure
            if self.failure is None and number == len(self._drafts):
                self.failure = self._refusal(token)
            if self.failure is not None:
                return number
        self._positions, self._drafts = self._positions[-1:], []
        return len(tokens)

    def masks(self, drafts: Sequence[int], first: int, count: int) -> list[bytes | None]:
        masks: list[bytes | None] = [None] * count
        if self.failure is not None:
            return masks
        self._retreat(drafts)
        for number in range(first + count):
            if number > len(self._drafts) and not self._try(drafts[number - 1]):
                break
            if number >= first:
                masks[number - first] = self._mask(number)
            if self._positions[number].failure is not None:
                break
        return masks

    def _retreat(self, tokens: Sequence[int]) -> None:
        """Forgets the drafts from the first one on that differs from `tokens`."""
        same = 0
        for draft, token in zip(self._drafts, tokens, strict=False):
            if draft != token:
                break
            same += 1
        self._cut(same)

    def _cut(self, count: int) -> None:
        del self._drafts[count:]
        del self._positions[count + 1 :]
        self._matcher.back_to(self._positions[-1].num_read)

    def _refusal(self, token: int) -> str | None:
        """Reads a token that was emitted. Returns None, or the reason why the grammar does not allow it."""
        try:
            allowed = self._step(token)
        except MatcherFailed as error:
            return f"the grammar cannot be followed further: {error}"
        return None if allowed else "the grammar refuses a token that it allowed before"

    def _try(self, draft: int) -> bool:
        """Reads a draft; False if the grammar does not allow it, so that it will be rejected."""
        try:
            return self._step(draft)
        except MatcherFailed:
            return False  # should the target choose it all the same, the row ends there

    def _step(self, token: int) -> bool:
        position = self._positions[-1]
        follows = self._after(position, token)
        if follows is None:
            return False
        self._positions.append(follows)
        self._drafts.append(token)
        return True

    def _after(self, position: _Position, token: int) -> _Position | None:
        """Where `token` leads; None if it is not allowed."""
        ends = token in self._vocabulary.eos_ids
        if position.part == "ended" or (position.part == "free" and ends):
            return _Position("ended", 0, position.num_read)
        if position.part == "free":
            assert self._marker is not None
            matched, rest = self._marker.read(position.count, token)
            if rest is None:
                return _Position("free", matched, position.num_read)
            return None if says_more(rest) else _Position("gap", MAX_GAP_TOKENS, position.num_read)
        if ends and self._matcher.may_end():
            return _Position("ended", 0, position.num_read)
        if self._matcher.take(token):
            return _Position("ended" if ends else "text", 0, position.num_read + 1)
        if (
            position.part == "gap"
            and position.count
            and self._marker is not None
            and token in self._marker.blank
        ):
            return _Position("gap", position.count - 1, position.num_read)
        return None

    def _mask(self, number: int) -> bytes | None:
        position = self._positions[number]
        if not position.asked:
            if position.part in ("gap", "text"):
                self._cut(number)
            try:
                position.mask = self._compute(position)
            except MatcherFailed as error:
                position.failure = f"the grammar cannot be followed further: {error}"
            position.asked = True
        return position.mask

    def _compute(self, position: _Position) -> bytes | None:
        if position.part == "ended":
            return None
        if position.part == "free":
            assert self._marker is not None
            return self._marker.mask(position.count)
        mask = self._matcher.mask()
        if position.part == "gap" and position.count and self._marker is not None:
            blank = self._marker.blank_mask
            return (np.frombuffer(mask, dtype=np.uint8, count=len(blank)) | blank).tobytes()
        return mask
