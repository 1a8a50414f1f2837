"""Replicas that compute nothing and die when a test says so, on a clock that jumps from event to event."""

import asyncio
import random
import selectors
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from headlong import SamplingParams
from headlong.cluster.board import Board
from headlong.cluster.call import Call
from headlong.cluster.fleet import Item, ReplicaLost
from headlong.cluster.suspicion import Deaths, Gain
from headlong.cluster.wire import Hello, OnTrial, Work
from headlong.completion import Chunk
from headlong.types import Request

STEP = 0.05
"""Seconds between two tokens of a row."""


class _Jump(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everybody waits, and nothing will happen"
        self.now += max(0.0, timeout)
        assert self.now < 10_000, "it goes on and on"
        return super().select(0)


class _JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = _Jump()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


def run(story: Coroutine[Any, Any, Any]) -> Any:
    """What asyncio.run does, in no time."""
    loop = _JumpingLoop()
    try:
        return loop.run_until_complete(story)
    finally:
        loop.close()


def tokens_of(request: Request) -> list[int]:
    """What the request gives, whoever computes it."""
    rng = random.Random(f"{request.prompt} {request.choice}")
    return [rng.randrange(100) for _ in range(request.params.max_tokens)]


Kills = Callable[[Request, int], bool]
"""Whether a row ends its replica, by what it asked for and how many tokens this replica gave it."""


class _Slots:
    """Places of rows. Whoever was lost elsewhere comes before the others who wait."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: list[tuple[bool, int, asyncio.Future[None]]] = []
        self._came = 0

    @asynccontextmanager
    async def one(self, again: bool):
        self._came += 1
        place = (not again, self._came, asyncio.get_running_loop().create_future())
        self._waiting.append(place)
        self._let_in()
        try:
            await place[2]
            yield
        finally:
            if place in self._waiting:
                self._waiting.remove(place)
            else:
                self._free += 1
                self._let_in()

    def _let_in(self) -> None:
        while self._free and self._waiting:
            place = min(self._waiting, key=lambda one: one[:2])
            self._waiting.remove(place)
            self._free -= 1
            if not place[2].done():
                place[2].set_result(None)


@dataclass
class _Simulated:
    """One replica: some rows at a time, in the order in which they came; those on trial come first, and alone."""

    name: str
    slots: _Slots
    trials: asyncio.Lock = field(default_factory=asyncio.Lock)
    company: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while rows go on beside each other."""
    streams: set[asyncio.Queue[Item | BaseException | None]] = field(default_factory=set)
    alive: bool = True


class SimulatedFleet:
    """`replicas` of them with so many rows each; one that died is back after `start` seconds."""

    def __init__(self, replicas: int, rows: int, start: float, harms: Kills = lambda *_: False) -> None:
        self.rows, self.start, self.harms = rows, start, harms
        self.there = {f"r{n}": self._new(f"r{n}") for n in range(replicas)}
        self.dead: list[str] = []
        self.harmed = 0
        """How many replicas were ended by what they ran."""
        self.calls: list[Work] = []
        self._came = 0

    def _new(self, name: str) -> _Simulated:
        one = _Simulated(name, _Slots(self.rows))
        one.company.set()
        return one

    def kill(self, name: str) -> None:
        """Ends a replica; another one begins."""
        one = self.there.pop(name)
        one.alive = False
        self.dead.append(name)
        for items in one.streams:
            items.put_nowait(ReplicaLost("it was killed"))
        if self.start < float("inf"):
            asyncio.get_running_loop().call_later(self.start, self._begin)

    def _begin(self) -> None:
        self._came += 1
        self.there[f"s{self._came}"] = self._new(f"s{self._came}")

    async def stream(self, work: Work) -> AsyncGenerator[Item, None]:
        while not self.there:
            await asyncio.sleep(0.2)
        self.calls.append(work)
        names = [name for name in self.there if name not in work.avoid] or list(self.there)
        one = self.there[min(names, key=lambda name: (len(self.there[name].streams), name))]
        items: asyncio.Queue[Item | BaseException | None] = asyncio.Queue()
        one.streams.add(items)
        serving = asyncio.ensure_future(self._serve(one, work, items))
        try:
            yield Hello(one.name, "alike")
            while (item := await items.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            one.streams.discard(items)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    async def _serve(self, one: _Simulated, work: Work, items: asyncio.Queue[Any]) -> None:
        gains = [Gain([request.id], work.alone) if work.alone else None for request in work.requests]
        async with asyncio.TaskGroup() as rows, AsyncExitStack() as trial:
            if work.alone:
                await trial.enter_async_context(self._trial(one, items))
            for request, gain in zip(work.requests, gains, strict=True):
                rows.create_task(self._row(one, request, items, gain))
            while any(gain is not None and not gain.reached for gain in gains):
                await asyncio.sleep(STEP / 2)
        items.put_nowait(None)

    @asynccontextmanager
    async def _trial(self, one: _Simulated, items: asyncio.Queue[Any]):
        await one.trials.acquire()
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            items.put_nowait(OnTrial())
            await asyncio.sleep(STEP)
            one.company.clear()
            yield
        finally:
            one.company.set()
            loop.call_later(loop.time() - began, one.trials.release)

    async def _row(self, one: _Simulated, request: Request, items: asyncio.Queue[Any], trial: Gain | None):
        async with AsyncExitStack() as place:
            if trial is None:
                await place.enter_async_context(one.slots.one(request.again))
            await self._generate(one, request, items, trial)

    async def _generate(
        self, one: _Simulated, request: Request, items: asyncio.Queue[Any], trial: Gain | None
    ):
        truth = tokens_of(request)
        for number in range(len(request.resumed), len(truth)):
            await asyncio.sleep(STEP)
            if trial is None or trial.reached:
                await one.company.wait()
            if one.alive and self.harms(request, number - len(request.resumed)):
                self.harmed += 1
                self.kill(one.name)
            last = number + 1 == len(truth)
            chunk = Chunk(
                request.choice,
                "",
                (truth[number],),
                (False,),
                finish_reason="length" if last else None,
                request_id=request.id,
            )
            if trial is not None:
                trial.take(chunk)
            items.put_nowait(chunk)

    def reports(self) -> list[Any]:
        return []

    def trouble(self) -> None:
        return None

    def cancel(self, request_ids: Any) -> None:
        pass


class Front:
    """Calls of so many clients, and what each was given."""

    def __init__(self, fleet: SimulatedFleet) -> None:
        self.fleet, self.board, self.deaths = fleet, Board(fleet), Deaths()
        self.seconds: list[float] = []

    async def ask(self, number: int, tokens: int, choices: int = 1) -> dict[str, list[int]]:
        """Asserts that what comes is what the request gives, each token once."""
        params = SamplingParams(max_tokens=tokens)
        requests = [
            Request(f"{number}.{choice}", (number + 1,), params, 0, choice) for choice in range(choices)
        ]
        facts: Any = SimpleNamespace(
            model="", description=SimpleNamespace(drafting=SimpleNamespace(refusal=None))
        )
        found: dict[str, list[int]] = {one.id: [] for one in requests}
        began = asyncio.get_running_loop().time()
        async with aclosing(Call(self.fleet, self.board, facts, requests, self.deaths).chunks()) as chunks:
            async for chunk in chunks:
                found[chunk.request_id].extend(chunk.token_ids)
        assert found == {one.id: tokens_of(one) for one in requests}
        self.seconds.append(asyncio.get_running_loop().time() - began)
        return found
