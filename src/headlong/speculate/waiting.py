"""Pairs (target hidden, next token) that the MTP head has yet to read, for rows that do not draft at the moment.

Hidden states stay where the target's steps left them until they are wanted. Of a row whose pairs were written, the
last one stays: when the row drafts again, the head has to say something of it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headlong.speculate.priming import Pairs
from headlong.state.state import RowState, State
from headlong.types import Plan, Verdict

MAX_WAITING = 64
"""Pairs that wait for each row; then they are to be written. Bounds the memory, and more at once would save nothing."""


class Place(NamedTuple):
    """Where a hidden state is: in which step's tensor, and which line of it."""

    step: int
    line: int


@dataclass
class _Row:
    held: RowState
    """Whose the pairs are. A row that was put back and came again holds another."""
    start: int
    """Position of the first."""
    tokens: list[int]
    places: list[Place]
    num_written: int = 0
    """Of the first ones, keys and values are in place: of one at most."""

    @property
    def num_unwritten(self) -> int:
        return len(self.tokens) - self.num_written


class WaitingPairs:
    """One for each head."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._rows: dict[str, _Row] = {}
        self._steps: dict[int, Tensor] = {}
        """Hidden states of the steps that rows wait since, oldest first."""
        self._number = 0

    def add(self, rows: list[tuple[int, int]], plan: Plan, hidden_ND: Tensor, verdict: Verdict) -> list[str]:
        """One pair of each of these rows, given by their number in the plan and their line of the step. Gives the rows
        that have enough."""
        # A prompt's hidden states are not to be kept for the sake of few lines.
        if len(rows) < len(hidden_ND):
            hidden_ND = hidden_ND[torch.tensor([line for _, line in rows], device=hidden_ND.device)]
        self._number += 1
        self._steps[self._number] = hidden_ND
        full = []
        for line, (number, _) in enumerate(rows):
            row = plan.rows[number]
            waiting = self._rows.get(row.request.id)
            if waiting is None:
                held = self._state.rows[row.request.id]
                waiting = self._rows[row.request.id] = _Row(held, row.start, [], [])
            waiting.tokens.append(verdict.tokens[number][0])
            waiting.places.append(Place(self._number, line))
            age = self._number - waiting.places[0].step
            if waiting.num_unwritten >= MAX_WAITING or age > 2 * MAX_WAITING:
                full.append(row.request.id)
        return full

    def count(self, row_id: str) -> int:
        """Pairs of a row that are not written."""
        waiting = self._rows.get(row_id)
        return 0 if waiting is None else waiting.num_unwritten

    def unwritten(self, row_ids: Iterable[str]) -> list[Pairs]:
        """What is to be written of these rows; the caller does it. Their last pairs stay."""
        found = []
        for row_id in row_ids:
            waiting = self._living(row_id)
            if waiting is not None and waiting.num_unwritten:
                found.append((waiting, waiting.num_written))
        pairs = self._gather(found)
        for waiting, _ in found:
            waiting.start += len(waiting.tokens) - 1
            del waiting.tokens[:-1], waiting.places[:-1]
            waiting.num_written = 1
        self._trim()
        return pairs

    def take(self, row_ids: Iterable[str]) -> list[Pairs]:
        """All that waits for these rows; afterwards nothing does."""
        found = []
        for row_id in row_ids:
            waiting = self._living(row_id)
            if waiting is not None:
                found.append((waiting, 0))
                del self._rows[row_id]
        pairs = self._gather(found)
        self._trim()
        return pairs

    def check(self) -> None:
        """Asserts, between steps, that each living row's pairs are those up to its length, and few enough."""
        for row_id, row in self._rows.items():
            if self._state.rows.get(row_id) is not row.held:
                continue
            end = row.start + len(row.tokens)
            assert end == row.held.length, f"{row_id}: pairs wait up to {end}, not {row.held.length}"
            assert 0 <= row.num_unwritten < MAX_WAITING and row.num_written <= 1, f"{row_id}: too many wait"
            assert not row.held.unprimed, f"{row_id}: a pair before those that wait is missing"
            assert len(row.places) == len(row.tokens) and all(p.step in self._steps for p in row.places)

    def forget_the_gone(self) -> None:
        count = len(self._rows)
        for row_id in list(self._rows):
            self._living(row_id)
        if len(self._rows) < count:
            self._trim()

    def _living(self, row_id: str) -> _Row | None:
        waiting = self._rows.get(row_id)
        if waiting is not None and self._state.rows.get(row_id) is not waiting.held:
            del self._rows[row_id]
            return None
        return waiting

    def _gather(self, rows: list[tuple[_Row, int]]) -> list[Pairs]:
        """Each row's pairs from the given one on."""
        if not rows:
            return []
        steps = sorted({place.step for row, first in rows for place in row.places[first:]})
        begins, total = {}, 0
        for step in steps:
            begins[step] = total
            total += len(self._steps[step])
        lines = [begins[place.step] + place.line for row, first in rows for place in row.places[first:]]
        together_ND = torch.cat([self._steps[step] for step in steps])
        hidden_ND = together_ND[torch.tensor(lines, device=together_ND.device)]
        pairs, done = [], 0
        for row, first in rows:
            tokens = row.tokens[first:]
            pairs.append(Pairs(row.held, row.start + first, hidden_ND[done : done + len(tokens)], tokens))
            done += len(tokens)
        return pairs

    def _trim(self) -> None:
        oldest = min((row.places[0].step for row in self._rows.values()), default=self._number + 1)
        for step in [step for step in self._steps if step < oldest]:
            del self._steps[step]
