"""Who can run a step, as the engine sees it: it is launched, and landed once its verdict is wanted."""

from typing import NamedTuple, Protocol

from headlong.types import Plan, Verdict


class Landed(NamedTuple):
    """A step that is over, and committed."""

    plan: Plan
    """The plan of the rows that are still there, with the drafts that were really made."""
    verdict: Verdict
    draft_seconds: float
    """How much of the step's time drafting and priming took."""
    is_usual: bool = True
    """False for a step that was compiled or captured on the way: its time says nothing of others."""
    seconds: float = 0.0
    """What it took on the device, where that is known."""


class Launch(Protocol):
    """A step under way, or computed already."""

    @property
    def plan(self) -> Plan: ...

    @property
    def is_under_way(self) -> bool:
        """Whether the step after it can be launched before it has landed."""
        ...

    @property
    def is_awaited(self) -> bool:
        """Whether any of its rows is still there."""
        ...

    def land(self, *, followed: bool = False) -> Landed:
        """Waits for the step and ends it. `followed`: whether the next one was launched already."""
        ...


class Stepper(Protocol):
    """One way to run steps."""

    def takes(self, plan: Plan) -> bool:
        """Whether this step can be run so."""
        ...

    def launch(self, plan: Plan) -> Launch:
        """Begins a step that it takes."""
        ...
