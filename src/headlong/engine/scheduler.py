"""Decides who runs in each step and with how many tokens, and does the bookkeeping of what was emitted.

First come, first served. Running rows go before new ones; when pages run out, drafts shrink first, then the
newest row is put back to wait and later reads its own tokens again, which gives the same tokens. Knows rows,
pages and slots, no tensors.
"""

from collections import deque

from headlong.engine.row import Row
from headlong.sampling.table import SamplingTable
from headlong.state.state import State
from headlong.types import Plan, RowOutput, RowPlan, Verdict


class Scheduler:
    """Owns the queues; asks the state for room."""

    def __init__(self, state: State, table: SamplingTable, chunk_tokens: int) -> None:
        self.state = state
        self.table = table
        self.chunk_tokens = chunk_tokens
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []
        """Oldest first."""
        self.preempted: list[str] = []
        """Rows put back while the last plan was made."""

    def add(self, row: Row) -> None:
        self.waiting.append(row)

    def find(self, row_id: str) -> Row | None:
        return next((row for row in (*self.running, *self.waiting) if row.id == row_id), None)

    def remove(self, row: Row) -> None:
        """Takes a row out, wherever it is, and frees all it held."""
        if row in self.running:
            self._leave(row)
        else:
            self.waiting.remove(row)

    def plan(self) -> Plan:
        self.preempted = []
        budget, plans = self.chunk_tokens, []
        for row in list(self.running):
            if row not in self.running:
                continue  # put back a moment ago, to make room for an older one
            row_plan = self._plan_row(row, budget)
            if row_plan is not None:
                plans.append(row_plan)
                budget -= 0 if row.decoding else row_plan.query_len
        while budget > 0 and self.waiting and not self.preempted and self._admit(self.waiting[0]):
            row = self.waiting.popleft()
            self.running.append(row)
            row_plan = self._plan_row(row, budget)
            assert row_plan is not None, "admission reserved its pages"
            plans.append(row_plan)
            budget -= row_plan.query_len
        plans.sort(key=lambda p: -p.num_certain)
        return Plan(tuple(plans), max((p.num_drafts for p in plans), default=0))

    def finish(self, plan: Plan, verdict: Verdict) -> tuple[RowOutput, ...]:
        """Hands each row its tokens; rows that ended leave."""
        rows = {row.id: row for row in self.running}
        outputs, slots, tokens = [], [], []
        for number, row_plan in enumerate(plan.rows):
            if not row_plan.samples:
                continue
            row = rows[row_plan.request.id]
            emitted, failure = self.table.settle(row_plan.slot, verdict.tokens[number])
            logprobs, accepted = verdict.logprobs[number], verdict.accepted[number]
            output = row.accept(emitted, logprobs, accepted, verdict.rejected[number], failure)
            outputs.append(output)
            if row.finish_reason is not None:
                self._leave(row)
            elif row.request.params.penalised:
                slots.extend([row_plan.slot] * len(emitted))
                tokens.extend(emitted)
        if slots:
            self.table.count(slots, tokens)
        return tuple(outputs)

    def _admit(self, row: Row) -> bool:
        """A slot, and pages for all the row has to read and one token more; or nothing."""
        needed = self.state.pages_for(row.num_tokens + 1)
        if needed > self.state.pages.num_free:
            return False
        held = self.state.admit(row.id)
        if held is None:
            return False
        reserved = self.state.reserve(row.id, row.num_tokens + 1)
        assert reserved, "pages were counted just before"
        self.table.set(held.slot, row.request, row.output)
        row.decoding = False
        return True

    def _plan_row(self, row: Row, budget: int) -> RowPlan | None:
        held = self.state.rows[row.id]
        if row.decoding:
            drafts = min(row.depth_limit, self.state.max_drafts)
            if drafts and not self.state.reserve(row.id, held.length + 1 + drafts):
                drafts = 0
            query_len, known = 1 + drafts, ()
        else:
            drafts, query_len = 0, min(row.num_tokens - held.length, budget)
            known = row.tokens(held.length, held.length + query_len + 1)
        if query_len <= 0 or not self._make_room(row, held.length + query_len):
            return None
        return RowPlan(
            request=row.request,
            slot=held.slot,
            start=held.length,
            query_len=query_len,
            num_drafts=drafts,
            num_replay=held.num_replay,
            pages=tuple(held.pages),
            samples=held.length + query_len - drafts == row.num_tokens,
            num_generated=len(row.output),
            known_tokens=known,
        )

    def _make_room(self, row: Row, length: int) -> bool:
        """Pages for `length` tokens, taken from the newest rows if need be; False if the row itself is the
        newest and had to be put back."""
        while not self.state.reserve(row.id, length):
            newest = self.running[-1]
            self._leave(newest)
            self.waiting.appendleft(newest)
            self.preempted.append(newest.id)
            if newest is row:
                return False
        return True

    def _leave(self, row: Row) -> None:
        self.table.clear(self.state.rows[row.id].slot)
        self.state.release(row.id)
        self.running.remove(row)
