"""Runs a workload against a server, block by block. Measures; sums nothing up and prints nothing.

Without a rate every stream sends its next request when its last one ended. With a rate requests come when they are
due, whether or not the server keeps up, and their times count from then: a wait for a free stream is part of them.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from headlong.cli.load.acceptance import Drafts, since
from headlong.cli.load.answer import Failure, Sample
from headlong.cli.load.client import Client
from headlong.cli.load.workload import Mtp, Slot, Workload
from headlong.errors import ConfigError, RequestError
from headlong.progress import ProgressFn

LONGEST_PAUSE = 1.0
"""After a 429 a stream waits as long as the server asks, but no longer than this."""
LAG_EVERY = 0.02
TICKS = 1000

Record = Callable[[Sample], None]


@dataclass
class Block:
    """One setting at one concurrency in one round; grows while it is measured."""

    slot: Slot
    samples: list[Sample] = field(default_factory=list)
    seconds: float = 0.0
    counted: Drafts | None = None
    """What the server's counters gained meanwhile."""
    lags: list[float] = field(default_factory=list)
    """How late this program's own timer rang: what it adds to every time it measures."""
    complete: bool = False


async def drive(
    client: Client, workload: Workload, warmup: int, blocks: list[Block], progress: ProgressFn
) -> None:
    """Appends to `blocks` as it goes, so that whoever interrupts it has what was measured."""
    slots = list(workload.slots())
    await _warm_up(client, workload, warmup, progress)
    try:
        for done, slot in enumerate(slots):
            progress("bench serve", done, len(slots))
            block = Block(slot)
            blocks.append(block)
            before = await client.draft_counters()
            await _measure(client, workload, block, progress)
            block.counted = since(before, await client.draft_counters())
            block.complete = True
    finally:
        progress("bench serve", len(slots), len(slots))


async def _warm_up(client: Client, workload: Workload, warmup: int, progress: ProgressFn) -> None:
    """Sends requests that are not measured. The first one of each setting goes alone: if the server cannot serve that
    setting at all, it raises an error that says so."""
    total = warmup * len(workload.mtp)
    try:
        for done, mtp in enumerate(workload.mtp if warmup else []):
            progress("warm-up", done * warmup, total)
            await _probe(client, workload, mtp)
            together = asyncio.Semaphore(max(workload.concurrencies))

            async def one(number: int, mtp: Mtp = mtp, together: asyncio.Semaphore = together) -> None:
                async with together:
                    await client.send(workload.body(number, mtp))

            async with asyncio.TaskGroup() as group:
                for number in range(1, warmup):
                    group.create_task(one(number))
    finally:
        progress("warm-up", total, total)


async def _probe(client: Client, workload: Workload, mtp: Mtp) -> None:
    body = workload.body(0, mtp)
    sample = await client.send(body)
    if sample.status in (400, 422) and sample.failure and "stream_options" in sample.failure.message:
        client.include_usage = False
        sample = await client.send(body)
    if sample.failure is None or sample.status == 429:
        return
    message = sample.failure.message
    client.check_key(sample.status or 0, message)
    if sample.status == 404:
        raise RequestError(
            f"--model {body.get('model')}: the server has no such model or endpoint ({message})"
        )
    if sample.status in (400, 422) and mtp is not None and "speculative" in message:
        raise RequestError(f"--mtp {mtp}: the server refuses the field `speculative` ({message})")
    raise ConfigError(f"--url {client.root}: the first request failed ({sample.failure.kind}: {message})")


async def _measure(client: Client, workload: Workload, block: Block, progress: ProgressFn) -> None:
    slot = block.slot
    mtp = "" if slot.mtp is None else f", mtp {slot.mtp}"
    label = f"{slot.concurrency} at once{mtp}, round {slot.round + 1}"
    started = time.perf_counter()

    def record(sample: Sample) -> None:
        block.samples.append(sample)
        share = max(len(block.samples) / slot.requests, (time.perf_counter() - started) / slot.seconds)
        # Full is said at the end alone: it takes the bar away.
        progress(label, min(int(TICKS * share), TICKS - 1), TICKS)

    progress(label, 0, TICKS)
    run = _in_turn if workload.rate is None else _as_they_come
    try:
        async with _watching_lag(block.lags):
            await run(client, workload, slot, started, record)
    finally:
        block.seconds = time.perf_counter() - started
        progress(label, TICKS, TICKS)


async def _in_turn(client: Client, workload: Workload, slot: Slot, started: float, record: Record) -> None:
    """Sends the slot's requests over as many streams as the slot wants; each stream takes the next number when it is
    free."""
    numbers = iter(range(slot.first, slot.first + slot.requests))

    async def stream() -> None:
        for number in numbers:
            if time.perf_counter() - started >= slot.seconds:
                return
            sample = await client.send(workload.body(number, slot.mtp))
            record(sample)
            if sample.status == 429:
                await asyncio.sleep(min(sample.retry_after or 0.0, LONGEST_PAUSE))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(slot.concurrency, slot.requests)):
            group.create_task(stream())


async def _as_they_come(
    client: Client, workload: Workload, slot: Slot, started: float, record: Record
) -> None:
    """Requests at their own times; those that the limit of streams holds back past the end are not sent."""
    gate = asyncio.Semaphore(slot.concurrency)

    async def one(number: int, due: float) -> None:
        async with gate:
            waited = time.perf_counter() - due
            if due + waited - started >= slot.seconds:
                record(Sample(waited, failure=Failure("not sent", "no stream was free before the end")))
            else:
                record(await client.send(workload.body(number, slot.mtp), due))

    async with asyncio.TaskGroup() as group:
        for number, at in enumerate(workload.arrivals(slot), slot.first):
            if at >= slot.seconds:
                return
            await asyncio.sleep(max(0.0, started + at - time.perf_counter()))
            group.create_task(one(number, started + at))


@asynccontextmanager
async def _watching_lag(lags: list[float]) -> AsyncIterator[None]:
    async def watch() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(LAG_EVERY)
            lags.append(time.perf_counter() - before - LAG_EVERY)

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
