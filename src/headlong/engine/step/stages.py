"""What a step is, whoever computes it: drafts, the target's pass, the verdict, and the commit.

The host goes through the stages one by one (host.py). Of rows that decode, a device computes all of them as one CUDA
graph (graph.py), or with what a grammar allows looked up in between (grammar.py). Knows no tensors.
"""

from typing import Protocol, TypeVar

P_contra = TypeVar("P_contra", contravariant=True)
P = TypeVar("P")
D = TypeVar("D")
F = TypeVar("F")
V = TypeVar("V")


class Stages(Protocol[P_contra, D, F, V]):
    """One way to compute a step of a plan: drafts D, what the pass gives F, and the verdict V are its own values."""

    def draft(self, plan: P_contra) -> D:
        """Proposes tokens for the rows that draft."""
        ...

    def forward(self, plan: P_contra, draft: D) -> F:
        """Hidden states and logits of what rows are certain of and of their drafts."""
        ...

    def verify(self, plan: P_contra, draft: D, computed: F) -> V:
        """Chooses the target's tokens, and says which drafts stand."""
        ...

    def commit(self, plan: P_contra, draft: D, computed: F, verdict: V) -> None:
        """Keeps what stands and forgets the rest; the drafter reads what it needs for the next step."""
        ...


def run(stages: Stages[P, D, F, V], plan: P) -> tuple[D, F, V]:
    """One step."""
    draft = stages.draft(plan)
    computed = stages.forward(plan, draft)
    verdict = stages.verify(plan, draft, computed)
    stages.commit(plan, draft, computed, verdict)
    return draft, computed, verdict
