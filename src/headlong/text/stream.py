"""Turns token ids into text as they come, holding back partial characters and possible stop strings.

Whatever leaves here is final, and the sum does not depend on how the tokens were grouped: it is
the same for one token a step as for a run of accepted drafts. Knows no engine and no server; one
object serves one sequence and one thread.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from headlong.errors import RequestError
from headlong.text.tokenizer import Tokenizer

# A character has at most four bytes, so an unfinished one spans few tokens. Past this many, a
# trailing U+FFFD is taken for what the tokens really say.
_MAX_HELD_TOKENS = 8


class Detokenizer:
    """Incremental `tokenizer.decode`: all pushes and the flush, joined, equal decoding at once."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._source = (
            _ByteSource(tokenizer, skip_special_tokens)
            if tokenizer.is_byte_level
            else _WindowSource(tokenizer, skip_special_tokens)
        )

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that no later token can change."""
        return self._source.push(token_ids)

    def flush(self) -> str:
        """Return what is left, U+FFFD for unfinished bytes, and start afresh."""
        return self._source.flush()


class _ByteSource:
    """Byte-level vocabularies: a token is its bytes and nothing else, so UTF-8 decoding is all."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        tokenizer, skip = self._tokenizer, self._skip
        pieces = [tokenizer.token_bytes(i) for i in token_ids if not (skip and tokenizer.is_special(i))]
        return self._utf8.decode(b"".join(pieces))

    def flush(self) -> str:
        text = self._utf8.decode(b"", True)
        self._utf8.reset()
        return text


class _WindowSource:
    """Any other vocabulary: decode a short window and emit what it adds to its own beginning.

    The window is the last settled group of tokens (the anchor) and the tokens not yet settled.
    Decoders treat the first token apart (a leading space is dropped), hence the anchor; and they
    judge a run of `<0xAB>` tokens as a whole (one bad byte spoils the run), hence such a run is
    settled only once another token ends it.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._anchor: list[int] = []
        self._anchor_text = ""
        self._held: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        tokenizer = self._tokenizer
        for i in token_ids:
            # A token that adds no text would be an anchor that protects nothing.
            if tokenizer.is_known(i) and not (self._skip and tokenizer.is_special(i)):
                self._held.append(i)
        if not self._held or tokenizer.is_byte_piece(self._held[-1]):
            return ""
        text = self._window_text()
        if text.endswith("\ufffd") and len(self._held) < _MAX_HELD_TOKENS:
            return ""
        emitted = text[len(self._anchor_text) :]
        self._anchor, self._held = self._held, []
        self._anchor_text = self._decode(self._anchor)
        return emitted

    def flush(self) -> str:
        emitted = self._window_text()[len(self._anchor_text) :] if self._held else ""
        self._anchor, self._anchor_text, self._held = [], "", []
        return emitted

    def _window_text(self) -> str:
        return self._decode(self._anchor + self._held)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)


class _StopState:
    """How far one stop string has matched: Knuth-Morris-Pratt, so each character costs O(1)."""

    def __init__(self, stop: str):
        self.stop = stop
        self.matched_len = 0
        self.found_start: int | None = None
        self._borders = [0] * len(stop)
        length = 0
        for i in range(1, len(stop)):
            while length and stop[i] != stop[length]:
                length = self._borders[length - 1]
            length += stop[i] == stop[length]
            self._borders[i] = length

    def advance(self, text: str, position: int) -> None:
        """Read `text`, whose first character is number `position` of the stream; stop at a match."""
        stop, borders, length = self.stop, self._borders, self.matched_len
        for offset, char in enumerate(text):
            while length and char != stop[length]:
                length = borders[length - 1]
            length += char == stop[length]
            if length == len(stop):
                self.found_start = position + offset + 1 - length
                return
        self.matched_len = length


class StopMatcher:
    """Finds the stop string that starts earliest in the whole text; of two at one place, the first listed.

    So "b" is not reported in "ab" while "abc" is also a stop and may yet start before it.
    """

    def __init__(self, stops: Sequence[str]):
        check_stops(stops)
        self._states = [_StopState(stop) for stop in stops]
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._held = ""
        self._held_start = 0  # position in the stream of the first held character
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Return (text safe to emit, stop matched or None); after a match nothing more is emitted."""
        if self.matched is not None:
            return "", self.matched
        if not self._held and self._first_chars.isdisjoint(text):
            self._held_start += len(text)
            return text, None
        end = self._held_start + len(self._held)
        for state in self._states:
            if state.found_start is None:
                state.advance(text, end)
        self._held += text
        return self._settle(end + len(text), final=False)

    def flush(self) -> str:
        """The text ends here: return what was held. A match that only waited for an earlier one to
        be ruled out is settled now; `matched` then says so, and only the text before it is returned."""
        if self.matched is not None:
            return ""
        return self._settle(self._held_start + len(self._held), final=True)[0]

    def _settle(self, end: int, final: bool) -> tuple[str, str | None]:
        best: tuple[int, int] | None = None
        waiting: tuple[int, int] | None = None
        for rank, state in enumerate(self._states):
            if state.found_start is not None:
                found = (state.found_start, rank)
                best = found if best is None else min(best, found)
            elif state.matched_len and not final:
                begun = (end - state.matched_len, rank)
                waiting = begun if waiting is None else min(waiting, begun)
        if best is not None and (waiting is None or best < waiting):
            self.matched = self._states[best[1]].stop
            return self._release(best[0]), self.matched
        return self._release(end if waiting is None else waiting[0]), None

    def _release(self, until: int) -> str:
        count = until - self._held_start
        text, self._held = self._held[:count], self._held[count:]
        self._held_start = until
        return text


def check_stops(stops: Sequence[str]) -> None:
    """Refuse stop strings that could not be searched for."""
    if isinstance(stops, str):
        raise RequestError("stop: must be a list of strings; put the single string in a list")
    for index, stop in enumerate(stops):
        if not isinstance(stop, str) or not stop:
            raise RequestError(f"stop[{index}]: must be a non-empty string; remove it from the list")


@dataclass(frozen=True, slots=True)
class TextEvent:
    """What one token made visible: text that is final, and the stop string it completed, if any."""

    text: str
    stopped: str | None = None


_NOTHING = TextEvent("")


class TextStream:
    """The text of one sequence, fed token by token, since a stop can fall inside an accepted run.

    Without a tokenizer there is no text: every event is empty and stop strings are refused.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stops: Sequence[str] = (),
        skip_special_tokens: bool = True,
    ):
        check_stops(stops)
        if stops and tokenizer is None:
            raise RequestError(
                "stop: this model has no tokenizer.json to turn tokens into text; remove `stop`"
            )
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, skip_special_tokens)
        self._matcher = StopMatcher(stops) if stops else None

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return None if self._matcher is None else self._matcher.matched

    def push(self, token_id: int, match: bool = True) -> TextEvent:
        """Take one token. Once an event has `stopped`, later tokens change nothing. Without `match` the
        token's text is not searched for stops (it comes before a request's minimum length)."""
        if self._detokenizer is None:
            return _NOTHING
        text = self._detokenizer.push((token_id,))
        if self._matcher is None or not match:
            return TextEvent(text) if text else _NOTHING
        return TextEvent(*self._matcher.push(text))

    def finish(self) -> str:
        """The sequence ended: return the text still held. `stopped` may become set here, when a
        match had waited for a longer one that can no longer come."""
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.flush()
        if self._matcher is not None:
            text, stopped = self._matcher.push(text)
            if stopped is None:
                text += self._matcher.flush()
        return text
