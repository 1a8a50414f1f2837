"""What is sent, how often and when: the requests of a run, its order and its limits. Knows no server and no clock.

Settings that are compared take turns: a round holds one block of every setting at every concurrency, and every
block of a round sends the same requests. Another setting goes first in each round.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headlong.cli.prompts import Conversation
from headlong.errors import ConfigError, RequestError

MAX_REQUESTS = 100_000
"""The most requests of one run, over everything that is compared."""
PER_STREAM, LEAST, ARRIVAL_SECONDS = 3, 8, 10
"""Requests of a block where nobody said how many: per stream, at least, and with arrivals the seconds they last."""

Mtp = str | int | None
"""The `speculative.mtp` of a request; None leaves the field out."""


@dataclass(frozen=True)
class Slot:
    """A place in the run's order: one block to be measured."""

    round: int
    concurrency: int
    mtp: Mtp
    first: int
    """Number of its first request; the number chooses prompt, seed and arrival."""
    requests: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Everything a run sends. `requests` and `duration` are those of each concurrency with each setting."""

    prompts: list[str | Conversation]
    endpoint: str
    fields: dict[str, Any]
    """The fields of every request's body: model, max_tokens, temperature and the like."""
    extra: dict[str, Any]
    """Fields that override all others; null takes a field out."""
    seed: int | None
    concurrencies: list[int]
    mtp: list[Mtp]
    rounds: int
    requests: int | None
    duration: float
    rate: float | None

    def __post_init__(self) -> None:
        if self.endpoint == "completions":
            for prompt in self.prompts:
                if not isinstance(prompt, str):
                    raise RequestError(
                        '--endpoint completions sends texts; --prompts has a line of "messages"'
                    )
        for concurrency in self.concurrencies:
            if self.requests is not None and self.rate is None and self.requests < concurrency:
                raise ConfigError(
                    f"--requests {self.requests}: too few for --concurrency {concurrency}; "
                    f"give at least {concurrency}"
                )
        total = sum(slot.requests for slot in self.slots())
        if total > MAX_REQUESTS:
            raise ConfigError(f"--requests: {total} in all is more than {MAX_REQUESTS}; ask for fewer")

    def body(self, number: int, mtp: Mtp) -> dict[str, Any]:
        """Request `number`, the same for every setting but for its `speculative`."""
        prompt = self.prompts[number % len(self.prompts)]
        body = dict(self.fields)
        if self.endpoint == "completions":
            body["prompt"] = prompt
        elif isinstance(prompt, str):
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["messages"] = prompt
        if self.seed is not None:
            # A prompt that comes again shall not give the same text again.
            body["seed"] = self.seed + number
        if mtp is not None:
            body["speculative"] = {"mtp": mtp}
        return {name: value for name, value in (body | self.extra).items() if value is not None}

    def slots(self) -> Iterator[Slot]:
        for turn in range(self.rounds):
            turned = turn % len(self.mtp)
            for concurrency in self.concurrencies:
                rounds = self._rounds(concurrency)
                if turn >= rounds:
                    continue
                first, count = self._share(concurrency, turn, rounds)
                for mtp in self.mtp[turned:] + self.mtp[:turned]:
                    yield Slot(turn, concurrency, mtp, first, count, self.duration / rounds)

    def _rounds(self, concurrency: int) -> int:
        """The number of rounds: fewer than asked for where a block could not keep all its streams busy."""
        if self.requests is None:
            return self.rounds
        return max(1, min(self.rounds, self.requests // (1 if self.rate else concurrency)))

    def _share(self, concurrency: int, turn: int, rounds: int) -> tuple[int, int]:
        """The first request number and the length of one round's part."""
        if self.requests is None:
            size = max(LEAST, int(ARRIVAL_SECONDS * self.rate) if self.rate else PER_STREAM * concurrency)
            return turn * size, size
        size, more = divmod(self.requests, rounds)
        return turn * size + min(turn, more), size + (turn < more)

    def arrivals(self, slot: Slot) -> Iterator[float]:
        """Seconds after the block's start at which each request is due: a Poisson process of `rate`."""
        assert self.rate is not None
        chance = random.Random(f"{self.seed} {slot.first}")
        at = 0.0
        for _ in range(slot.requests):
            at += chance.expovariate(self.rate)
            yield at
