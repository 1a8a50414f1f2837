"""None is lost, however often replicas die, and a request that ends them is found out beside any number of others."""

import asyncio
import random

import pytest
from simulated_fleet import Front, SimulatedFleet, run

from headlong.cluster.suspicion import CLEARING, GUILTY, LONGER, TRIED_AFTER, Deaths, Suspicion
from headlong.completion import Chunk
from headlong.errors import HarmfulError, HeadlongError

POISON = 1000


async def kill_on(fleet: SimulatedFleet, every: float, seed: int = 0) -> None:
    rng = random.Random(seed)
    while True:
        await asyncio.sleep(every)
        if fleet.there:
            fleet.kill(rng.choice(list(fleet.there)))


async def ask_on(front: Front, seed: int, until: float) -> int:
    rng, count = random.Random(seed), 0
    while asyncio.get_running_loop().time() < until:
        count += 1
        await front.ask(seed, rng.choice([1, 20, 120, 300]), rng.choice([1, 1, 2, 4]))
    return count


@pytest.mark.parametrize("start", [4.0, 50.0], ids=str)
def test_none_is_lost_though_a_replica_is_killed_every_twenty_seconds(start):
    """With a start of 50 s there is one replica or none most of the time."""

    async def story():
        fleet = SimulatedFleet(replicas=3, rows=8, start=start)
        front = Front(fleet)
        killer = asyncio.ensure_future(kill_on(fleet, 20.0))
        counts = await asyncio.gather(*(ask_on(front, seed, until=100.0) for seed in range(64)))
        killer.cancel()
        return fleet, front, sum(counts)

    fleet, front, asked = run(story())
    assert asked == len(front.seconds) > 64, "each came to its end, every token once"
    assert len(fleet.dead) >= 4 and sum(work.alone > 0 for work in fleet.calls) > 0, "some were suspected"
    if start > 20:
        assert max(front.seconds) > 50, "some waited for longer than a start takes"


def test_no_replica_is_waited_for_until_one_comes():
    async def story():
        fleet = SimulatedFleet(replicas=1, rows=8, start=3600.0)
        front = Front(fleet)
        fleet.kill("r0")
        await front.ask(1, 5)
        return front.seconds[0]

    assert 3600 < run(story()) < 3603


def test_where_none_can_come_that_is_told_at_once_to_all_who_wait():
    async def story():
        fleet = SimulatedFleet(replicas=1, rows=8, start=float("inf"))
        front = Front(fleet)
        fleet.kill("r0")
        waiting = [asyncio.ensure_future(front.ask(number, 5)) for number in range(8)]
        await asyncio.sleep(1000)
        assert not any(one.done() for one in waiting)
        front.board.trouble = "a replica could not load its model: the disk is gone"
        await asyncio.sleep(1.0)
        with pytest.raises(HeadlongError, match=r"no replica serves: .* the disk is gone"):
            await front.ask(9, 5)
        return [str(one.exception()) for one in waiting]

    assert len(set(run(story()))) == 1


@pytest.mark.parametrize("gain", [0, 20], ids="after {} tokens".format)
@pytest.mark.parametrize("every", [None, 20.0], ids=["alone", "beside kills"])
def test_a_request_that_ends_replicas_is_found_out_and_no_other(gain, every):
    """It ends each after some tokens more; all others come to their ends."""

    def harms(request, given):
        return request.prompt == (POISON + 1,) and given == gain

    async def story():
        fleet = SimulatedFleet(replicas=3, rows=8, start=5.0, harms=harms)
        front = Front(fleet)
        killer = None if every is None else asyncio.ensure_future(kill_on(fleet, every))
        others = [asyncio.ensure_future(ask_on(front, seed, until=40.0)) for seed in range(16)]
        await asyncio.sleep(1.0)
        with pytest.raises(HarmfulError, match="were lost to this request"):
            await front.ask(POISON, 2000, 2)
        asked = sum(await asyncio.gather(*others))
        if killer is not None:
            killer.cancel()
        assert len(front.seconds) == asked, "no other was given up"
        return fleet.harmed

    # Trials of many tokens take seconds, in which replicas may die by chance: more of them are needed.
    assert run(story()) <= (TRIED_AFTER + GUILTY + 1 if gain == 0 else 20)


def test_what_speaks_against_a_call():
    deaths = Deaths()
    suspicion = Suspicion(deaths)
    for losses in range(1, 4):
        suspicion.lose(f"r{losses}", ["a", "b"], float(losses))
        assert suspicion.alone == (losses >= TRIED_AFTER) and not suspicion.guilty
    suspicion.try_alone(["a", "b"], 1, 4.0)
    for row, tokens in (("a", CLEARING), ("b", CLEARING - 1)):
        suspicion.take(Chunk(0, "", (1,) * tokens, (False,) * tokens, request_id=row), 5.0)
    suspicion.lose("r4", ["a", "b"], 6.0)
    assert suspicion.alone == LONGER, "it came through a trial in vain"
    for row in "ab":
        suspicion.take(Chunk(0, "", (1,) * CLEARING, (False,) * CLEARING, request_id=row), 7.0)
    assert suspicion.losses == suspicion.alone == 0, "it is cleared"
    for number in range(40):
        suspicion.lose(f"s{number}", ["a"], 8.0 + number)
        assert not suspicion.guilty and suspicion.alone <= 1, "losses alone prove nothing"


@pytest.mark.parametrize(("seconds", "needed"), [(0.05, 3), (2.0, 8)])
def test_more_deaths_than_chance_explains(seconds, needed):
    """A replica was lost every twenty seconds for ten minutes; trials of two seconds meet that now and then."""
    deaths = Deaths()
    for number in range(30):
        deaths.note(f"r{number}", 20.0 * number)
    suspicion, count = Suspicion(deaths), 0
    while not suspicion.guilty:
        count += 1
        suspicion.try_alone(["a"], 1, 600.0)
        suspicion.lose(f"s{count}", ["a"], 600.0 + seconds)
    assert count == needed
