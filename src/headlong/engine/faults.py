"""What happens when a step goes wrong: who is read again, who ends, and when the engine gives up.

A step that raised may have left any row's state half-written, so all rows are put back to wait and read their own
tokens again, which gives the same tokens. If it raises again, the rows that were in it are tried one by one until each
is past the place; short of memory, half of them, with half the prompt tokens. A row that fails alone is tried once
more, without drafts, and then ends. Knows rows and the scheduler, not what a step does.
"""

import logging
import time
import traceback
from collections.abc import Callable
from dataclasses import replace

import torch

from headlong.engine.row import FAULT, Row
from headlong.engine.scheduler import Scheduler
from headlong.params import SamplingParams
from headlong.speculate.verdict import without
from headlong.state.oom import is_oom
from headlong.types import Plan, Request, RowOutput, StepOutput, Verdict

log = logging.getLogger(__name__)
MAX_IN_A_ROW = 8
"""Faults without a token between them, before the engine asks itself whether it can do anything at all."""
MIN_CHUNK = 16
"""Prompt tokens a step reads, however short of memory."""
CALM_STEPS = 64
"""Good steps after which twice as many prompt tokens are tried again."""
NO_NUMBERS = "the model's logits are no numbers (NaN or infinite)"
PROBE = Request("the engine's own", (0,), SamplingParams(max_tokens=1), seed=0)
"""What an engine can always answer, if it can do anything."""


class Faults:
    """Stands between an engine's caller and its steps."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.failure: str | None = None
        """Why the engine can do nothing more; None while it is well."""
        self.count = 0
        """Steps that went wrong, in whole or in part, since the engine was made."""
        self._scheduler = scheduler
        self._chunk_tokens = scheduler.chunk_tokens
        self._in_a_row = 0
        self._calm = 0
        self._all_poisoned = False
        self._suspects: dict[str, int] = {}
        """Rows that were in a step that raised, oldest first, with their settled lengths at the time."""
        self._blamed: set[Row] = set()
        """Suspects that failed alone once."""
        self._poisoned: set[Row] = set()
        """Rows whose logits were no numbers once."""
        self.untold: tuple[RowOutput, ...] = ()
        """What rows gained in a step that nobody was told of: its caller left before it ended, or it had to be settled
        between steps. The next step tells of it."""

    def guarded(self, attempt: Callable[[], StepOutput]) -> StepOutput:
        """Makes a step. What goes wrong in it is told to the rows concerned, never to the caller. Whoever interrupts it
        leaves nothing half-written, and what rows were given by then is the next step."""
        if self.untold:
            rows, self.untold = self.untold, ()
            return StepOutput(rows=rows, num_waiting=len(self._scheduler.waiting))
        self._scheduler.outputs = []
        try:
            return self._recovered(attempt)
        except BaseException:
            self._scheduler.recall()
            self.untold = tuple(self._scheduler.outputs)
            raise

    def _recovered(self, attempt: Callable[[], StepOutput]) -> StepOutput:
        started = time.perf_counter()
        if self._suspects:
            self._narrow()
        self._all_poisoned = False
        try:
            step = attempt()
        except Exception as error:
            log.exception("a step failed; %d rows were in it", len(self._scheduler.running))
            step = StepOutput(preempted=self._recover(error), num_waiting=len(self._scheduler.waiting))
        else:
            if not self._all_poisoned:
                self._calm_down(step)
                return step
        self._in_a_row += 1
        if self._in_a_row >= MAX_IN_A_ROW:
            self._take_stock(attempt)
        return replace(step, rows=tuple(self._scheduler.outputs), seconds=time.perf_counter() - started)

    def sort_out(self, plan: Plan, verdict: Verdict) -> tuple[Plan, Verdict]:
        """The step without its poisoned rows. Those are read afresh once, in case their state was at fault and not
        the model; if it happens again they end."""
        if not verdict.poisoned:
            return plan, verdict
        self.count += 1
        scheduler = self._scheduler
        scheduler.state.drop_cache()  # what such a row left there, or found there, is not to be trusted
        self._poisoned.intersection_update([*scheduler.running, *scheduler.waiting])
        for number in verdict.poisoned:
            row = scheduler.find(plan.rows[number].request.id)
            assert row is not None, "it was planned"
            log.error("row %s: %s", row.id, NO_NUMBERS)
            if row in self._poisoned:
                self._end(row, f"{NO_NUMBERS}, and were so again when it was read afresh")
            else:
                self._poisoned.add(row)
                row.afresh = True  # others may offer what made it so again, before they are found out
                scheduler.put_back(row)
        plan, verdict = without(plan, verdict, verdict.poisoned)
        self._all_poisoned = not any(row.samples for row in plan.rows)
        return plan, verdict

    def take_out(self, row: Row) -> None:
        """Frees a row for good, between steps; what it had is offered to others, if that can be done."""
        try:
            self._scheduler.remove(row)
        except BaseException as error:
            log.exception("row %s left, and what it had is lost", row.id)
            self.count += 1
            self._scheduler.recall()
            if self._scheduler.find(row.id) is not None:
                self._scheduler.discard(row)
            if not isinstance(error, Exception):
                raise

    def restart(self) -> None:
        """Begins anew, without rows: whoever waited for one has been told."""
        scheduler = self._scheduler
        scheduler.recall()
        scheduler.waiting.clear()
        scheduler.state.drop_cache()
        scheduler.only, scheduler.chunk_tokens = None, self._chunk_tokens
        self.failure, self._in_a_row, self._calm = None, 0, 0
        self._suspects.clear()
        self._blamed.clear()
        self._poisoned.clear()
        self.untold = ()
        scheduler.state.check_integrity()

    def _recover(self, error: Exception) -> tuple[str, ...]:
        """Everybody back to wait, holding nothing. Decides who runs next, and gives who was put back."""
        self.count += 1
        scheduler, short = self._scheduler, is_oom(error)
        lengths = {row_id: held.length for row_id, held in scheduler.state.rows.items()}
        put_back = tuple(scheduler.preempted)
        rows = scheduler.recall()
        scheduler.state.check_integrity()
        again = bool(self._suspects)
        self._suspects |= {row.id: lengths.get(row.id, 0) for row in rows}
        if scheduler.only is not None and len(rows) == 1:
            self._blame(rows[0], error)
        elif short or again:
            count = -(-len(rows) // 2) if short else 1
            scheduler.only = frozenset(row.id for row in rows[:count]) or None
        if short:
            scheduler.chunk_tokens = max(scheduler.chunk_tokens // 2, min(MIN_CHUNK, self._chunk_tokens))
            self._calm = 0
            _free_memory(error)
        return put_back + tuple(row.id for row in rows)

    def _blame(self, row: Row, error: Exception) -> None:
        """Notes that a row failed alone: it is tried once more without drafts, and the second time it ends."""
        short = is_oom(error)
        if short and self._scheduler.chunk_tokens > MIN_CHUNK:
            return
        if row not in self._blamed:
            self._blamed.add(row)
            row.request = replace(row.request, draft_tokens=0, adaptive=False)
            return
        self._end(row, "it needs more memory than there is" if short else _told(error))

    def _narrow(self) -> None:
        """Lets go of rows that are past the place of the fault; when all that may run are, the next ones may."""
        scheduler = self._scheduler
        for row_id, length in list(self._suspects.items()):
            held = scheduler.state.rows.get(row_id)
            if held.length > length if held is not None else scheduler.find(row_id) is None:
                del self._suspects[row_id]
        self._blamed = {row for row in self._blamed if row.id in self._suspects}
        if scheduler.only is None or not scheduler.only.isdisjoint(self._suspects):
            return
        scheduler.recall()  # rows that were let go hold what the next may need
        scheduler.only = frozenset(list(self._suspects)[: len(scheduler.only)]) or None

    def _calm_down(self, step: StepOutput) -> None:
        self._calm += 1
        if any(output.token_ids for output in step.rows):
            self._in_a_row = 0
        if self._scheduler.chunk_tokens < self._chunk_tokens and self._calm % CALM_STEPS == 0:
            self._scheduler.chunk_tokens = min(2 * self._scheduler.chunk_tokens, self._chunk_tokens)

    def _take_stock(self, attempt: Callable[[], StepOutput]) -> None:
        """Requests can be at fault, one after the other, and the engine well. If it cannot answer a question of its
        own either, every row ends."""
        self._in_a_row = 0
        why = self._ask(attempt)
        if why is None:
            return
        self.failure = f"the engine gave up after {MAX_IN_A_ROW} faults in a row: {why}"
        log.critical(self.failure)
        for row in [*self._scheduler.running, *self._scheduler.waiting]:
            self._end(row, self.failure)

    def _ask(self, attempt: Callable[[], StepOutput]) -> str | None:
        """Runs one token alone; gives what is wrong, None if nothing is."""
        scheduler = self._scheduler
        outputs, only = scheduler.outputs, scheduler.only
        scheduler.recall()
        row = Row(PROBE, None, max_len=2)
        scheduler.add(row)
        scheduler.only = frozenset([row.id])
        why = None
        try:
            attempt()
            if not row.output:
                why = NO_NUMBERS
        except Exception as error:
            why = _told(error)
        finally:
            scheduler.recall()
            if row.finish_reason is None:
                scheduler.remove(row)
            scheduler.outputs, scheduler.only = outputs, only
        return why

    def _end(self, row: Row, why: str) -> None:
        """A step tells of each row once: what it gave this one before it failed comes with the end."""
        outputs, end = self._scheduler.outputs, row.fail(f"{FAULT}: {why}")
        given = next((n for n, output in enumerate(outputs) if output.request.id == row.id), None)
        if given is not None:
            last = outputs.pop(given)
            end = replace(
                last,
                text=last.text + end.text,
                finish_reason=end.finish_reason,
                stop_reason=end.stop_reason,
            )
        outputs.append(end)
        self._scheduler.discard(row)


def _told(error: Exception) -> str:
    """For users: what kind of error, and its first line; the traceback is in the log."""
    line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def _free_memory(error: Exception) -> None:
    """The frames of the step that failed still hold its tensors."""
    traceback.clear_frames(error.__traceback__)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
