"""Every kernel of a decode step, compiled for GPUs that are not there: those that people have at home hold less in
shared memory than the ones that kernels are measured on, and older ones lack types and instructions. A kernel that asks
for what there is not would not start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
"""Bytes of a program at most, by compute capability: A100, RTX 30, RTX 40, H100 and H200, RTX 50."""
SCRIPT = Path(__file__).parents[1] / "support" / "compile_launches.py"


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_kernels_fit(capability):
    run = subprocess.run(
        [sys.executable, SCRIPT, str(capability), str(SHARED_MEMORY[capability])],
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    taken = json.loads(run.stdout)
    kernels = {name.split(":")[1] for name in taken}
    assert ("walk_kernel" in kernels) == (capability == 90)
    assert {"attend_kernel", "delta_rule_kernel", "grouped_gemm_kernel", "heads_kernel"} <= kernels
    assert {"mix_kernel", "make_kernel", "score_kernel", "list_kernel", "route_kernel"} <= kernels
    assert max(taken.values()) <= SHARED_MEMORY[capability], taken
