"""Who asks a simulated cluster, what, and when: the users of `turns_of_many.py`, and many who think before they ask.

A prompt is a sequence of numbers, each of which stands for one unit of tokens. Knows no cluster.
"""

import itertools
import random
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from turns_of_many import Workload


@dataclass(frozen=True)
class Turn:
    """One request of a conversation."""

    conversation: int
    number: int
    prompt: tuple[int, ...]
    """What stands for its tokens, a number for each unit of them."""
    answer_units: int


class Users(Protocol):
    """Whoever asks."""

    unit: int
    """Tokens of a unit."""

    def begin(self) -> list[tuple[float, Turn]]:
        """The first turns, and when they are asked."""
        ...

    def follow(self, turn: Turn, now: float) -> tuple[float, Turn] | None:
        """What is asked after a turn was answered, if anything, and when."""
        ...


class Queue:
    """The users of `turns_of_many.py`: so many turns at a time, a conversation's next after all others had theirs."""

    def __init__(self, workload: Workload, unit: int = 16) -> None:
        self.unit, self._workload = unit, workload
        for name in ("family_tokens", "first_tokens", "question_tokens", "answer_tokens"):
            assert getattr(workload, name) % unit == 0, f"{name} is not a multiple of {unit}"
        self._waiting = deque(self._first(number) for number in range(workload.conversations))

    def begin(self) -> list[tuple[float, Turn]]:
        return [
            (0.0, self._waiting.popleft()) for _ in range(min(self._workload.clients, len(self._waiting)))
        ]

    def follow(self, turn: Turn, now: float) -> tuple[float, Turn] | None:
        if turn.number + 1 < self._workload.turns:
            asked = self._workload.question_tokens // self.unit
            self._waiting.append(next_turn(turn, asked, turn.answer_units))
        return (now, self._waiting.popleft()) if self._waiting else None

    def _first(self, conversation: int) -> Turn:
        work = self._workload
        shared = family_units(conversation % work.families, work.family_tokens // self.unit)
        own = own_units(conversation, 0, work.first_tokens // self.unit)
        return Turn(conversation, 0, (*shared, *own), work.answer_tokens // self.unit)


@dataclass(frozen=True)
class Habits:
    """Users who think before they ask; lengths are in tokens."""

    users: int
    think_seconds: float
    """Between an answer's end and the next question, on average; exponentially distributed."""
    turns: int
    families: int
    family_tokens: int
    question_tokens: int
    answer_tokens: int
    """On average; exponentially distributed, and cut at four times as much."""


class Thinkers:
    """So many users, each in a conversation; after its last turn a user begins another one."""

    def __init__(self, habits: Habits, unit: int = 64, seed: int = 0) -> None:
        self.unit, self._habits, self._rng = unit, habits, random.Random(seed)
        self._conversations = itertools.count()

    def begin(self) -> list[tuple[float, Turn]]:
        return [(self._pause(), self._somewhere()) for _ in range(self._habits.users)]

    def follow(self, turn: Turn, now: float) -> tuple[float, Turn] | None:
        if turn.number + 1 == self._habits.turns:
            return now + self._pause(), self._first()
        return now + self._pause(), self._next(turn)

    def _somewhere(self) -> Turn:
        """A turn of a conversation that began before the clock did."""
        turn = self._first()
        for _ in range(self._rng.randrange(self._habits.turns)):
            turn = self._next(turn)
        return turn

    def _next(self, turn: Turn) -> Turn:
        return next_turn(turn, max(1, round(self._habits.question_tokens / self.unit)), self._length())

    def _first(self) -> Turn:
        conversation, habits = next(self._conversations), self._habits
        shared = family_units(self._rng.randrange(habits.families), habits.family_tokens // self.unit)
        own = own_units(conversation, 0, max(1, round(habits.question_tokens / self.unit)))
        return Turn(conversation, 0, (*shared, *own), self._length())

    def _pause(self) -> float:
        return self._rng.expovariate(1 / self._habits.think_seconds)

    def _length(self) -> int:
        mean = self._habits.answer_tokens
        return max(1, round(min(4 * mean, self._rng.expovariate(1 / mean)) / self.unit))


def next_turn(turn: Turn, asked: int, answer_units: int) -> Turn:
    """The turn after this one, with all that was said."""
    question = own_units(turn.conversation, turn.number + 1, asked)
    return Turn(turn.conversation, turn.number + 1, (*turn.prompt, *answer_of(turn), *question), answer_units)


def answer_of(turn: Turn) -> tuple[int, ...]:
    """What stands for the tokens of a turn's answer."""
    first = (turn.conversation << 20) + (turn.number << 12) + (1 << 11)
    return tuple(range(first, first + turn.answer_units))


def own_units(conversation: int, number: int, count: int) -> tuple[int, ...]:
    """What stands for the tokens that a user adds before a turn."""
    first = (conversation << 20) + (number << 12)
    return tuple(range(first, first + count))


def family_units(family: int, count: int) -> tuple[int, ...]:
    """What stands for a beginning that many conversations share."""
    return tuple(range(-(family + 1) << 20, (-(family + 1) << 20) + count))
