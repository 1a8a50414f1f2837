"""The model of a cluster: what follows from its numbers by hand, what must not be luck, and the measured cases."""

import json
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from cluster_model import Cluster, Machine, Simulation
from cluster_picture import draw
from cluster_simulator import FITTED, TOLERANCE, Case, compare, fitted, small
from cluster_users import Habits, Queue, Thinkers
from turns_of_many import Workload

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MACHINE = Machine(((1, 0.010), (3, 0.012)), 0.001, max_rows=4, chunk_tokens=64, cache_tokens=4096)
ONE = Workload(
    conversations=1, turns=2, families=1, family_tokens=32, first_tokens=64, answer_tokens=16, clients=1
)
MANY = replace(ONE, conversations=24, turns=3, families=3, clients=8)


def run(replicas=1, workload=ONE, machine=MACHINE, routing="prefix", **options):
    return Simulation(Cluster(replicas, machine, routing, **options), Queue(workload)).run()


def test_steps_lie_on_a_line():
    assert MACHINE.step_seconds(2, 0) == pytest.approx(0.011)
    assert MACHINE.step_seconds(5, 0) == pytest.approx(0.014), "beyond the last one, too"
    assert MACHINE.step_seconds(1, 7) == pytest.approx(0.017)
    assert replace(MACHINE, chunk_seconds=0.002).step_seconds(3, 0) == pytest.approx(0.018)


def test_one_conversation_by_hand():
    outcome = run()
    # 96 tokens in two chunks, then 15 steps; then 32 that are new after 112 that are cached, and 15 steps.
    assert outcome.seconds == pytest.approx((0.074 + 0.042 + 15 * 0.010) + (0.042 + 15 * 0.010))
    assert (outcome.tokens, outcome.prompt_tokens, outcome.cached_tokens) == (32, 96 + 144, 112)
    assert outcome.first == pytest.approx([0.116, 0.042])
    assert outcome.speeds == pytest.approx([100, 100])
    assert outcome.busy_seconds == pytest.approx(outcome.seconds)


def test_a_small_cache_forgets():
    assert (
        run(workload=MANY, machine=replace(MACHINE, cache_tokens=256)).hit_rate
        < run(workload=MANY).hit_rate / 2
    )


def test_rows_beyond_the_most_wait():
    few = run(workload=replace(MANY, clients=4))
    assert run(workload=MANY).tokens_per_second == pytest.approx(few.tokens_per_second, rel=0.1)
    assert max(run(workload=MANY).first) > max(few.first)


def test_replicas_with_cores_of_their_own_add_up():
    speeds = [run(count, MANY).tokens_per_second for count in (1, 2, 4)]
    assert 1.5 < speeds[1] / speeds[0] <= 2.2 and speeds[2] > speeds[1]
    shared = run(4, MANY, cores=1).tokens_per_second
    assert shared < 1.1 * speeds[0], "one core does no more than one replica"
    alone, with_others = run(), run(cores=1, beside_seconds=0.01)
    assert with_others.seconds == pytest.approx(alone.seconds + 33 * 0.01), (
        "33 steps, each with its part beside it"
    )


def test_prefixes_beat_chance():
    by_prefix, at_random = (run(3, MANY, routing=routing).hit_rate for routing in ("prefix", "random"))
    assert by_prefix > run(1, MANY).hit_rate - 0.05
    assert at_random < by_prefix - 0.1


def test_the_same_numbers_give_the_same_numbers():
    assert run(3, MANY) == run(3, MANY)
    habits = Habits(60, 2.0, 3, 2, 128, 64, 64)
    outcomes = [Simulation(Cluster(2, MACHINE), Thinkers(habits)).run(20, 10) for _ in range(2)]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0].seconds == 20 and 0 < outcomes[0].busy_seconds / 20 <= 2.02


def test_the_measured_cases_are_foretold():
    """On the numbers of a machine of two cores, kept beside the simulator."""
    measured = json.loads((BENCHMARKS / "measured_cluster.json").read_text())
    machine, beside = fitted(measured)
    cases = compare(measured, machine, beside)
    assert len(cases) == 4
    assert [case for case in cases if case.deviation > TOLERANCE] == []
    assert 0 < machine.chunk_seconds < 0.001 and 0 < machine.prompt_seconds < 0.02 and 0 < beside < 0.01
    foretold = {(case.replicas, case.routing) for case in cases} - set(FITTED)
    assert foretold == {(3, "prefix"), (3, "random")}, "three costs were fitted to the other cases"
    assert small(measured, (1, "prefix"), machine).tokens == small(measured, (3, "random"), machine).tokens


def test_a_deviation_is_the_larger_of_two():
    assert Case(1, "prefix", 100.0, 90.0, 0.8, 0.84).deviation == pytest.approx(0.1)
    assert Case(1, "prefix", 100.0, 99.0, 0.8, 1.0).deviation == pytest.approx(0.25)


def test_the_picture_is_drawn():
    answers = [
        {"replicas": count, "routing": routing, "first_p99": 9.0 / count, "speed_p50": 5.0 * count}
        for count in (2, 4, 8)
        for routing in ("prefix", "random")
    ]
    root = ET.fromstring(draw(1000, answers))
    assert len(root.findall(".//{*}polyline")) == 4 and len(root.findall(".//{*}circle")) == 12
    texts = "".join(root.itertext())
    assert "1,000 users" in texts and "replicas" in texts
