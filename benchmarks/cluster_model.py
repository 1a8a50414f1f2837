"""A cluster as a few numbers: what replicas, router and users do to each other, computed event by event.

A replica is a clock: a step takes so long for so many rows and prompt tokens. Its cache holds units of so many tokens,
the least recently used go first. Where requests go, the real index and the real loads decide. Knows no engine, no Ray
and no wall clock: the same numbers in give the same numbers out.
"""

import heapq
import itertools
import random
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from cluster_users import Turn, Users, answer_of
from headlong.cluster.loads import Loads
from headlong.cluster.prefix_index import REPORTED_KEYS, PrefixIndex, page_keys

LOAD_REPORT_SECONDS = 1.0
KEY_REPORTS = 10
"""Every so many of a replica's reports names its pages in the model; what was sent is known without."""


@dataclass(frozen=True)
class Machine:
    """One replica."""

    steps: tuple[tuple[int, float], ...]
    """Seconds of a step by rows, ascending; between them it is a straight line, and beyond the last one, too."""
    prompt_token_seconds: float
    max_rows: int
    chunk_tokens: int
    cache_tokens: int
    tokens_per_step: float = 1.0
    prompt_seconds: float = 0.0
    """What a prompt costs besides its tokens: it is cut at a page, and a checkpoint is kept."""
    chunk_seconds: float = 0.0
    """What it takes to pass on what one row gained in a step."""

    def step_seconds(self, rows: int, prompt_tokens: int) -> float:
        known = [count for count, _ in self.steps]
        after = min(max(1, bisect_left(known, rows)), len(known) - 1)
        (low, fast), (high, slow) = self.steps[after - 1], self.steps[after]
        line = fast + (slow - fast) * (rows - low) / (high - low)
        return line + prompt_tokens * self.prompt_token_seconds + rows * self.chunk_seconds


@dataclass(frozen=True)
class Cluster:
    """Replicas and their front."""

    replicas: int
    machine: Machine
    routing: Literal["prefix", "random"] = "prefix"
    cores: float | None = None
    """Cores that all replicas and the front share; None where each has its own."""
    beside_seconds: float = 0.0
    """The processor's time that the front and Ray take for every step, beside it."""


@dataclass(eq=False)
class _Row:
    turn: Turn
    asked: float
    unread: int
    """Tokens of its prompt that are still to be read."""
    left: float
    first: float = 0.0


@dataclass
class Outcome:
    """What came of it."""

    seconds: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first: list[float] = field(default_factory=list)
    """Seconds until each answer's first token."""
    speeds: list[float] = field(default_factory=list)
    """Tokens a second of each answer after its first."""
    busy_seconds: float = 0.0
    """Of all replicas together."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)


class _Replica:
    """One replica's rows and cache; whoever runs it keeps the time."""

    def __init__(self, name: str, machine: Machine, unit: int) -> None:
        self.name, self.machine, self.unit = name, machine, unit
        self.waiting: deque[_Row] = deque()
        self.reading: list[_Row] = []
        self.writing: list[_Row] = []
        self.cache: OrderedDict[bytes, None] = OrderedDict()
        self.stepping = False
        self.reports = 0

    @property
    def queued_tokens(self) -> int:
        rows = (*self.waiting, *self.reading, *self.writing)
        return int(sum(row.unread + row.left for row in rows))

    def admit(self, outcome: Outcome) -> None:
        while self.waiting and len(self.reading) + len(self.writing) < self.machine.max_rows:
            row = self.waiting.popleft()
            cached = self._cached(row.turn.prompt) * self.unit
            outcome.prompt_tokens += row.unread
            outcome.cached_tokens += cached
            row.unread -= cached
            self.reading.append(row)

    def step(self) -> tuple[float, list[_Row], list[_Row]]:
        """Seconds of the next step alone, the rows that begin to write in it, and those that end."""
        machine, budget, begun = self.machine, self.machine.chunk_tokens, []
        for row in self.reading:
            part = min(budget, row.unread)
            row.unread -= part
            budget -= part
            if not row.unread:
                begun.append(row)
        rows = len(self.writing) + len(self.reading)
        seconds = machine.step_seconds(rows, machine.chunk_tokens - budget)
        seconds += machine.prompt_seconds * len(begun)
        for row in self.writing:
            row.left -= machine.tokens_per_step
        for row in begun:
            row.left -= 1
        self.reading = [row for row in self.reading if row.unread]
        ended = [row for row in (*self.writing, *begun) if row.left <= 0]
        self.writing = [row for row in (*self.writing, *begun) if row.left > 0]
        return seconds, begun, ended

    def keep(self, units: Sequence[int]) -> None:
        """Puts a sequence into the cache, its beginning as what was used last."""
        for key in reversed(page_keys((*units, 0), 1)):
            self.cache[key] = None
            self.cache.move_to_end(key)
        while len(self.cache) * self.unit > self.machine.cache_tokens:
            self.cache.popitem(last=False)

    def _cached(self, units: Sequence[int]) -> int:
        keys = page_keys(units, 1)
        count = sum(1 for _ in itertools.takewhile(self.cache.__contains__, keys))
        for key in reversed(keys[:count]):
            self.cache.move_to_end(key)
        return count


class Simulation:
    """One cluster and its users. `run` it once."""

    def __init__(self, cluster: Cluster, users: Users, seed: int = 0) -> None:
        self._cluster, self._users = cluster, users
        names = [f"{number:04}" for number in range(cluster.replicas)]
        self._replicas = {name: _Replica(name, cluster.machine, users.unit) for name in names}
        self._index, self._loads, self._rng = PrefixIndex(seed=seed), Loads(), random.Random(seed)
        self._events: list[tuple[float, int, str, object]] = []
        self._order = itertools.count()
        self._pending = 0
        """Events but for reports, which come for ever."""
        self._outcome = Outcome()

    def run(self, seconds: float | None = None, warm_up: float = 0.0) -> Outcome:
        """Until nobody asks any more, or for so many seconds after the warm-up, in which nothing is counted."""
        for when, turn in self._users.begin():
            self._at(when, "ask", turn)
        for replica in self._replicas.values():
            self._at(LOAD_REPORT_SECONDS * self._rng.random(), "report", replica)
        now, warm = 0.0, not warm_up
        while self._pending:
            now, _, kind, what = heapq.heappop(self._events)
            self._pending -= kind != "report"
            if not warm and now >= warm_up:
                warm, self._outcome = True, Outcome()
            if seconds is not None and now > warm_up + seconds:
                now = warm_up + seconds
                break
            getattr(self, f"_{kind}")(what, now)
        self._outcome.seconds = now - warm_up
        return self._outcome

    def _at(self, when: float, kind: str, what: object) -> None:
        self._pending += kind != "report"
        heapq.heappush(self._events, (when, next(self._order), kind, what))

    def _ask(self, turn: Turn, now: float) -> None:
        unit = self._users.unit
        row = _Row(turn, now, len(turn.prompt) * unit, turn.answer_units * unit)
        weight = int(row.unread + row.left)
        if self._cluster.routing == "random":
            name = self._rng.choice(list(self._replicas))
        else:
            name = self._index.choose(turn.prompt, weight, self._loads.of(self._replicas, now)).replicas[0]
            self._loads.sent(_call(turn), name, weight, now)
            self._index.sent(name, turn.prompt)
        replica = self._replicas[name]
        replica.waiting.append(row)
        self._start(replica, now)

    def _start(self, replica: _Replica, now: float) -> None:
        if replica.stepping:
            return
        replica.admit(self._outcome)
        if not (replica.reading or replica.writing):
            return
        seconds, begun, ended = replica.step()
        replica.stepping = True
        seconds *= self._slowdown(seconds)
        self._outcome.busy_seconds += seconds
        self._at(now + seconds, "end", (replica, begun, ended))

    def _slowdown(self, seconds: float) -> float:
        """How much longer a step of so many seconds takes that shares its cores with others."""
        if self._cluster.cores is None:
            return 1.0
        stepping = sum(replica.stepping for replica in self._replicas.values())
        return max(1.0, stepping * (1 + self._cluster.beside_seconds / seconds) / self._cluster.cores)

    def _end(self, what: tuple[_Replica, list[_Row], list[_Row]], now: float) -> None:
        replica, begun, ended = what
        replica.stepping = False
        for row in begun:
            row.first = now
            self._outcome.first.append(now - row.asked)
            replica.keep(row.turn.prompt)
        for row in ended:
            self._finish(row, replica, now)
        self._start(replica, now)

    def _finish(self, row: _Row, replica: _Replica, now: float) -> None:
        turn, outcome = row.turn, self._outcome
        count = turn.answer_units * self._users.unit
        outcome.tokens += count
        if now > row.first:
            outcome.speeds.append((count - 1) / (now - row.first))
        replica.keep((*turn.prompt, *answer_of(turn)))
        self._loads.done(_call(turn))
        following = self._users.follow(turn, now)
        if following is not None:
            self._at(following[0], "ask", following[1])

    def _report(self, replica: _Replica, now: float) -> None:
        self._loads.report(replica.name, replica.queued_tokens)
        if replica.reports % KEY_REPORTS == 0:
            keys = list(itertools.islice(reversed(replica.cache), REPORTED_KEYS))
            self._index.report(replica.name, keys, 1)
        replica.reports += 1
        self._at(now + LOAD_REPORT_SECONDS, "report", replica)


def _call(turn: Turn) -> str:
    return f"{turn.conversation}-{turn.number}"
