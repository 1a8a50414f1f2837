"""Servers share cores, whoever multiplies: none stands still because the others' threads spin."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from shared_cores import packed, together

FORMATS = (
    "fp8_block",
    "fp8_e5m2",
    "gptq_actorder",
    "int4_actorder",
    "int8_channel",
    "modelopt_int4_smooth",
    "mxfp8",
    "nf4_nested",
    "nvfp4_modelopt",
)
"""One for each way in which packed weights are multiplied."""


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are counted by affinity")
@pytest.mark.parametrize("how", [None, *FORMATS])
def test_three_servers_on_two_cores(how: str | None, tmp_path: Path) -> None:
    """Where torch multiplies, for want of native kernels, and in packed formats, where these do."""
    model = None if how is None else packed(tmp_path, how)
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:2])
    try:
        (alone,) = together(1, 5.0, "asleep", model)
        speeds = together(3, 8.0, "asleep", model)
    finally:
        os.sched_setaffinity(0, before)
    # Threads that spin come to less than a hundredth; other work on the machine takes less than the rest.
    assert min(speeds) > max(speeds) / 4, f"shared unfairly: {speeds}"
    assert min(speeds) > alone / 12, f"together {speeds}, alone {alone}"
