"""What a drafter is. Plain decoding is the drafter that proposes nothing."""

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from headlong.layers.context import Context
from headlong.speculate.vocabulary import DraftVocabulary
from headlong.types import Batch, Draft, Plan, Verdict


class DeviceDrafter(Protocol):
    """What can draft, and read what was fed, inside a step that asks the host for nothing."""

    vocabulary: DraftVocabulary

    def forward(self, tokens_N: Tensor, hidden_ND: Tensor, context: Context, depth: int = 0) -> Tensor:
        """What the head says after each token, given the hidden state before it, at a depth of drafts."""
        ...

    def finish(self, out_ND: Tensor, depth: int = 0) -> Tensor:
        """What the lm_head takes of what the head says at a depth of drafts."""
        ...

    def reads(self, plan: Plan) -> bool:
        """Whether it reads what such a step of decoding rows feeds at once."""
        ...

    def catches_up(self, plan: Plan) -> bool:
        """Whether it reads this step; what was deferred of its rows is then read before."""
        ...

    def defer(self, plan: Plan, hidden_ND: Tensor, verdict: Verdict) -> None:
        """Keeps what a step of one token a row fed that it did not read."""
        ...


class Proposer(Protocol):
    """Drafts from committed state alone. Its choices change speed, never tokens."""

    max_drafts: int

    @property
    def device_drafter(self) -> DeviceDrafter | None:
        """Itself, as it drafts where the target is without asking the host; None where it cannot, or drafts nothing."""
        ...

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
    device_drafter = None

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
