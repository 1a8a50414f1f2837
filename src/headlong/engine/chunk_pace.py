"""How many tokens of prompts a step reads while other rows decode: as many as keep the gap between their tokens short.

What a step takes is measured, with prompts and without. Tokens do not depend on how a prompt is cut, so this may depend
on a clock. Knows nothing of rows, only how many tokens of which kind a step fed.
"""

from headlong.types import Plan

LONGEST_GAP = 1.8
"""The time of a step that reads prompts, in steps that read none. Clients are to see gaps below twice the usual one."""
GROWTH = 2
"""How many times as many tokens as the last step read one may read: what many tokens take is not known from few."""
SHARE = 0.3
"""How much a new measurement counts beside those before it."""


class ChunkPace:
    """Bounds the tokens of prompts in a step by measured times."""

    def __init__(self, least: int, most: int) -> None:
        """`least` and `most` tokens are read in any case; prompts never stand still."""
        self.least, self.most = min(least, most), most
        self._decode_seconds: float | None = None
        self._token_seconds: float | None = None
        self._last = self.least

    def budget(self, num_decoding: int) -> int:
        """The tokens of prompts that the next step may read beside so many rows that decode."""
        if not num_decoding or self._decode_seconds is None:
            return self.most
        if self._token_seconds is None:
            return self.least
        allowed = self.most
        if self._token_seconds > 0.0:
            allowed = int((LONGEST_GAP - 1.0) * self._decode_seconds / self._token_seconds)
        return max(self.least, min(allowed, GROWTH * self._last, self.most))

    def observe(self, plan: Plan, seconds: float) -> None:
        """Takes note of what a step took."""
        prompt = sum(row.query_len for row in plan.rows if row.known_tokens)
        decoding = sum(not row.known_tokens for row in plan.rows)
        if decoding and not prompt:
            self._decode_seconds = _smoothed(self._decode_seconds, seconds)
        elif decoding and self._decode_seconds is not None:
            each = max(seconds - self._decode_seconds, 0.0) / prompt
            self._token_seconds, self._last = _smoothed(self._token_seconds, each), max(prompt, self.least)


def _smoothed(before: float | None, now: float) -> float:
    return now if before is None else before + SHARE * (now - before)
