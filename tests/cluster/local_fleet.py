"""A fleet of replicas in this process, which lose calls where a test says so. What travels is pickled."""

import asyncio
import pickle
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from headlong.checkpoint.checkpoint import Checkpoint
from headlong.cluster.board import Board
from headlong.cluster.client import ClusterEngine
from headlong.cluster.fleet import Item, ReplicaLost
from headlong.cluster.replica import Replica
from headlong.cluster.wire import Hello, OnTrial, Refused, Report, Work
from headlong.config import EngineConfig
from headlong.engine.local import LocalEngine
from headlong.engine.texts import Texts

CONFIG = EngineConfig(dtype="float32", max_rows=8, cache_tokens=8192, max_context=1024)


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
                if left == 0 and not isinstance(item, Hello | OnTrial | Refused):
                    raise ReplicaLost("the test says so")
                left = left if left is None or isinstance(item, Hello | OnTrial | Refused) else left - 1
                yield pickle.loads(pickle.dumps(item))

    def reports(self) -> list[Report]:
        told = [replica.report() for name, replica in self.replicas.items() if name not in self.silent]
        return pickle.loads(pickle.dumps(told))

    def trouble(self) -> None:
        return None

    def cancel(self, request_ids: Sequence[str]) -> None:
        for replica in self.replicas.values():
            replica.cancel(request_ids)


class World:
    """Two replicas, and the front's engine before them."""

    def __init__(self) -> None:
        self.engines = [LocalEngine.load(None, CONFIG) for _ in range(2)]
        self.replicas = [Replica(engine, name) for name, engine in zip("ab", self.engines, strict=True)]
        self.reset()

    def reset(self) -> None:
        self.fleet = LocalFleet(self.replicas)
        self.board = Board(self.fleet)
        self.board.poll()
        folder = self.engines[0].service.folder
        texts = Texts.read(Checkpoint.open(folder), CONFIG)
        self.front = ClusterEngine(self.fleet, self.board, self.replicas[0].facts, str(folder), texts)
        for engine in self.engines:
            engine.service.engine.state.drop_cache()

    async def run(self, client, params, prompts=("Once upon a time there was",), **changes):
        encoded = [client.text.encode(prompt) for prompt in prompts]
        requests = await asyncio.to_thread(client.prepare, encoded, params, "req")
        found = {request.id: [] for request in requests}
        async with aclosing(client.stream([replace(one, **changes) for one in requests])) as chunks:
            async for chunk in chunks:
                found[chunk.request_id].append(chunk)
        return found
