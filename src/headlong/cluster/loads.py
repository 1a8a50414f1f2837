"""How much each replica has still to do: what this router sent there and has not ended, and what others did, as far as
replicas report it. Knows no Ray.
"""

from collections.abc import Iterable
from dataclasses import dataclass

MEMORY_SECONDS = 900.0
"""A call that has not ended after so long is not counted any more: it may have been given up without a word."""


@dataclass(frozen=True)
class _Call:
    replica: str
    tokens: int
    sent: float


class Loads:
    """Tokens that replicas have still to read or to generate, at most. Moments are seconds on any one clock."""

    def __init__(self) -> None:
        self._calls: dict[str, _Call] = {}
        self._own: dict[str, int] = {}
        """Tokens of the calls by replica."""
        self._peaks: dict[str, tuple[int, int]] = {}
        """The most that these were between the last two reports, and since the last one."""
        self._others: dict[str, int] = {}
        """What each replica reported beyond what this router had sent it."""

    def report(self, replica: str, tokens: int) -> None:
        """What a replica says that it has to do, or rather had a moment ago: as much as this router had sent there at
        any time since the report before the last is no work of others."""
        before, since = self._peaks.get(replica, (0, 0))
        self._others[replica] = max(0, tokens - max(before, since))
        self._peaks[replica] = since, self._own.get(replica, 0)

    def sent(self, call: str, replica: str, tokens: int, now: float) -> bool:
        """A call goes to a replica; one that was refused elsewhere goes there instead. Gives whether that is news."""
        known = self._calls.get(call)
        if known is not None and known.replica == replica:
            return False
        self.done(call)
        self._calls[call] = _Call(replica, tokens, now)
        self._own[replica] = self._own.get(replica, 0) + tokens
        before, since = self._peaks.get(replica, (0, 0))
        self._peaks[replica] = before, max(since, self._own[replica])
        return True

    def done(self, call: str) -> None:
        """A call has ended, however it did."""
        known = self._calls.pop(call, None)
        if known is not None and known.replica in self._own:
            self._own[known.replica] -= known.tokens

    def forget(self, replica: str) -> None:
        """The replica is gone, and what it had with it."""
        for call in [call for call, known in self._calls.items() if known.replica == replica]:
            del self._calls[call]
        self._own.pop(replica, None)
        self._peaks.pop(replica, None)
        self._others.pop(replica, None)

    def of(self, replicas: Iterable[str], now: float) -> dict[str, int]:
        """What each of the replicas has to do; nothing where nobody heard of it."""
        while self._calls:
            oldest = next(iter(self._calls))
            if now - self._calls[oldest].sent <= MEMORY_SECONDS:
                break
            self.done(oldest)
        return {replica: self._own.get(replica, 0) + self._others.get(replica, 0) for replica in replicas}
