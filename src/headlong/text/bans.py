"""Keeps strings out of a row's text: which tokens may stand next, after each of a step's drafts.

An automaton reads the text byte by byte, wherever tokens cut it; a token that would complete a string may not stand.
Knows tokens by their bytes; knows no model and no sampling.
"""

from collections.abc import Sequence
from threading import Lock

import numpy as np

DONE = -1
"""The state after a banned string. No row ever gets there."""


class Bans:
    """The automaton of some strings over one vocabulary, shared by all rows under the same bans. A state is how much of
    the strings the text ends with."""

    def __init__(self, strings: Sequence[bytes], pieces: Sequence[bytes]) -> None:
        """`pieces` are what each token adds to the text."""
        self._next_SB = _automaton(strings)
        self._pieces = pieces
        lengths_V = np.array([len(piece) for piece in pieces])
        self._order_V = np.argsort(-lengths_V, kind="stable")
        """Tokens by the lengths of their pieces, the longest first."""
        self._flat = np.frombuffer(b"".join(pieces), dtype=np.uint8)
        self._starts_V = (np.cumsum(lengths_V) - lengths_V)[self._order_V]
        longer = np.bincount(lengths_V)[::-1].cumsum()[::-1] if len(lengths_V) else np.zeros(1, dtype=int)
        self._num_longer = longer.tolist()
        """How many tokens have at least so many bytes."""
        self._masks: dict[int, bytes | None] = {}
        self._lock = Lock()
        self.mask(0)

    def after(self, state: int, token: int) -> int:
        """The state after a token."""
        next_SB = self._next_SB
        for byte in self._pieces[token]:
            state = int(next_SB[state, byte])
            if state == DONE:
                break
        return state

    def mask(self, state: int) -> bytes | None:
        """One bit for each token, the lowest first: 0 for those that complete a string. None where none does."""
        with self._lock:
            if state not in self._masks:
                self._masks[state] = self._compute(state)
            return self._masks[state]

    def _compute(self, state: int) -> bytes | None:
        states_V = np.full(len(self._pieces), state)
        done_V = np.zeros(len(self._pieces), dtype=bool)
        for place, count in enumerate(self._num_longer[1:]):
            read = self._flat[self._starts_V[:count] + place]
            states_V[:count] = np.where(done_V[:count], 0, self._next_SB[states_V[:count], read])
            done_V[:count] |= states_V[:count] == DONE
            states_V[:count][done_V[:count]] = 0
        if not done_V.any():
            return None
        allowed_V = np.ones(len(self._pieces), dtype=np.uint8)
        allowed_V[self._order_V[done_V]] = 0
        return np.packbits(allowed_V, bitorder="little").tobytes()


class BanConstraint:
    """One row's output followed through the automaton."""

    failure: str | None = None

    def __init__(self, bans: Bans) -> None:
        self._bans = bans
        self._state = 0

    slow, grace = False, 0.0

    def ready(self, seconds: float = 0.0) -> bool:  # noqa: ARG002
        return True

    def foresee(self, drafts: Sequence[int]) -> int:
        return len(drafts)

    def advance(self, tokens: Sequence[int]) -> int:
        for token in tokens:
            self._state = self._bans.after(self._state, token)
            assert self._state != DONE, "the mask forbids it"
        return len(tokens)

    def masks(
        self,
        drafts: Sequence[int],
        first: int,
        count: int,
        *,
        patient: bool = True,  # noqa: ARG002
    ) -> list[bytes | None]:
        masks: list[bytes | None] = [None] * count
        state = self._state
        for number in range(first + count):
            if number:
                state = self._bans.after(state, drafts[number - 1])
                if state == DONE:
                    break  # this draft will not be accepted
            if number >= first:
                masks[number - first] = self._bans.mask(state)
        return masks


def _automaton(strings: Sequence[bytes]) -> np.ndarray:
    """The state after each state and byte (Aho and Corasick 1975). Letters of ASCII are read in lower case."""
    children: list[dict[int, int]] = [{}]
    ends = [False]
    for string in strings:
        state = 0
        for byte in string.lower():
            if byte not in children[state]:
                children[state][byte] = len(children)
                children.append({})
                ends.append(False)
            state = children[state][byte]
        ends[state] = True
    next_SB = np.zeros((len(children), 256), dtype=np.int32)
    queue, fallback = list(children[0].values()), [0] * len(children)
    for byte, child in children[0].items():
        next_SB[0, byte] = child
    for state in queue:  # grows: states by their depth
        ends[state] = ends[state] or ends[fallback[state]]
        next_SB[state] = next_SB[fallback[state]]
        for byte, child in children[state].items():
            fallback[child] = int(next_SB[fallback[state], byte])
            next_SB[state, byte] = child
            queue.append(child)
    next_SB[:, ord("A") : ord("Z") + 1] = next_SB[:, ord("a") : ord("z") + 1]
    next_SB[np.isin(next_SB, np.flatnonzero(ends))] = DONE
    return next_SB
