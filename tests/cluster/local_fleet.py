"""A fleet of replicas in this process, which lose calls where a test says so. What travels is pickled."""

import pickle
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from headlong.cluster.fleet import Item, ReplicaLost
from headlong.cluster.replica import Replica
from headlong.cluster.wire import Hello, Refused, Report, Work


class LocalFleet:
    """Gives each call to the next replica that it need not avoid. The first call is lost after `cuts[0]` chunks, the
    second after `cuts[1]`, and so on; those after the last one are not."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = {replica.facts.replica: replica for replica in replicas}
        self.cuts: deque[int | None] = deque()
        self.calls: list[tuple[str, Work]] = []
        self.silent: set[str] = set()
        """Replicas that do not say how they are."""

    async def stream(self, work: Work) -> AsyncGenerator[Item, None]:
        names = [name for name in self.replicas if name not in work.avoid] or list(self.replicas)
        name = names[len(self.calls) % len(names)]
        work = pickle.loads(pickle.dumps(work))
        self.calls.append((name, work))
        left = self.cuts.popleft() if self.cuts else None
        if left is not None and left < 0:
            raise ReplicaLost("nobody answers")
        async with aclosing(self.replicas[name].stream(work)) as items:
            async for item in items:
                if left == 0 and not isinstance(item, Hello | Refused):
                    raise ReplicaLost("the test says so")
                left = left if left is None or isinstance(item, Hello | Refused) else left - 1
                yield pickle.loads(pickle.dumps(item))

    def reports(self) -> list[Report]:
        told = [replica.report() for name, replica in self.replicas.items() if name not in self.silent]
        return pickle.loads(pickle.dumps(told))

    def cancel(self, request_ids: Sequence[str]) -> None:
        for replica in self.replicas.values():
            replica.cancel(request_ids)
