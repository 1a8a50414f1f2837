"""One view of all replicas: `/v1/stats` and `/metrics` of a server whose engine stands before several."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headlong.engine.client import EngineStats, Rates, ReplicaStatus, Totals, Usage
from support.scripted import ScriptedEngine, ScriptedEngines
from support.serving import RunningServer


def status(name: str, generated: int = 0, **given) -> ReplicaStatus:
    stats = EngineStats(
        usage=Usage(3, 1, 5, 20, 3, 8),
        totals=Totals(
            generated_tokens=generated, asked_tokens=100, cached_tokens=80, accepted_per_position=[7, 2]
        ),
        recent=Totals(),
        rates=Rates(12.5, 0.0, 0.0, None, None, None),
    )
    return ReplicaStatus(**({"id": name, "state": "ready", "started": 1e9, "stats": stats} | given))


REPLICAS = [
    status("one", 500, state="lost", why="its process ended", requests=9),
    status("two", 300, node="left", requests=8, taken_over=2, repeated=1),
    status("three", 200, node="right", state="draining"),
    ReplicaStatus(id="four", state="ready", started=1e9),
]


@pytest.fixture(scope="module")
def running():
    engine = ScriptedEngine("A dragon slept.")
    with RunningServer(loader=ScriptedEngines(engine), generation_config="auto") as server:
        server.scripted = engine
        yield server


def samples(running) -> dict[str, dict[tuple[str, ...], float]]:
    """Values by what follows the model's name among the labels, by sample."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    with running.client() as http:
        for family in text_string_to_metric_families(http.get("/metrics").text):
            for one in family.samples:
                labels = tuple(value for name, value in one.labels.items() if name != "model_name")
                found.setdefault(one.name.removeprefix("headlong:"), {})[labels] = one.value
    return found


def test_each_replica_has_counters_of_its_own(running):
    running.scripted.others = REPLICAS
    found = samples(running)
    assert found["generation_tokens_total"] == {("two",): 300, ("three",): 200}
    assert found["prefix_cache_hits_total"][("two",)] == 80, "a lost one tells nothing more"
    assert found["spec_decode_num_accepted_tokens_per_pos_total"][("1", "three")] == 2
    assert found["num_requests_running"] == {("two",): 3, ("three",): 3}
    assert found["replicas"] == {("ready",): 2, ("draining",): 1, ("lost",): 1}
    assert found["replica_streams_resumed_total"] == {("one",): 0, ("two",): 2, ("three",): 0, ("four",): 0}
    assert found["replica_sequences_repeated_total"][("two",)] == 1
    assert found["replica_sequences_total"][("one",)] == 9


def test_one_engine_has_no_label(running):
    running.scripted.others = []
    found = samples(running)
    assert list(found["generation_tokens_total"]) == list(found["num_requests_running"]) == [()]
    assert "replicas" not in found and "replica_sequences_total" not in found


def test_the_statistics_list_them(running):
    running.scripted.others = REPLICAS
    with running.client() as http:
        listed = http.get("/v1/stats").json()["replicas"]
        running.scripted.others = []
        assert http.get("/v1/stats").json()["replicas"] == []
    assert [(one["id"], one["state"], one["node"]) for one in listed] == [
        ("one", "lost", ""),
        ("two", "ready", "left"),
        ("three", "draining", "right"),
        ("four", "ready", ""),
    ]
    assert listed[0]["why"] == "its process ended"
    second = listed[1]
    assert (second["running"], second["waiting"], second["pages_used"]) == (3, 1, 5)
    assert (second["cached_tokens"], second["asked_tokens"], second["taken_over"]) == (80, 100, 2)
    assert "running" not in listed[3], "it has told nothing yet"
