"""Which replica has read the beginning of a prompt already, and which one a request should go to.

Replicas tell from time to time which pages their prefix caches hold, as keys of `state/prefix.py`; between two reports
it counts what was sent to them since. A request goes where most of its prompt lies, unless that replica is clearly
busier than another one; where nothing lies anywhere, to the less busy one of two that are drawn. Nothing here is
binding: whoever guesses wrong reads a prompt once more. Knows no Ray and no engine.
"""

import random
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from headlong.state.prefix import ROOT, key_of

KEY_BYTES = 8
"""Bytes of a page's key that are kept: two pages that are taken for one cost no more than a detour."""
KEPT_REPORTS = 8
"""What was sent to a replica counts as cached for so many reports, though they do not name it: it may still wait."""
REPORTED_KEYS = 2048
"""The most keys that a replica reports; one that reports fewer has no others."""
SLACK_REQUESTS = 8
SLACK_SHARE = 0.5
"""A replica is clearly busier than another if it is ahead of it by more than so many requests like the one to place,
and by more than this share of what the other has to do, each times the share of the prompt that its cache holds."""


def short(key: bytes) -> bytes:
    """A page's key as it is reported and kept."""
    return key[:KEY_BYTES]


def page_keys(tokens: Sequence[int], page_size: int) -> list[bytes]:
    """The short keys of the full pages of a prompt that leave a token to read."""
    keys, parent = [], ROOT
    for end in range(page_size, len(tokens), page_size):
        parent = key_of(parent, tokens[end - page_size : end])
        keys.append(short(parent))
    return keys


@dataclass
class _Holdings:
    """What one replica is thought to hold."""

    page_size: int
    reports: int = 0
    keys: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    """The report until which each key counts without being named; the least recently used key first."""


@dataclass(frozen=True)
class Choice:
    """Where a request should go."""

    replicas: tuple[str, ...]
    """All that were asked about, the best first."""
    cached_tokens: int
    """How much of the prompt the first of them is thought to have."""


class PrefixIndex:
    """What each replica holds, in bounded memory. Two of them with one seed that are told the same choose alike."""

    def __init__(self, max_keys: int = 262_144, seed: int = 0) -> None:
        """`max_keys` bounds the keys of all replicas together, of which each has an equal share."""
        self.max_keys = max_keys
        self._rng = random.Random(seed)
        self._holdings: dict[str, _Holdings] = {}
        self._holders: dict[bytes, set[str]] = {}

    def __len__(self) -> int:
        """How many keys are kept, once for each replica that holds them."""
        return sum(len(held.keys) for held in self._holdings.values())

    @property
    def replicas(self) -> Collection[str]:
        return self._holdings.keys()

    def report(self, replica: str, keys: Sequence[bytes], page_size: int) -> None:
        """What a replica says that its cache holds, the last used first. Where it could have named more, what it does
        not name is gone, but for what was sent there lately."""
        held = self._of(replica, page_size)
        held.reports += 1
        for key in reversed(keys):
            self._hold(replica, held, short(key), held.reports)
        if len(keys) < REPORTED_KEYS:
            for key in [key for key, until in held.keys.items() if until < held.reports]:
                self._drop(replica, held, key)
        self._trim(replica, held)

    def sent(self, replica: str, tokens: Sequence[int]) -> None:
        """A prompt was sent to a replica, which will hold its pages once it has read them. Of a replica that has not
        reported yet nobody knows how long its pages are: its first report will name them."""
        held = self._holdings.get(replica)
        if held is None:
            return
        for key in reversed(page_keys(tokens, held.page_size)):
            self._hold(replica, held, key, held.reports + KEPT_REPORTS)
        self._trim(replica, held)

    def forget(self, replica: str) -> None:
        """The replica is gone, and its cache with it."""
        held = self._holdings.pop(replica, None)
        for key in () if held is None else list(held.keys):
            self._let_go(replica, key)

    def cached(self, tokens: Sequence[int], replicas: Collection[str]) -> dict[str, int]:
        """How many of the prompt's first tokens each of the replicas is thought to have."""
        found = dict.fromkeys(replicas, 0)
        by_size: dict[int, set[str]] = {}
        for replica in found.keys() & self._holdings.keys():
            by_size.setdefault(self._holdings[replica].page_size, set()).add(replica)
        for page_size, searched in by_size.items():
            keys = page_keys(tokens, page_size)
            for number in range(len(keys), 0, -1):
                holders = searched & self._holders.get(keys[number - 1], set())
                found |= dict.fromkeys(holders, number * page_size)
                searched -= holders
                if not searched:
                    break
        return found

    def choose(self, tokens: Sequence[int], weight: int, loads: Mapping[str, int]) -> Choice:
        """Ranks the replicas for a request of `weight` tokens, given the tokens that each of them has still to do. The
        one with most of the prompt comes first of those that are not clearly busier than the least busy one; where
        none has any of it, the less busy one of two that are drawn at random. The others follow, the least busy
        first."""
        if not loads:
            return Choice((), 0)
        cached = self.cached(tokens, loads)
        by_load = sorted(loads, key=lambda replica: (loads[replica], -cached[replica], replica))
        idle = by_load[0]
        by_cached = sorted(by_load, key=lambda replica: -cached[replica])
        best = next(
            one
            for one in by_cached
            if not clearly_busier(loads[one], loads[idle], cached[one] / max(1, len(tokens)), weight)
        )
        if not cached[best]:
            best = self._less_busy_of_two(loads)
        return Choice((best, *(one for one in by_load if one != best)), cached[best])

    def check(self) -> None:
        """Asserts that both sides of the index say the same, and that it keeps to its bound."""
        pairs = {(replica, key) for replica, held in self._holdings.items() for key in held.keys}
        assert pairs == {(replica, key) for key, names in self._holders.items() for replica in names}
        assert all(self._holders.values()), "a key that nobody holds"
        assert all(len(held.keys) <= self._share for held in self._holdings.values())

    @property
    def _share(self) -> int:
        return self.max_keys // max(1, len(self._holdings))

    def _less_busy_of_two(self, loads: Mapping[str, int]) -> str:
        names = sorted(loads)
        drawn = self._rng.sample(names, min(2, len(names)))
        return min(drawn, key=lambda replica: loads[replica])

    def _of(self, replica: str, page_size: int) -> _Holdings:
        held = self._holdings.get(replica)
        if held is not None and held.page_size != page_size:
            self.forget(replica)
            held = None
        if held is None:
            held = self._holdings[replica] = _Holdings(page_size)
            for other, theirs in self._holdings.items():
                self._trim(other, theirs)
        return held

    def _hold(self, replica: str, held: _Holdings, key: bytes, until: int) -> None:
        held.keys[key] = max(until, held.keys.get(key, 0))
        held.keys.move_to_end(key)
        self._holders.setdefault(key, set()).add(replica)

    def _trim(self, replica: str, held: _Holdings) -> None:
        for key in list(islice(held.keys, max(0, len(held.keys) - self._share))):
            self._drop(replica, held, key)

    def _drop(self, replica: str, held: _Holdings, key: bytes) -> None:
        del held.keys[key]
        self._let_go(replica, key)

    def _let_go(self, replica: str, key: bytes) -> None:
        self._holders[key].discard(replica)
        if not self._holders[key]:
            del self._holders[key]


def clearly_busier(load: int, other: int, held: float, weight: int) -> bool:
    """Whether a replica with `load` tokens to do is to be spared in favour of one with `other`, though its cache holds
    the share `held` of the prompt of a request of `weight` tokens."""
    return load - other > held * max(SLACK_REQUESTS * weight, SLACK_SHARE * other)
