"""Whether a call is what ends the replicas it is given to, or only was there when they ended. Knows no replica.

Replicas die for reasons of their own, and a call may meet that often without being at fault; so no number of losses
speaks against it. What does is dying with it *alone*. From the second loss on, a call is on trial with the next
replica: it waits for nobody, and its first token is computed in steps that no other row shares. Replicas try one call
at a time, say when a trial begins, and give as much time to everybody else before the next one. One that came through
goes on in company, and is cleared once each of its rows has `CLEARING` tokens more than at the last loss; if its
replica is lost before, the next trial takes more tokens. A call is at fault once more replicas were lost while they
tried it than chance explains, by the seconds that its trials took and by how often replicas die anyway.
"""

import math
from collections.abc import Collection, Iterable

from headlong.completion import Chunk

TRIED_AFTER = 2
"""Losses after which a call is on trial."""
GUILTY = 3
"""Replicas that must be lost during trials at least."""
CHANCE = 1e-5
"""How likely it may be at most that an innocent call met the end of so many replicas while it was alone with them."""
MEMORY_SECONDS = 600.0
LEAST_SECONDS = 60.0
CLEARING = 64
"""Tokens after which a call has nothing to do with the last loss: whoever needs more to end a replica is not found out,
and costs as many replicas as its length allows."""
LONGER = 8
"""How many times as many tokens a trial takes as the last one that the call came through in vain."""


class Gain:
    """Counts the tokens of rows until each has enough of them or has ended."""

    def __init__(self, rows: Iterable[str], enough: int) -> None:
        self._missing = dict.fromkeys(rows, enough)

    @property
    def reached(self) -> bool:
        return not self._missing

    def take(self, chunk: Chunk) -> None:
        left = self._missing.get(chunk.request_id)
        if left is not None:
            self._missing[chunk.request_id] = left - len(chunk.token_ids)
            if left <= len(chunk.token_ids) or chunk.finish_reason is not None:
                del self._missing[chunk.request_id]


class Deaths:
    """How often replicas are lost, whatever to, as far as a front sees it. Moments are seconds on any one clock."""

    def __init__(self) -> None:
        self._when: dict[str, float] = {}
        self._began: float | None = None

    def note(self, replica: str, now: float) -> None:
        """A replica was lost; every call that it had says so."""
        if self._began is None:
            self._began = now
        self._when = {name: at for name, at in self._when.items() if now - at < MEMORY_SECONDS}
        self._when.setdefault(replica, now)

    def rate(self, now: float, but: int) -> float:
        """Losses a second, without so many of them, and not less than what so short a time can show."""
        began = now if self._began is None else self._began
        seconds = min(max(now - began, LEAST_SECONDS), MEMORY_SECONDS)
        return (1 + max(0, len(self._when) - but)) / seconds


class Suspicion:
    """What speaks against one call."""

    def __init__(self, deaths: Deaths) -> None:
        self.guilty = False
        self._deaths = deaths
        self._clear()

    def _clear(self) -> None:
        self.losses = 0
        """Replicas that were lost while they had the call, since it was cleared."""
        self.deaths_alone = 0
        """How many of them were trying it."""
        self._tokens = 1
        """How many tokens the next trial takes."""
        self._trial: Gain | None = None
        """Goes on while there is one."""
        self._tried_at = 0.0
        """When it began."""
        self._seconds = 0.0
        """How long trials took in all."""
        self._passed = False
        """Whether the call came through a trial on this replica."""
        self._cleared: Gain | None = None

    @property
    def alone(self) -> int:
        """How many tokens each row is to emit alone on the next replica; 0 for a call that nobody suspects."""
        return self._tokens if self.losses >= TRIED_AFTER else 0

    def try_alone(self, rows: Collection[str], tokens: int, now: float) -> None:
        """A replica says that it begins to try the call."""
        self._trial, self._tried_at = Gain(rows, tokens), now

    def lose(self, replica: str, rows: Collection[str], now: float) -> None:
        """The replica that had the call is lost."""
        self._deaths.note(replica, now)
        self.losses += 1
        if self._trial is not None:
            self.deaths_alone += 1
            self._seconds += now - self._tried_at
            expected = self._seconds * self._deaths.rate(now, self.deaths_alone)
            chance = expected**self.deaths_alone / math.factorial(self.deaths_alone)
            self.guilty = self.deaths_alone >= GUILTY and chance < CHANCE
        if self._passed:
            self._tokens = min(LONGER * self._tokens, CLEARING)
        self._trial, self._passed, self._cleared = None, False, Gain(rows, CLEARING)

    def take(self, chunk: Chunk, now: float) -> None:
        """Something came of the call."""
        if self._cleared is None:
            return
        if self._trial is not None:
            self._trial.take(chunk)
            if self._trial.reached:
                self._trial, self._passed = None, True
                self._seconds += now - self._tried_at
        self._cleared.take(chunk)
        if self._cleared.reached:
            self._clear()
