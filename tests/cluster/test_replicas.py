"""What replicas say of themselves, when they end, and what a front makes of it."""

import asyncio
import os
import threading
import time
from contextlib import aclosing
from dataclasses import replace
from types import SimpleNamespace

import pytest
from local_fleet import CONFIG

from headlong import SamplingParams
from headlong.cluster import board, fingerprint, replica
from headlong.cluster.replica import Replica
from headlong.engine.local import LocalEngine
from headlong.errors import HarmfulError
from headlong.server.errors import as_api_error


@pytest.fixture
def engine(world):
    return world.engines[0]


def test_alike_are_those_whose_texts_are(world):
    first, second = (one.facts for one in world.replicas)
    assert first.fingerprint == second.fingerprint and first.replica != second.replica
    others = {
        "more rows": replace(CONFIG, max_rows=4, draft_tokens=0),
        "context": replace(CONFIG, max_context=512),
        "pages": replace(CONFIG, page_size=32),
        "dtype": replace(CONFIG, dtype="bfloat16"),
    }
    found = {name: Replica(LocalEngine.load(None, config), name).facts for name, config in others.items()}
    assert found.pop("more rows").fingerprint == first.fingerprint, "no text depends on it"
    words = {facts.fingerprint for facts in found.values()}
    assert len(words) == 3 and first.fingerprint not in words
    assert {facts.model for facts in found.values()} == {first.model}


def test_a_model_is_its_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "large").write_bytes(bytes(fingerprint.SMALL_BYTES + 1))
    names = {fingerprint.of_model(tmp_path)}
    assert fingerprint.of_model(tmp_path) in names
    for file, data in (
        ("config.json", b"[]"),
        ("large", b"1" + bytes(fingerprint.SMALL_BYTES)),
        ("other", b""),
    ):
        (tmp_path / file).write_bytes(data)
        names.add(fingerprint.of_model(tmp_path))
    assert len(names) == 4


def test_routers_and_the_autoscaler_are_told(world, engine):
    one = world.replicas[0]
    quiet = one.record_routing_stats()
    assert quiet["queued_tokens"] == 0 and not quiet["prefixes"] and quiet["page_size"] == 64

    async def story():
        prompt = engine.text.encode("The dog ran to the park and sat. " * 20)
        requests = engine.prepare([prompt], SamplingParams(max_tokens=300, ignore_eos=True, n=2), "told")
        async for chunk in engine.stream(requests):
            if chunk.token_ids:
                return one.record_routing_stats(), one.record_autoscaling_stats()

    routing, scaling = asyncio.run(story())
    assert routing["running"] + routing["waiting"] == 2 and len(routing["prefixes"]) >= 1
    assert 0 < scaling["queued_tokens"] <= 2 * (300 + 200)
    assert all(len(bytes.fromhex(key)) >= 8 for key in routing["prefixes"])


def test_health_is_the_engines_own_verdict(world, engine, monkeypatch):
    world.replicas[0].check_health()
    monkeypatch.setattr(engine._loop, "ended", "the engine stopped after an error: x")
    with pytest.raises(RuntimeError, match="stopped after an error"):
        world.replicas[0].check_health()


def test_a_replica_that_hangs_ends(monkeypatch):
    """Its engine is nobody else's: whoever watches an engine that hangs ends the process, tests or not."""
    engine, ended, done = LocalEngine.load(None, CONFIG), [], threading.Event()
    monkeypatch.setattr(replica, "LAST_WORDS_SECONDS", 0.0)
    monkeypatch.setattr(os, "_exit", lambda code: (ended.append(code), done.set()))
    engine._loop.hung = True
    Replica(engine, "hangs")
    assert done.wait(10) and ended[0] == replica.EXIT_HUNG


def test_those_who_are_gone_are_remembered(world, monkeypatch):
    asyncio.run(world.run(world.front, SamplingParams(max_tokens=20, ignore_eos=True)))
    world.board.poll()
    before = world.front.stats().totals.generated_tokens
    world.board.lost("a", "the test says so")
    assert [(one.id, one.state) for one in world.front.replicas()] == [("a", "lost"), ("b", "ready")]
    assert not world.board.has("", "") and world.board.has(world.replicas[1].facts.model, "")
    world.board.poll()
    assert [one.state for one in world.front.replicas()] == ["ready", "ready"], "it was heard of again"
    world.board.lost("a", "the test says so")
    world.fleet.silent.add("a")
    monkeypatch.setattr(board, "GONE_SECONDS", -1.0)
    time.sleep(0.01)
    world.fleet.silent.add("b")
    world.board.poll()
    told = world.front.replicas()
    assert [(one.id, one.state, one.why) for one in told] == [("a", "lost", "the test says so")]
    assert world.front.stats().totals.generated_tokens == before
    monkeypatch.setattr("headlong.cluster.client.SILENT_SECONDS", 0.0)
    assert "no replica has answered" in world.front.failure


def test_one_that_is_to_go_drains_as_long_as_it_has_calls(world, monkeypatch):
    """Serve asks nobody who is to go, so it says nothing more; its streams go on to their ends."""

    async def story():
        params = SamplingParams(max_tokens=900, ignore_eos=True)
        requests = await asyncio.to_thread(world.front.prepare, [(1, 2, 3)], params, "drains")
        async with aclosing(world.front.stream(requests)) as chunks:
            await anext(chunks)
            world.fleet.silent.add("a")
            monkeypatch.setattr(board, "GONE_SECONDS", 0.2)
            await asyncio.sleep(0.3)
            world.board.poll()
            return [(one.id, one.state) for one in world.front.replicas()]

    assert asyncio.run(story()) == [("a", "draining"), ("b", "ready")]
    world.board.poll()
    assert [(one.id, one.state) for one in world.front.replicas()] == [("b", "ready")], "it is no loss"


def test_a_request_that_ends_replicas_is_not_to_be_sent_again():
    told = as_api_error(HarmfulError("5 replicas were lost to this request"))
    assert told.status == 500 and told.headers == {"x-should-retry": "false"}


def test_replicas_are_replaced_where_other_files_lie_under_the_same_name(world, monkeypatch):
    loader = pytest.importorskip("headlong.cluster.loader", reason="needs headlong[ray]")
    monkeypatch.setattr(loader, "RayFleet", lambda _: world.fleet)
    monkeypatch.setattr(loader.serve, "get_deployment_handle", lambda *_: None)
    running = SimpleNamespace(applications={"x": SimpleNamespace(status="RUNNING")})
    monkeypatch.setattr(loader.serve, "status", lambda: running)
    facts = world.replicas[0].facts
    wanted = loader._Wanted(facts.version, facts.placement, facts.model)
    assert loader._runs("x", wanted) and not loader._runs("y", wanted)
    for name in ("version", "placement", "model"):
        assert not loader._runs("x", replace(wanted, **{name: "another"})), name
    assert loader._runs("x", loader._Wanted(facts.version)), "whoever joins takes what runs"


def test_the_front_follows_new_settings(world, monkeypatch):
    facts = world.replicas[1].facts
    roomier = replace(facts.description, max_len=2048, max_rows=3)
    monkeypatch.setattr(
        world.replicas[1], "facts", replace(facts, description=roomier, started=facts.started + 9)
    )
    world.board.poll()
    assert world.front.description.max_len == 2048 and world.front.description.max_rows == 8 + 3
    assert world.front.prepare([(1,) * 1500], SamplingParams(), "long")
    assert world.front.text.max_len == 2048
