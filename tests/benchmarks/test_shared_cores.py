"""Servers of formats that torch multiplies share cores: none stands still because the others' threads spin."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from shared_cores import together


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are counted by affinity")
def test_three_servers_on_two_cores() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:2])
    try:
        (alone,) = together(1, 5.0, "asleep")
        speeds = together(3, 8.0, "asleep")
    finally:
        os.sched_setaffinity(0, before)
    # Threads that spin come to less than a hundredth; other work on the machine takes less than the rest.
    assert min(speeds) > max(speeds) / 4, f"shared unfairly: {speeds}"
    assert min(speeds) > alone / 12, f"together {speeds}, alone {alone}"
