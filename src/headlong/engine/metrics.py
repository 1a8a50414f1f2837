"""Counts what steps did: totals since load, and rates over the last seconds.

Reads `StepOutput`s alone. The engine's thread writes, any other may read: a lock keeps a reading whole.
"""

import threading
import time
from collections import deque
from dataclasses import dataclass, field

from headlong.types import StepOutput

BUCKET_SECONDS = 0.25
RATE_SECONDS = 2.0
POSITION_SECONDS = 10.0


@dataclass
class Totals:
    """Everything since the model was loaded."""

    steps: int = 0
    prompt_tokens: int = 0
    asked_tokens: int = 0
    """Tokens of the prompts that were answered, computed or cached."""
    cached_tokens: int = 0
    """How many of those came from the prefix cache."""
    generated_tokens: int = 0
    row_steps: int = 0
    """Decoding steps, counted once for each row in them."""
    decoded_tokens: int = 0
    """What those gave: the generated tokens but for the one at each prompt's end."""
    draft_runs: int = 0
    """Row steps that had drafts."""
    drafted: int = 0
    accepted: int = 0
    preempted: int = 0
    tried_per_position: list[int] = field(default_factory=list)
    """Drafts at each depth whose predecessors were all accepted."""
    accepted_per_position: list[int] = field(default_factory=list)

    def add(self, step: StepOutput) -> None:
        self.steps += 1
        self.prompt_tokens += step.num_prompt_tokens
        self.preempted += len(step.preempted)
        for row in step.rows:
            if not row.token_ids:
                continue  # it ended without them: no step of its own
            self.generated_tokens += len(row.token_ids)
            if row.is_first:
                self.asked_tokens += len(row.request.prompt)
                self.cached_tokens += row.num_cached
                continue
            self.row_steps += 1
            self.decoded_tokens += len(row.token_ids)
            self._add_drafts(row.num_drafted, row.num_accepted)

    def plus(self, other: "Totals") -> "Totals":
        """Adds another's counts to these."""
        for name, value in vars(other).items():
            own = getattr(self, name)
            if isinstance(value, list):
                longer, shorter = (own, value) if len(own) >= len(value) else (value, own)
                value = [n + (shorter[i] if i < len(shorter) else 0) for i, n in enumerate(longer)]
                setattr(self, name, value)
            else:
                setattr(self, name, own + value)
        return self

    def _add_drafts(self, drafted: int, accepted: int) -> None:
        self.draft_runs += drafted > 0
        self.drafted += drafted
        self.accepted += accepted
        missing = drafted - len(self.tried_per_position)
        self.tried_per_position.extend([0] * missing)
        self.accepted_per_position.extend([0] * missing)
        for place in range(min(accepted + 1, drafted)):
            self.tried_per_position[place] += 1
            self.accepted_per_position[place] += place < accepted


@dataclass(frozen=True)
class Rates:
    """Over the last `RATE_SECONDS`; None where there was nothing to divide by."""

    tokens_per_second: float
    prompt_tokens_per_second: float
    steps_per_second: float
    tokens_per_step: float | None
    drafts_per_step: float | None
    rows_per_step: float | None


class Metrics:
    """One per engine. `observe` takes every step, in the thread that made it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = Totals()
        self._recent: deque[tuple[int, Totals]] = deque()
        """Pairs of a bucket's number on the clock and its totals, oldest first."""

    def observe(self, step: StepOutput) -> None:
        bucket = int(time.monotonic() / BUCKET_SECONDS)
        with self._lock:
            self._totals.add(step)
            if not self._recent or self._recent[-1][0] != bucket:
                self._recent.append((bucket, Totals()))
                while bucket - self._recent[0][0] > POSITION_SECONDS / BUCKET_SECONDS:
                    self._recent.popleft()
            self._recent[-1][1].add(step)

    def totals(self) -> Totals:
        """A copy of what was counted since the start."""
        with self._lock:
            return Totals().plus(self._totals)

    def rates(self) -> Rates:
        recent = self._since(RATE_SECONDS)
        row_steps = recent.row_steps
        return Rates(
            tokens_per_second=recent.generated_tokens / RATE_SECONDS,
            prompt_tokens_per_second=recent.prompt_tokens / RATE_SECONDS,
            steps_per_second=recent.steps / RATE_SECONDS,
            tokens_per_step=recent.decoded_tokens / row_steps if row_steps else None,
            drafts_per_step=recent.drafted / row_steps if row_steps else None,
            rows_per_step=row_steps / recent.steps if recent.steps else None,
        )

    def recent(self) -> Totals:
        """Over the last `POSITION_SECONDS`."""
        return self._since(POSITION_SECONDS)

    def _since(self, seconds: float) -> Totals:
        """The totals of the complete buckets before the one that is filling."""
        now = int(time.monotonic() / BUCKET_SECONDS)
        total = Totals()
        with self._lock:
            for bucket, part in self._recent:
                if 0 < now - bucket <= seconds / BUCKET_SECONDS:
                    total.plus(part)
        return total
