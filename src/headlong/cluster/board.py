"""What a front knows of its replicas: who is there, what each does, and what was lost. Asks them in a thread.

Knows the fleet as something that can be asked, and no requests.
"""

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from headlong.cluster.fleet import Fleet
from headlong.cluster.wire import Facts, Report
from headlong.engine.client import EngineStats, ReplicaState, ReplicaStatus, Usage
from headlong.engine.metrics import Rates, Totals

POLL_SECONDS = 0.5
GONE_SECONDS = 3.0
"""After how long without a word a replica counts as gone, or as draining while it still has calls."""
KEPT_LOST = 8
"""Lost replicas that are still told of."""
log = logging.getLogger(__name__)


@dataclass
class _Replica:
    """What a replica said last, and when."""

    report: Report
    heard: float


class Board:
    """Every method but `poll` answers at once, from any thread."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._lock = threading.Lock()
        self._there: dict[str, _Replica] = {}
        self._why: dict[str, tuple[float, str]] = {}
        """When calls found a replica dead that has not been heard of since, and what they were told."""
        self._lost: deque[ReplicaStatus] = deque(maxlen=KEPT_LOST)
        self._past = Totals()
        """What replicas did that are gone."""
        self._calls: Counter[str] = Counter()
        """Calls that each replica has."""
        self._given: Counter[tuple[str, str]] = Counter()
        """What each replica was given, by its name and by kind."""
        self._heard = time.monotonic()
        self.trouble: str | None = None
        """Why no replica will come until somebody does something about it; None while one is there or may come."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="headlong-board", daemon=True)

    def start(self) -> None:
        """Asks once, then again and again until `close`."""
        self.poll()
        self._thread.start()

    def close(self) -> None:
        self._stop.set()

    def poll(self) -> None:
        """Asks every replica how it is."""
        asked = time.monotonic()
        reports, now = self._fleet.reports(), time.monotonic()
        with self._lock:
            for report in reports:
                name = report.facts.replica
                self._there[name] = _Replica(report, now)
                if name in self._why and self._why[name][0] < asked:
                    del self._why[name]  # it could not be reached for a while
            for name in [name for name in self._there if self._silent(name) and not self._calls[name]]:
                self._forget(name)
            if reports:
                self._heard = now
        self._note_trouble(None if self.has_any else self._fleet.trouble())

    def _note_trouble(self, trouble: str | None) -> None:
        if trouble is not None and trouble != self.trouble:
            log.error("no replica serves: %s", trouble)
        self.trouble = trouble

    def gave(self, replica: str, kind: Literal["requests", "taken_over", "repeated"], count: int) -> None:
        """A replica was given so many sequences; those of the other kinds are among the requests."""
        with self._lock:
            self._given[replica, kind] += count

    @contextlib.contextmanager
    def call(self, replica: str) -> Iterator[None]:
        """A replica has a call as long as the block lasts. One that is to go says nothing more, and ends its calls."""
        with self._lock:
            self._calls[replica] += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls[replica] -= 1
                if not self._calls[replica]:
                    del self._calls[replica]

    def lost(self, replica: str, why: str) -> None:
        """A call found a replica dead."""
        with self._lock:
            if replica in self._there:
                self._why[replica] = (time.monotonic(), why)

    def has(self, model: str, fingerprint: str) -> bool:
        """Whether there is a replica with this model, and with this fingerprint if it is not empty."""
        with self._lock:
            facts = [one.report.facts for name, one in self._there.items() if self._state(name) == "ready"]
        return any(one.model == model and fingerprint in ("", one.fingerprint) for one in facts)

    @property
    def has_any(self) -> bool:
        """Whether a replica of whatever model has been heard of."""
        return bool(self._there)

    def facts(self, model: str) -> list[Facts]:
        """What the replicas with this model say of themselves, the oldest first."""
        with self._lock:
            facts = [one.report.facts for one in self._there.values()]
        return sorted((one for one in facts if one.model == model), key=lambda one: one.started)

    @property
    def silent_seconds(self) -> float:
        """For how long no replica has been heard of."""
        return time.monotonic() - self._heard

    def replicas(self) -> Sequence[ReplicaStatus]:
        """Returns those that are there, the oldest first, then the last of those that were lost."""
        with self._lock:
            there = [self._status(name) for name in self._there]
            return (*sorted(there, key=lambda one: one.started), *self._lost)

    def stats(self) -> EngineStats:
        """All replicas as one engine, and what those did that are gone."""
        with self._lock:
            told = [one.report.stats for one in self._there.values()]
            totals = Totals().plus(self._past)
        recent = Totals()
        for one in told:
            totals.plus(one.totals)
            recent.plus(one.recent)
        usage = Usage(*(sum(getattr(one.usage, name) for one in told) for name in Usage.__dataclass_fields__))
        return EngineStats(
            usage=usage, totals=totals, recent=recent, rates=_joined([one.rates for one in told])
        )

    def _silent(self, name: str) -> bool:
        return time.monotonic() - self._there[name].heard > GONE_SECONDS

    def _state(self, name: str) -> ReplicaState:
        if name in self._why:
            return "lost"
        return "draining" if self._silent(name) else "ready"

    def _status(self, name: str) -> ReplicaStatus:
        report = self._there[name].report
        return ReplicaStatus(
            id=name,
            state=self._state(name),
            node=report.facts.node,
            started=report.facts.started,
            stats=report.stats,
            requests=self._given[name, "requests"],
            taken_over=self._given[name, "taken_over"],
            repeated=self._given[name, "repeated"],
            why=self._why[name][1] if name in self._why else "",
        )

    def _forget(self, name: str) -> None:
        status = self._status(name)
        if status.state == "lost":
            self._lost.append(replace(status, stats=None))
            log.warning("replica %s is gone: %s", name, status.why)
        assert status.stats is not None
        self._past.plus(status.stats.totals)
        del self._there[name]
        self._why.pop(name, None)
        for kind in ("requests", "taken_over", "repeated"):
            self._given.pop((name, kind), None)

    def _watch(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            try:
                self.poll()
            except Exception:
                log.exception("replicas could not be asked how they are")


def _joined(rates: Sequence[Rates]) -> Rates:
    """Rates of several engines: sums, and means that weigh each by the rows' steps that it makes a second."""
    weights = [(one.rows_per_step or 0.0) * one.steps_per_second for one in rates]

    def mean(name: str) -> float | None:
        pairs = [(getattr(one, name), weight) for one, weight in zip(rates, weights, strict=True)]
        known = [(value, weight) for value, weight in pairs if value is not None and weight]
        total = sum(weight for _, weight in known)
        return sum(value * weight for value, weight in known) / total if total else None

    return Rates(
        tokens_per_second=sum(one.tokens_per_second for one in rates),
        prompt_tokens_per_second=sum(one.prompt_tokens_per_second for one in rates),
        steps_per_second=sum(one.steps_per_second for one in rates),
        tokens_per_step=mean("tokens_per_step"),
        drafts_per_step=mean("drafts_per_step"),
        rows_per_step=mean("rows_per_step"),
    )
