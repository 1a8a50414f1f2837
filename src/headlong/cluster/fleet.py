"""The replicas of one model as their front needs them: calls that stream, and what can be asked of all at once."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from headlong.cluster.wire import Hello, OnTrial, Refused, Report, Work
from headlong.completion import Chunk

Item = Hello | OnTrial | Chunk | Refused


class ReplicaLost(Exception):
    """A call ended because its replica did, or could not be reached."""


class Fleet(Protocol):
    """All replicas of one model."""

    def stream(self, work: Work) -> AsyncGenerator[Item, None]:
        """Gives work to one replica and yields what it answers. Raises ReplicaLost if that ends before the answer does.
        Closing the generator earlier cancels the work."""
        ...

    def reports(self) -> list[Report]:
        """What each replica says of itself that can be reached. Takes its time: not for an event loop."""
        ...

    def trouble(self) -> str | None:
        """Why there will be no replica until somebody does something about it; None where one may come any moment.
        Takes its time."""
        ...

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Ends requests, on whichever replicas they run. Answers at once."""
        ...
