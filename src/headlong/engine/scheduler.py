"""Decides who runs in each step and with how many tokens, and does the bookkeeping of what was emitted.

Lower priorities go first, and within one tenants take turns, each with its rows as they came; nobody is overtaken
without end. Running rows go before waiting ones of the same priority; when pages run out, drafts shrink first, then the
last in rank is put back to wait. A row that waits may send less urgent ones back if that lets it in. What a row had is
offered to the prefix cache when it leaves; back again, it reads what is not there any more, which gives the same
tokens. Knows rows, pages and slots, no tensors.
"""

import itertools
import time
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from headlong.engine.chunk_pace import ChunkPace
from headlong.engine.row import FAULT, Row
from headlong.engine.turns import Turns
from headlong.sampling.table import SamplingTable
from headlong.speculate.depth import Depths, Wish
from headlong.state.state import State
from headlong.types import Plan, RowOutput, RowPlan, Verdict

FlushDeferred = Callable[[Iterable[str]], None]
"""Told which rows' pages are about to be offered to others: what was put off for them is to be written now."""

TOLD_PRICE = 4
"""How many tokens of a prompt one counts as whose log-probabilities are told: it takes about so much longer."""
MOMENT = 0.02
"""The seconds for which a step waits for a row's mask where there is nothing else to do."""


def _nothing_deferred(_row_ids: Iterable[str]) -> None:
    pass


class Scheduler:
    """Owns the queues; asks the state for room."""

    def __init__(
        self,
        state: State,
        table: SamplingTable,
        depths: Depths,
        chunk_tokens: int,
        flush_deferred: FlushDeferred = _nothing_deferred,
        pace: ChunkPace | None = None,
    ) -> None:
        self.state = state
        self.table = table
        self.depths = depths
        self.chunk_tokens = chunk_tokens
        """Tokens of a step that rows share, decoding ones first; at least a page, or as many as there are, are left
        for prompts."""
        self.flush_deferred = flush_deferred
        self.pace = pace
        """What bounds prompts while other rows decode, where it is not `chunk_tokens` alone."""
        self.waiting: list[Row] = []
        """Rows without a slot, by rank, as those that run are."""
        self.running: list[Row] = []
        self.preempted: list[str] = []
        """Rows put back while the last plan was made."""
        self.outputs: list[RowOutput] = []
        """What rows gained since then. A fault on the way leaves what was already handed out."""
        self.only: frozenset[str] | None = None
        """The rows that may run, while a fault is being narrowed down; None is everybody."""
        self._alone: Row | None = None
        """The row that has this step for itself."""
        self._numbers = itertools.count()
        self._turns = Turns()

    def add(self, row: Row) -> None:
        row.number = next(self._numbers)
        row.turn = self._turns.now() if row.request.again else self._turns.next(row.request.tenant)
        self._queue(row)

    def find(self, row_id: str) -> Row | None:
        return next((row for row in (*self.running, *self.waiting) if row.id == row_id), None)

    def remove(self, row: Row) -> None:
        """Takes a row out, wherever it is, and frees all it held."""
        if row in self.running:
            self._leave([row])
        else:
            self.waiting.remove(row)

    def begin(self) -> None:
        """A new step."""
        self.preempted, self.outputs = [], []

    def plan(self) -> Plan:
        self.begin()
        self._alone = None
        self._admit_urgent()
        self._alone = next((row for row in self.running if row.alone and self._may_run(row)), None)
        resting = self._resting()
        depths, plans = self._choose_depths(resting), []
        budget = self._prompt_budget(depths)
        for row in list(self.running):
            if not self._may_run(row) or row not in self.running or row.id in resting:
                continue  # the latter was put back a moment ago, to make room for one before it
            row_plan = self._plan_row(row, budget, depths.get(row.id, 0))
            if row_plan is not None:
                plans.append(row_plan)
                budget -= 0 if row.decoding else row_plan.query_len * self._price(row)
        while budget > 0 and not self.preempted:
            row = self._next_waiting()
            if row is None or not self._admit(row):
                break
            if row.alone:
                self._alone = row
                if plans:
                    break  # the next step is its own
            row_plan = self._plan_row(row, budget, depth=0)
            assert row_plan is not None, "admission reserved its pages"
            plans.append(row_plan)
            budget -= row_plan.query_len * self._price(row)
        plans.sort(key=lambda p: -p.num_certain)
        return Plan(tuple(plans), max((p.num_drafts for p in plans), default=0), self.depths.draft_stop)

    def plan_ahead(self, plan: Plan) -> Plan | None:
        """The step after this one, of rows that all decode, before anybody knows what it gives: starts are the furthest
        they can be. None where what it gives may change who runs or how deep they draft, or room is short."""
        running = {row.id: row for row in self.running}
        if self.waiting or self.only is not None or [p.request.id for p in plan.rows] != list(running):
            return None
        if any(row.request.params.stop for row in running.values()):
            return None
        depths = self.depths.again({row.id: self._wish(row) for row in running.values()})
        if depths is None:
            return None
        for row, row_plan in zip(running.values(), plan.rows, strict=True):
            most = row_plan.query_len + 1 + depths[row.id]
            if row.num_left < most or not self.state.reserve(row.id, self.state.rows[row.id].length + most):
                return None
        ahead = [self._after(row_plan, depths[row_plan.request.id]) for row_plan in plan.rows]
        return Plan(tuple(ahead), max(row.num_drafts for row in ahead))

    def _after(self, row: RowPlan, depth: int) -> RowPlan:
        held = self.state.rows[row.request.id]
        start = held.length + row.query_len
        return replace(row, start=start, query_len=1 + depth, num_drafts=depth, pages=tuple(held.pages))

    def finish(self, plan: Plan, verdict: Verdict) -> tuple[RowOutput, ...]:
        """Hands each row its tokens; rows that ended leave, and prompts offer what was read of them to others."""
        rows = {row.id: row for row in self.running}
        for row_id, part in verdict.read.items():
            if row_id in rows:  # poisoned ones read again
                rows[row_id].read(part)
        counted = []
        for number, row_plan in enumerate(plan.rows):
            if not row_plan.samples:
                continue
            row = rows[row_plan.request.id]
            emitted, failure = self.table.commit(row_plan.slot, verdict.tokens[number])
            logprobs, accepted = verdict.logprobs[number], verdict.accepted[number]
            try:
                output = row.accept(emitted, logprobs, accepted, verdict.rejected[number], failure)
            except Exception as error:  # text that cannot be told concerns its row alone
                output = row.fail(f"{FAULT}: {error!r}")
            self.outputs.append(output)
            if row.finish_reason is None and row.request.params.penalised:
                counted.append((row_plan.slot, emitted))
        for slot, tokens in counted:
            self.table.count(slot, tokens)
        self._leave([row for row in rows.values() if row.finish_reason is not None])
        self._publish([rows[p.request.id] for p in plan.rows if p.known_tokens])
        return tuple(self.outputs)

    def recall(self) -> list[Row]:
        """After a fault: everything is freed, nothing of it is kept for others, and rows that go on are put back to
        wait in their order and to read their own tokens again. Gives them, and one whose admission was cut short."""
        rows = [row for row in self.running if row.finish_reason is None]
        half_admitted = [row for row in self.waiting if row.id in self.state.rows]
        for slot in range(len(self.table.requests)):
            self.table.clear(slot)
        for row_id in list(self.state.rows):
            self.state.release(row_id)
        self.running.clear()
        for row in rows:
            self._queue(row)
        return rows + half_admitted

    def put_back(self, row: Row) -> None:
        """Like `recall`, for one row."""
        self.discard(row)
        self._queue(row)
        self.preempted.append(row.id)

    def discard(self, row: Row) -> None:
        """Takes a row out, wherever it is, and keeps nothing of its state for others."""
        if row not in self.running:
            self.waiting.remove(row)
            return
        self.table.clear(self.state.rows[row.id].slot)
        self.state.release(row.id)
        self.running.remove(row)

    def _may_run(self, row: Row) -> bool:
        return (self.only is None or row.id in self.only) and self._alone in (None, row)

    def _queue(self, row: Row) -> None:
        insort(self.waiting, row, key=lambda row: row.rank)

    def _next_waiting(self) -> Row | None:
        return next((row for row in self.waiting if self._may_run(row)), None)

    def _admit(self, row: Row) -> bool:
        """A slot, and pages for all the row has to read and one token more; or nothing."""
        tokens, extras = row.tokens(0, row.num_tokens), row.request.prefix_extras
        held = self.state.admit(row.id, tokens, extras=extras, **self._wants(row))
        if held is None:
            return False
        self.table.set(held.slot, row.request, row.output)
        row.decoding = False
        if row.num_cached is None:
            row.num_cached, row.admitted = held.num_cached, time.perf_counter()
        self._turns.serve(row.turn)
        self.waiting.remove(row)
        insort(self.running, row, key=lambda row: row.rank)
        return True

    @staticmethod
    def _wants(row: Row) -> dict[str, bool]:
        """What the state asks of a row besides its tokens."""
        return {"drafts": row.request.draft_tokens > 0, "reuse": not row.afresh}

    def _admit_urgent(self) -> None:
        """Lets rows in before less urgent ones that run, and in place of them if need be; but only rows that will
        begin to read in this very step."""
        while (row := self._next_waiting()) is not None:
            less = [other for other in reversed(self.running) if row.outranks(other)]
            before = [other for other in self.running if other.rank < row.rank]
            if not less or self._num_unread(before) >= self.chunk_tokens:
                return
            if not self._admit(row):
                leaving = self._enough(row, less)
                self._put_back(leaving)
                if not leaving or not self._admit(row):
                    return

    def _enough(self, row: Row, candidates: list[Row]) -> list[Row]:
        """Returns as few of these rows, from the first on, as let the row in by leaving; none if not even all do."""
        tokens, extras, wants = row.tokens(0, row.num_tokens), row.request.prefix_extras, self._wants(row)

        def fits(without: list[Row]) -> bool:
            return self.state.fits(tokens, extras=extras, **wants, without=[other.id for other in without])

        count = next((n for n in range(1, len(candidates) + 1) if fits(candidates[:n])), 0)
        leaving = candidates[:count]
        for other in candidates[:count]:
            rest = [kept for kept in leaving if kept is not other]
            if rest and fits(rest):
                leaving = rest
        return leaving

    def _prompt_budget(self, depths: Mapping[str, int]) -> int:
        """Running streams go first, and prompts never stand still."""
        decoding = sum(1 + depths.get(row.id, 0) for row in self.running if row.decoding)
        most = self.chunk_tokens - decoding
        if self.pace is not None:
            most = min(most, self.pace.budget(decoding))
        return max(most, min(self.chunk_tokens, self.state.page_size))

    @staticmethod
    def _price(row: Row) -> int:
        return 1 if row.request.params.prompt_logprobs is None else TOLD_PRICE

    def _num_unread(self, rows: Iterable[Row]) -> int:
        return sum(row.num_tokens - self.state.rows[row.id].length for row in rows if not row.decoding)

    def _resting(self) -> frozenset[str]:
        """The rows whose masks are still being made. Others go on without them; where there are none, a moment is
        waited for one of them."""
        may_run = [row for row in self.running if self._may_run(row)]
        slots = {row.id: self.state.rows[row.id].slot for row in may_run if row.decoding}
        resting = [row_id for row_id, slot in slots.items() if not self.table.is_ready(slot)]
        # All have begun, and their graces end together.
        resting = [row_id for row_id in resting if not self.table.is_ready(slots[row_id], in_grace=True)]
        if resting and len(resting) == len(may_run):
            resting = [row_id for row_id in resting if not self.table.is_ready(slots[row_id], MOMENT)]
        return frozenset(resting)

    def _choose_depths(self, resting: frozenset[str]) -> Mapping[str, int]:
        decoding = [row for row in self.running if row.decoding and self._may_run(row)]
        wishes = {row.id: self._wish(row) for row in decoding if row.id not in resting}
        unread = min(self._num_unread(self.running), self.chunk_tokens)
        return self.depths.choose(wishes, unread) if wishes else {}

    def _wish(self, row: Row) -> Wish:
        limit, sampled = min(row.depth_limit, self.state.max_drafts), not row.request.params.greedy
        if self.table.is_slow(self.state.rows[row.id].slot):
            limit = 0
        return Wish(limit, row.request.adaptive, sampled=sampled, apart=row.asks_host)

    def _plan_row(self, row: Row, budget: int, depth: int) -> RowPlan | None:
        held = self.state.rows[row.id]
        if row.decoding:
            drafts = depth
            if drafts and not self.state.reserve(row.id, held.length + 1 + drafts):
                drafts = 0
            query_len, known = 1 + drafts, ()
        else:
            end = min(row.num_tokens, held.length + max(1, budget // self._price(row)))
            drafts, query_len = 0, self.state.chunk_end(row.id, end, row.num_tokens) - held.length
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
        """Pages for `length` tokens, taken from the last rows in rank if need be; False if the row itself is the
        last and had to be put back."""
        while not self.state.reserve(row.id, length):
            last = self.running[-1]
            self._put_back([last])
            if last is row:
                return False
        return True

    def _put_back(self, rows: list[Row]) -> None:
        # One is in the queue again before the next one leaves: a fault on the way must find all of them.
        for row in self._leaving(rows):
            self._queue(row)
            self.preempted.append(row.id)

    def _leave(self, rows: list[Row]) -> None:
        for _ in self._leaving(rows):
            pass

    def _leaving(self, rows: list[Row]) -> Iterator[Row]:
        """Frees what the rows held, one after the other, and offers it to others."""
        if rows and self.state.caching:
            self.flush_deferred([row.id for row in rows])
        for row in rows:
            held = self.state.rows[row.id]
            self.table.clear(held.slot)
            # A step ahead goes on with every row that it does not know to have stopped.
            kept = not held.ahead or row.finish_reason == "stop"
            self.state.release(row.id, row.tokens(0, row.num_tokens) if kept else None)
            self.running.remove(row)
            yield row

    def _publish(self, rows: list[Row]) -> None:
        ready = [row for row in rows if row.finish_reason is None and self.state.at_checkpoint(row.id)]
        if ready:
            self.flush_deferred([row.id for row in ready])
        for row in ready:
            self.state.publish(row.id, row.tokens(0, row.num_tokens))
