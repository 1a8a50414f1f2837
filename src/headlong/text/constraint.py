"""Follows one row's output through a grammar: which tokens may stand next, after each of a step's drafts.

Up to a marker, such as the end of reasoning, everything is free; then comes a little white space, then the grammar's
own text, then the end. Knows tokens and their bytes, and the grammar library's matcher; no model and no sampling.
"""

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
"""White-space tokens between the marker and the text: models write a blank line there, and must not write for ever."""


class Prepared:
    """A grammar ready to be followed, any number of times. The library's copies of a matcher share one lexer, which
    makes them fast; but a lexer that met a limit is of no use to any of them."""

    def __init__(self, prototype: LLMatcher, rebuild: Callable[[], LLMatcher]) -> None:
        self._prototype = prototype
        self._rebuild = rebuild
        self._lock = Lock()

    def matcher(self) -> LLMatcher:
        """A matcher at the beginning."""
        with self._lock:
            return self._prototype.deep_copy()

    def renew(self) -> None:
        """A new lexer for all that follows."""
        try:
            fresh = self._rebuild()
        except (RequestError, TimeoutError) as error:  # it was built before; now the machine is too busy
            raise Broken(f"it cannot be compiled again ({error!r})") from error
        with self._lock:
            self._prototype = fresh


class Broken(Exception):
    """The matcher cannot go on: a limit of the library, or no token of the vocabulary fits."""


class Follower:
    """A matcher and the tokens it has read. An error ends the library's matcher for ever; this one starts anew."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._read: list[int] = []
        self._restart()

    def mask(self) -> bytes:
        return self._ask(lambda matcher: matcher.compute_bitmask())

    def take(self, token: int) -> bool:
        """Reads a token; False, and no change, if the grammar does not allow it here."""

        def read(matcher: LLMatcher) -> bool | None:
            if matcher.try_consume_tokens([token]):
                return True
            # A lexer that met a limit refuses everything, without a word.
            allowed = matcher.compute_bitmask()[token >> 3] >> (token & 7) & 1
            return None if allowed else False

        taken = self._ask(read)
        if taken:
            self._read.append(token)
        return taken

    def may_end(self) -> bool:
        return self._ask(lambda matcher: matcher.is_accepting())

    def back_to(self, count: int) -> None:
        """Unreads all but the first `count` tokens."""
        surplus = len(self._read) - count
        del self._read[count:]
        if surplus and not self._matcher.rollback(surplus):
            self._restart()

    def _ask(self, question: Callable[[LLMatcher], Answer | None]) -> Answer:
        """None, or an error, is no answer; a new lexer is asked before the matcher is given up."""
        why = ""
        for _ in range(2):
            answer = question(self._matcher)
            if answer is not None and not self._matcher.is_error():
                return answer
            why = self._matcher.get_error()
            self._prepared.renew()
            self._restart()
        raise Broken(explain(why))

    def _restart(self) -> None:
        self._matcher = self._prepared.matcher()
        self._matcher.consume_tokens(self._read)


def explain(error: str) -> str:
    """The library's message in one line, without what it says of its own insides."""
    if not error or error.startswith("NoExtensionBias"):
        return "no token can come next"
    return " ".join(error.replace("<non-verbose/>", "").split())[:600]


@dataclass(slots=True)
class _Place:
    """A point of the output: where it stands, and what may come next once that was asked."""

    part: Literal["free", "gap", "text", "ended"]
    count: int
    """In `free`, how much of the marker is there; in `gap`, how many white-space tokens are left."""
    num_read: int
    """Tokens the matcher has read on the way here."""
    asked: bool = False
    mask: bytes | None = None
    broken: str | None = None


class GrammarConstraint:
    """One row's way through a grammar. Drafts are read on trial: what was computed for a draft is kept and used
    again when the same draft is verified and settled."""

    def __init__(self, prepared: Prepared, vocabulary: Vocabulary, marker: Marker | None) -> None:
        self.failure: str | None = None
        self._vocabulary = vocabulary
        self._marker = marker
        self._follower = Follower(prepared)
        self._drafts: list[int] = []
        """Read on trial after what is settled."""
        self._places = [_Place("text" if marker is None else "free", 0, 0)]
        """The settled output's end, and the place after each of the drafts."""

    def advance(self, tokens: Sequence[int]) -> int:
        if self.failure is not None:
            return 0
        self._retreat(tokens)
        for number, token in enumerate(tokens):
            self.failure = self._places[number].broken
            if self.failure is None and number == len(self._drafts):
                self.failure = self._refusal(token)
            if self.failure is not None:
                return number
        self._places, self._drafts = self._places[-1:], []
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
            if self._places[number].broken is not None:
                break
        return masks

    def _retreat(self, tokens: Sequence[int]) -> None:
        """Forgets the drafts from the first on that is not in `tokens`."""
        same = 0
        for draft, token in zip(self._drafts, tokens, strict=False):
            if draft != token:
                break
            same += 1
        self._cut(same)

    def _cut(self, count: int) -> None:
        del self._drafts[count:]
        del self._places[count + 1 :]
        self._follower.back_to(self._places[-1].num_read)

    def _refusal(self, token: int) -> str | None:
        """Reads a token that was emitted; the reason if it cannot be, and then it must not have been."""
        try:
            allowed = self._step(token)
        except Broken as error:
            return f"the grammar cannot be followed further: {error}"
        return None if allowed else "the grammar refuses a token that it allowed before"

    def _try(self, draft: int) -> bool:
        """Reads a draft; False if the row will not get past it."""
        try:
            return self._step(draft)
        except Broken:
            return False  # should the target choose it all the same, the row ends there

    def _step(self, token: int) -> bool:
        place = self._places[-1]
        follows = self._after(place, token)
        if follows is None:
            return False
        self._places.append(follows)
        self._drafts.append(token)
        return True

    def _after(self, place: _Place, token: int) -> _Place | None:
        """Where `token` leads; None if it is not allowed."""
        ends = token in self._vocabulary.eos_ids
        if place.part == "ended" or (place.part == "free" and ends):
            return _Place("ended", 0, place.num_read)
        if place.part == "free":
            assert self._marker is not None
            matched, rest = self._marker.read(place.count, token)
            if rest is None:
                return _Place("free", matched, place.num_read)
            return None if says_more(rest) else _Place("gap", MAX_GAP_TOKENS, place.num_read)
        if ends and self._follower.may_end():
            return _Place("ended", 0, place.num_read)
        if self._follower.take(token):
            return _Place("ended" if ends else "text", 0, place.num_read + 1)
        if place.part == "gap" and place.count and self._marker is not None and token in self._marker.blank:
            return _Place("gap", place.count - 1, place.num_read)
        return None

    def _mask(self, number: int) -> bytes | None:
        place = self._places[number]
        if not place.asked:
            if place.part in ("gap", "text"):
                self._cut(number)
            try:
                place.mask = self._compute(place)
            except Broken as error:
                place.broken = f"the grammar cannot be followed further: {error}"
            place.asked = True
        return place.mask

    def _compute(self, place: _Place) -> bytes | None:
        if place.part == "ended":
            return None
        if place.part == "free":
            assert self._marker is not None
            return self._marker.mask(place.count)
        mask = self._follower.mask()
        if place.part == "gap" and place.count and self._marker is not None:
            blank = self._marker.blank_mask
            return (np.frombuffer(mask, dtype=np.uint8, count=len(blank)) | blank).tobytes()
        return mask
