"""A thread that does not get on is noticed, one that is slow, stopped, idle or compiling is not."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from engine_cases import load

from headlong import AsyncLLM, HeadlongError, SamplingParams
from headlong.config import EngineConfig
from headlong.engine import watchdog
from headlong.engine.local import LocalEngine
from headlong.engine.watchdog import COMPILING_FACTOR, TICKS, Watchdog

BOUND = 0.4


@pytest.fixture
def said() -> list[str]:
    return []


def run(work: Callable[[Watchdog], None], said: list[str], seconds: float = BOUND) -> None:
    dog = Watchdog(seconds, said.append)

    def watched() -> None:
        dog.watch_this_thread()
        work(dog)

    thread = threading.Thread(target=watched)
    thread.start()
    thread.join()
    dog.close()


def test_a_piece_of_work_that_does_not_end(said: list[str], caplog: pytest.LogCaptureFixture) -> None:
    def block_for_ever(dog: Watchdog) -> None:
        dog.begin()
        time.sleep(4 * BOUND)

    run(block_for_ever, said)
    assert len(said) == 1 and "step_timeout" in said[0]
    assert "block_for_ever" in caplog.text, "the log says where"


def test_many_short_pieces_and_long_waits(said: list[str]) -> None:
    def steps(dog: Watchdog) -> None:
        for _ in range(12):
            dog.begin()
            time.sleep(BOUND / 8)
        dog.end()
        time.sleep(3 * BOUND)

    run(steps, said)
    assert said == []


def ticking(monkeypatch: pytest.MonkeyPatch, dog: Watchdog, clock: Iterator[float]) -> None:
    """Runs the watching in this thread, with a clock of our own, until the clock ends."""
    now = 0.0

    def wait(_: float) -> bool:
        nonlocal now
        found = next(clock, None)
        now = now if found is None else found
        return found is None

    monkeypatch.setattr(dog._stop, "wait", wait)
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now)
    dog._watched = threading.get_ident()
    dog._watch()


def test_a_process_that_was_stopped(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    dog = Watchdog(8.0, said.append)
    dog.begin()
    tick = 8.0 / TICKS
    ticking(monkeypatch, dog, iter([tick, 2 * tick, 10_000.0, 10_000 + tick]))
    assert said == []


def test_a_compiler_may_take_longer(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tick = 8.0 / TICKS
    monkeypatch.setattr(watchdog, "COMPILING", (__file__,))
    dog = Watchdog(8.0, said.append)
    dog.begin()
    ticking(monkeypatch, dog, iter([tick * n for n in range(1, TICKS * COMPILING_FACTOR)]))
    assert said == []
    ticking(monkeypatch, dog, iter([tick * n for n in range(1, TICKS * COMPILING_FACTOR + 8)]))
    assert len(said) == 1


@pytest.mark.parametrize(
    ("config", "seconds"),
    [
        ({"device": "cpu"}, 600),
        ({"device": "cpu", "chunk_tokens": 4096}, 4096),
        ({"device": "cpu", "step_timeout": 0}, None),
        ({"device": "cpu", "step_timeout": 2.5}, 2.5),
    ],
)
def test_the_bound(config: dict, seconds: float | None) -> None:
    assert EngineConfig(**config).resolve_step_timeout() == seconds


@pytest.mark.parametrize("wrong", [-1, 1e9, float("nan")])
def test_no_bound(wrong: float) -> None:
    with pytest.raises(HeadlongError, match="step_timeout"):
        EngineConfig(step_timeout=wrong)


def test_an_engine_whose_step_blocks() -> None:
    """Everybody who waits is told; what the thread does afterwards reaches nobody; closing does not wait for it."""
    service = load("auto", max_rows=2, cache_tokens=1024).service
    gate, real = threading.Event(), service.engine.step

    def blocked():
        gate.wait(60)
        return real()

    service.engine.step = blocked

    async def ask(llm: AsyncLLM) -> str:
        with pytest.raises(HeadlongError, match="hangs") as told:
            async for _ in llm.stream("Once", SamplingParams(max_tokens=4)):
                pass
        return str(told.value)

    async def body() -> None:
        client = LocalEngine(service, step_timeout=BOUND)
        llm = AsyncLLM(client)
        assert not client.hung and client.failure is None
        first = asyncio.create_task(ask(llm))
        await asyncio.sleep(BOUND / 4)
        second = asyncio.create_task(ask(llm))  # still in the inbox when the step is given up
        await asyncio.wait_for(asyncio.gather(first, second), 20)
        assert client.hung and "hangs" in str(client.failure)
        await asyncio.wait_for(ask(llm), 20)  # refused at once
        started = time.monotonic()
        await client.close()
        await client.drain()
        assert time.monotonic() - started < 5
        gate.set()
        client._loop._thread.join(20)
        assert not client._loop._thread.is_alive()

    asyncio.run(body())
