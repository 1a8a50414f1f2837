"""What a drafter is. Plain decoding is the drafter that proposes nothing."""

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from headlong.layers.context import Context
from headlong.types import Batch, Draft, Plan, Verdict


class Proposer(Protocol):
    """Drafts from settled state alone. Its choices change speed, never tokens."""

    max_drafts: int

    def propose(self, plan: Plan) -> Draft | None:
        """`num_drafts` tokens for each row of the plan that wants them; None if no row does."""
        ...

    def observe(
        self, plan: Plan, batch: Batch, context: Context, hidden_ND: Tensor, verdict: Verdict
    ) -> None:
        """Sees what the target computed and decided, right after the step was committed."""
        ...

    def flush_deferred(self, row_ids: Iterable[str]) -> None:
        """Writes what was put off for these rows: others are about to use their pages."""
        ...

    def check_integrity(self) -> None:
        """Asserts, between steps, that what it keeps of rows is in order."""
        ...


class NoDrafts:
    """Plain decoding."""

    max_drafts = 0

    def propose(self, plan: Plan) -> Draft | None:
        assert not plan.num_drafts

    def observe(
        self, plan: Plan, batch: Batch, context: Context, hidden_ND: Tensor, verdict: Verdict
    ) -> None:
        """Nothing to remember."""

    def flush_deferred(self, row_ids: Iterable[str]) -> None:
        """Nothing was put off."""

    def check_integrity(self) -> None:
        """Nothing is kept."""
