"""Serve's router with replicas that only say what they hold; then with real ones in a Ray of its own."""

import asyncio
import functools
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from headlong.cluster.prefix_index import page_keys

pytest.importorskip("ray.serve", reason="needs headlong[ray]")

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from headlong.cluster.router import PrefixRouter

PAGE = 4
APP = DeploymentID(name="replica", app_name="test")


@dataclass(frozen=True)
class Work:
    """What the router looks at of a `cluster.wire.Work`."""

    tokens: tuple[int, ...]
    weight: int = 20
    avoid: tuple[str, ...] = ()
    fingerprint: str = ""


@dataclass
class Replica:
    """A replica as Serve shows it to a router."""

    name: str
    routing_stats: dict[str, Any] = field(default_factory=dict)
    max_ongoing_requests: int = 2
    ongoing: int = 0

    @property
    def replica_id(self) -> ReplicaID:
        return ReplicaID(unique_id=self.name, deployment_id=APP)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        assert deadline_s > 0
        return self.ongoing


def stats(*prompts: tuple[int, ...], queued: int = 0, fingerprint: str = "f") -> dict[str, Any]:
    keys = [key.hex() for tokens in prompts for key in reversed(page_keys((*tokens, 0), PAGE))]
    return {
        "running": 0,
        "waiting": 0,
        "queued_tokens": queued,
        "prefixes": keys,
        "page_size": PAGE,
        "fingerprint": fingerprint,
    }


def call(work: Work | None = None) -> PendingRequest:
    metadata = RequestMetadata(request_id="r", internal_request_id=os.urandom(8).hex())
    return PendingRequest([] if work is None else [work], {}, metadata)


def routed(*replicas: Replica) -> PrefixRouter:
    router = PrefixRouter(APP, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
    router.initialize_state()
    router.update_replicas(list(replicas))
    return router


async def first(router: PrefixRouter, work: Work | None = None) -> str:
    """Where Serve sends a call, its own queues and limits included."""
    replica = await asyncio.wait_for(router._choose_replica_for_request(call(work)), 5)
    return replica.replica_id.unique_id


def in_loop(test):
    """Runs a test in an event loop of its own."""

    @functools.wraps(test)
    def run():
        asyncio.run(test())

    return run


PROMPT = tuple(range(20))


@in_loop
async def test_a_call_goes_where_its_beginning_is():
    router = routed(Replica("a", stats()), Replica("b", stats(PROMPT)), Replica("c", stats(PROMPT[:8])))
    assert {await first(router, Work((*PROMPT, 1))) for _ in range(4)} == {"b"}


@in_loop
async def test_calls_that_begin_alike_follow_each_other_before_anybody_reports():
    router = routed(*(Replica(name, stats(), max_ongoing_requests=99) for name in "abc"))
    works = [Work((family, *PROMPT)) for family in range(6) for _ in range(3)]
    places = await asyncio.gather(*(first(router, work) for work in works))
    assert all(len(set(places[start : start + 3])) == 1 for start in range(0, len(works), 3))
    assert len(set(places)) > 1


@in_loop
async def test_busy_replicas_are_spared():
    router = routed(Replica("a", stats(PROMPT, queued=1000)), Replica("b", stats()))
    assert await first(router, Work((*PROMPT, 1))) == "b"


@in_loop
async def test_where_the_best_takes_no_more_the_next_does():
    full = Replica("a", stats(PROMPT), max_ongoing_requests=1, ongoing=1)
    router = routed(full, Replica("b", stats()))
    assert await first(router, Work((*PROMPT, 1))) == "b"


@in_loop
async def test_where_none_takes_more_calls_wait_without_spinning():
    full = [Replica(name, stats(), max_ongoing_requests=1, ongoing=1) for name in "ab"]
    router, asked = routed(*full), Counter()
    choose = router.choose_replicas

    async def counted(**given):
        asked["times"] += 1
        return await choose(**given)

    router.choose_replicas = counted
    waiting = asyncio.create_task(first(router, Work(PROMPT)))
    await asyncio.sleep(0.4)
    assert not waiting.done()
    assert asked["times"] < 12, "it backs off"
    full[1].ongoing = 0
    assert await waiting == "b"
    assert sum(router.loads.of("ab", time.monotonic()).values()) == Work(PROMPT).weight, "counted once"


@in_loop
async def test_replicas_that_failed_on_a_work_do_not_get_it_again():
    router = routed(Replica("a", stats(PROMPT)), Replica("b", stats()), Replica("c", stats()))
    assert await first(router, Work((*PROMPT, 1), avoid=("a", "b"))) == "c"
    assert await first(router, Work((*PROMPT, 1), avoid=("a", "b", "c"))) == "a", "somebody must say why"


@in_loop
async def test_what_was_begun_goes_on_where_the_model_is_the_same():
    router = routed(
        Replica("a", stats(PROMPT)),
        Replica("b", stats(fingerprint="g")),
        Replica("c", {}, 9),
        Replica("d", stats()),
    )
    places = Counter([await first(router, Work((*PROMPT, 1), fingerprint="g")) for _ in range(8)])
    assert set(places) <= {"b", "c"}, "a replica that has not reported may be like it"
    assert await first(router, Work((*PROMPT, 1), fingerprint="h")) in "abcd"
    assert await first(router, Work((*PROMPT, 1), fingerprint="g", avoid=("b", "c"))) in "bc"
    assert await first(router, Work((*PROMPT, 1), fingerprint="h", avoid=("a", "c", "d"))) == "c", (
        "it may be alike"
    )


@in_loop
async def test_the_gone_are_forgotten():
    router = routed(Replica("a", stats(PROMPT)), Replica("b", stats()))
    router.on_replica_actor_died(ReplicaID(unique_id="a", deployment_id=APP))
    assert await first(router, Work((*PROMPT, 1))) == "b"
    assert router.index.cached((*PROMPT, 1), "a") == {"a": 0}
    router.update_replicas([Replica("c", stats(PROMPT))])
    assert list(router.told) == list(router.index.replicas) == ["c"]
    assert await first(router, Work((*PROMPT, 1))) == "c"


@in_loop
async def test_calls_without_work_are_spread():
    router = routed(*(Replica(name, stats(), max_ongoing_requests=99) for name in "abc"))
    assert len({await first(router) for _ in range(30)}) == 3


@pytest.mark.slow
@pytest.mark.serial
def test_on_a_ray_of_its_own():
    """Replicas that report, are chosen by it, and die."""
    import ray
    from ray import cloudpickle, serve
    from ray.serve.config import RequestRouterConfig

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the replicas cannot import a test
    config = RequestRouterConfig(
        request_router_class="headlong.cluster.router.PrefixRouter",
        request_router_kwargs={"seed": 5},
        request_routing_stats_period_s=0.2,
    )

    @serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 0.1}, request_router_config=config)
    class Holder:
        def __init__(self) -> None:
            self.seen: list[tuple[int, ...]] = []

        def record_routing_stats(self) -> dict[str, Any]:
            return stats(*self.seen)

        async def read(self, work: Work):
            cached = sum(work.tokens[: len(one)] == one for one in self.seen)
            self.seen.append(work.tokens)
            yield serve.get_replica_context().replica_id.unique_id, cached

        async def leave(self, _: Work):
            yield "soon"
            await asyncio.sleep(0.3)
            os._exit(1)

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    try:
        serve.start(proxy_location="Disabled")
        handle = serve.run(Holder.bind(), name="test", route_prefix=None)
        read = handle.options(stream=True, method_name="read")

        def turns(family: int, count: int) -> list[tuple[str, int]]:
            told = []
            for turn in range(count):
                told += list(read.remote(Work((family, *range(10 * (turn + 1))))))
                time.sleep(0.8 if not turn else 0)
            return told

        asked = [turns(family, 3) for family in range(4)]
        for told in asked:
            assert len({place for place, _ in told}) == 1, "a conversation stays where it began"
            assert [cached for _, cached in told] == [0, 1, 2]
        place = asked[0][0][0]
        work = Work((0, *range(40)))
        with pytest.raises(ray.exceptions.RayActorError):
            list(handle.options(stream=True, method_name="leave").remote(work))
        after = list(read.remote(work))
        assert after[0][0] != place
    finally:
        serve.shutdown()
        ray.shutdown()
