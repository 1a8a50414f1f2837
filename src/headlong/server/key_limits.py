"""What one API key may take: requests and tokens by the minute, rows at a time, seconds of compiling grammars.

Buckets that fill evenly. What a request will cost is known at its end, so a bucket that is not empty lets one in, and
what it took beyond that has to fill up again before the next. Admins are not limited; callers without a key are one.
Rows are counted on the event loop; buckets are safe in any thread.
"""

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from headlong.server import keys
from headlong.server.auth import Caller
from headlong.server.errors import ApiError
from headlong.server.settings import KEY_PREFIX, Settings

MINUTE = 60.0
LIMIT_HEADERS = tuple(
    f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)


class Bucket:
    """An amount that fills up again within a minute, at an even rate, and never holds more."""

    def __init__(self, per_minute: float) -> None:
        self.per_minute = per_minute
        self._level = per_minute
        self._at = time.monotonic()
        self._lock = threading.Lock()

    @property
    def level(self) -> float:
        """What is left now; below zero where more was taken than there was."""
        return self.take(0)

    def take(self, amount: float) -> float:
        """Takes it, whether it is there or not; returns what is left."""
        with self._lock:
            now = time.monotonic()
            filled = min(self.per_minute, self._level + (now - self._at) * self.per_minute / MINUTE)
            self._level, self._at = filled - amount, now
            return self._level

    def seconds_until(self, level: float) -> float:
        return max(0.0, (level - self.level) * MINUTE / self.per_minute)


@dataclass
class Account:
    """What one key has left. A bucket that is None is not limited."""

    requests: Bucket | None
    tokens: Bucket | None
    grammar: Bucket | None
    most_rows: int | None = None
    rows: int = 0

    def spend(self, tokens: int) -> None:
        if self.tokens is not None:
            self.tokens.take(tokens)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Around the compiling of a grammar, in the thread that does it; raises a 429 where too much was compiled."""
        if self.grammar is None:
            yield
            return
        if wait := self.grammar.seconds_until(min(1.0, self.grammar.per_minute) / 1000):
            limit = f"{self.grammar.per_minute:g}"
            raise _refusal(f"this key may compile grammars for {limit} seconds a minute", "grammar", wait)
        started = time.perf_counter()
        try:
            yield
        finally:
            self.grammar.take(time.perf_counter() - started)

    def headers(self) -> dict[str, str]:
        """The limits as OpenAI's API tells them."""
        found = {}
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                found[f"x-ratelimit-limit-{name}"] = f"{bucket.per_minute:.0f}"
                found[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level)))
                found[f"x-ratelimit-reset-{name}"] = f"{bucket.seconds_until(bucket.per_minute):.3f}s"
        return found


class KeyLimits:
    """The accounts of all keys."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._own = {
            keys.fingerprint(keys.digest_of(key)): limits for key, limits in settings.key_limits.items()
        }
        self._accounts: dict[str, Account] = {}

    def account(self, caller: Caller) -> Account:
        if caller.admin:
            return Account(None, None, None)
        if caller.name not in self._accounts:
            rows = self._limit(caller, "rows")
            self._accounts[caller.name] = Account(
                _bucket(self._limit(caller, "requests_per_minute")),
                _bucket(self._limit(caller, "tokens_per_minute")),
                _bucket(self._limit(caller, "grammar_seconds")),
                None if rows is None else int(rows),
            )
        return self._accounts[caller.name]

    def _limit(self, caller: Caller, name: str) -> float | None:
        """The key's own limit, or everybody's."""
        own = self._own.get(caller.name, {})
        return own[name] if name in own else getattr(self._settings, KEY_PREFIX + name)

    @contextlib.contextmanager
    def hold(self, caller: Caller, num_rows: int) -> Iterator[Account]:
        """Counts a request of `num_rows` sequences, or raises a 429 that says when to come back."""
        account = self.account(caller)
        if (most := account.most_rows) is not None:
            if num_rows > most:
                raise ApiError(
                    400, f"n: {num_rows} sequences at once are more than a key may have ({most})", param="n"
                )
            if account.rows + num_rows > most:
                raise _refusal(
                    f"this key has {account.rows} sequences of {most} running or waiting", "rows", 1
                )
        if account.requests is not None and (wait := account.requests.seconds_until(1)):
            raise _refusal(
                f"this key may send {account.requests.per_minute:.0f} requests a minute", "requests", wait
            )
        if account.tokens is not None and (wait := account.tokens.seconds_until(1)):
            raise _refusal(
                f"this key may use {account.tokens.per_minute:.0f} tokens a minute", "tokens", wait
            )
        if account.requests is not None:
            account.requests.take(1)
        account.rows += num_rows
        try:
            yield account
        finally:
            account.rows -= num_rows


def _bucket(per_minute: float | None) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute)


def _refusal(what: str, limit: str, seconds: float) -> ApiError:
    return ApiError(
        429,
        f"{what}; try again later",
        type="rate_limit_error",
        code=f"key_{limit}",
        headers={"retry-after": str(max(1, math.ceil(seconds)))},
    )
