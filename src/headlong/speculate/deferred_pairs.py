"""Pairs (target hidden, next token) that the MTP head has yet to read, for rows that do not draft at the moment.

Most steps feed the same rows as the step before, a token each: such a run of steps is one list, and a row knows the
runs it is in. Hidden states stay where the target's steps left them until they are wanted. Of a row whose pairs were
written, the last one is kept: when the row drafts again, the head has to say something of it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from headlong.speculate.priming import Pairs
from headlong.state.state import RowState, State
from headlong.types import Plan, Request, Verdict

MAX_WAITING = 64
"""Pairs that wait for each row; then they are to be written. Bounds the memory, and more at once would save nothing."""
ENOUGH = MAX_WAITING // 2
"""Pairs that are written along with those of a row that has so many: one pass for several rows costs little more."""


@dataclass
class _Run:
    """Steps, one after the other, that had a pair for each of the same rows."""

    requests: list[Request]
    most: int
    """Steps after which one of its rows has as many pairs as may wait."""
    tokens: list[list[int]] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    """[rows, D] for each step."""


class _Span(NamedTuple):
    """A row's pairs of a run."""

    run: _Run
    line: int


@dataclass
class _Row:
    held: RowState
    """The state of the row whose pairs these are. A row that was put back and came again holds another."""
    start: int
    """Position of the first that is not written."""
    spans: list[_Span] = field(default_factory=list)
    """What is not written."""
    last: Pairs | None = None
    """The last pair of those that were written."""

    @property
    def num_unwritten(self) -> int:
        return sum(len(span.run.tokens) for span in self.spans)


class DeferredPairs:
    """One for each head."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._rows: dict[str, _Row] = {}
        self._run: _Run | None = None
        """The one that goes on if the next step has the same rows."""

    def add(self, rows: list[tuple[int, int]], plan: Plan, hidden_ND: Tensor, verdict: Verdict) -> list[str]:
        """One pair of each of these rows, given by their number in the plan and their line of the step. Gives the rows
        to write if one of them has as many as may wait."""
        # A prompt's hidden states are not to be kept for the sake of few lines.
        if len(rows) < len(hidden_ND):
            hidden_ND = hidden_ND[torch.tensor([line for _, line in rows], device=hidden_ND.device)]
        requests = [plan.rows[number].request for number, _ in rows]
        run = self._run
        if run is None or run.requests != requests:
            run = self._run = self._begin(requests, [plan.rows[number].start for number, _ in rows])
        return self._append(run, [verdict.tokens[number][0] for number, _ in rows], hidden_ND)

    def go_on(self, plan: Plan, hidden_ND: Tensor, verdict: Verdict) -> list[str] | None:
        """`add` for all rows of a step without drafts, if they are those of the last one and all decode; else None, and
        nothing is changed. Most steps are such: little may be spent on them."""
        run = self._run
        if run is None or run.requests != [row.request for row in plan.rows]:
            return None
        if any(row.known_tokens for row in plan.rows):
            return None
        return self._append(run, [token for (token,) in verdict.tokens], hidden_ND)

    def _append(self, run: _Run, tokens: list[int], hidden_ND: Tensor) -> list[str]:
        run.tokens.append(tokens)
        run.hidden.append(hidden_ND)
        if len(run.tokens) < run.most:
            return []
        return [each.id for each in run.requests if self._rows[each.id].num_unwritten >= ENOUGH]

    def holds(self, row_id: str) -> bool:
        """Whether a pair of the row is here, written or not."""
        return self._living(row_id) is not None

    def count(self, row_id: str) -> int:
        """Pairs of a row that are not written."""
        waiting = self._living(row_id)
        return 0 if waiting is None else waiting.num_unwritten

    def unwritten(self, row_ids: Iterable[str]) -> list[Pairs]:
        """What is to be written of these rows; the caller does it. Their last pairs stay."""
        rows = [row for row_id in row_ids if (row := self._living(row_id)) is not None and row.spans]
        pairs = self._gather(rows)
        for row, own in zip(rows, pairs, strict=True):
            last = own.part(own.end - 1, own.end)
            row.last = last._replace(hidden_ND=last.hidden_ND.clone())  # not to keep all of them for it
            row.start = own.end
            row.spans.clear()
        return pairs

    def take(self, row_ids: Iterable[str]) -> list[Pairs]:
        """All that waits for these rows, from the last that was written on; afterwards nothing does."""
        rows = []
        for row_id in row_ids:
            if (row := self._living(row_id)) is not None:
                rows.append(row)
                del self._rows[row_id]
        return self._gather(rows, whole=True)

    def check(self) -> None:
        """Asserts, between steps, that each living row's pairs are those up to its length, and few enough."""
        for row_id, row in self._rows.items():
            if self._state.rows.get(row_id) is not row.held:
                continue
            end = row.start + row.num_unwritten
            assert end == row.held.length, f"{row_id}: pairs wait up to {end}, not {row.held.length}"
            assert row.num_unwritten < MAX_WAITING, f"{row_id}: too many wait"
            assert not row.held.unprimed, f"{row_id}: a pair before those that wait is missing"
            for run, line in row.spans:
                assert run.requests[line].id == row_id and len(run.tokens) == len(run.hidden)

    def forget_the_gone(self) -> None:
        for row_id in list(self._rows):
            self._living(row_id)

    def _begin(self, requests: list[Request], starts: list[int]) -> _Run:
        self.forget_the_gone()
        run, most = _Run(requests, MAX_WAITING), 0
        for line, (request, start) in enumerate(zip(requests, starts, strict=True)):
            row = self._rows.get(request.id)
            if row is None:
                row = self._rows[request.id] = _Row(self._state.rows[request.id], start)
            most = max(most, row.num_unwritten)
            row.spans.append(_Span(run, line))
        run.most -= most
        return run

    def _living(self, row_id: str) -> _Row | None:
        waiting = self._rows.get(row_id)
        if waiting is not None and self._state.rows.get(row_id) is not waiting.held:
            del self._rows[row_id]
            self._run = None
            return None
        return waiting

    def _gather(self, rows: list[_Row], *, whole: bool = False) -> list[Pairs]:
        """What is not written of these rows, or the `whole` of what is here. No run of theirs goes on."""
        if not rows:
            return []
        self._run = None
        runs = {id(span.run): span.run for row in rows for span in row.spans}
        # [rows, steps, D] and [rows, steps]: what belongs to a row lies together.
        hidden = {key: torch.stack(run.hidden, dim=1) for key, run in runs.items()}
        device = self._state.carry_SD.device
        tokens = {key: torch.tensor(run.tokens, device=device).T for key, run in runs.items()}
        pairs = []
        for row in rows:
            own = [
                Pairs(row.held, row.start, hidden[id(run)][line], tokens[id(run)][line])
                for run, line in row.spans
            ]
            pairs.append(_joined([row.last, *own] if whole and row.last is not None else own))
        return pairs


def _joined(parts: list[Pairs]) -> Pairs:
    """Each going on where the one before it ends."""
    if len(parts) == 1:
        return parts[0]
    return parts[0]._replace(
        hidden_ND=torch.cat([part.hidden_ND for part in parts]),
        tokens_N=torch.cat([part.tokens_N for part in parts]),
    )
