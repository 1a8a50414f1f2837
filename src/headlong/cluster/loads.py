"""How much each replica has still to do: what it reported, and what was sent to it since. Knows no Ray."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

REPORT_SECONDS = 1.5
"""How old a report may be when it arrives: what was sent within this time before it may be missing from it."""
MEMORY_SECONDS = 30.0
"""What was sent longer ago is not counted any more, whether or not reports come."""


@dataclass
class _Load:
    reported: int = 0
    sent: deque[tuple[float, int]] = field(default_factory=deque)
    """When what was sent that reports may not know of yet, the oldest first."""

    def forget_before(self, moment: float) -> None:
        while self.sent and self.sent[0][0] < moment:
            self.sent.popleft()


class Loads:
    """Tokens that replicas have still to read or to generate, at most. Moments are seconds on any one clock."""

    def __init__(self) -> None:
        self._loads: dict[str, _Load] = {}

    def report(self, replica: str, tokens: int, now: float) -> None:
        load = self._loads.setdefault(replica, _Load())
        load.reported = tokens
        load.forget_before(now - REPORT_SECONDS)

    def sent(self, replica: str, tokens: int, now: float) -> None:
        self._loads.setdefault(replica, _Load()).sent.append((now, tokens))

    def forget(self, replica: str) -> None:
        self._loads.pop(replica, None)

    def of(self, replicas: Iterable[str], now: float) -> dict[str, int]:
        """What each of the replicas has to do; nothing where nobody heard of it."""
        return {replica: self._of(replica, now) for replica in replicas}

    def _of(self, replica: str, now: float) -> int:
        load = self._loads.get(replica)
        if load is None:
            return 0
        load.forget_before(now - MEMORY_SECONDS)
        return load.reported + sum(tokens for _, tokens in load.sent)
