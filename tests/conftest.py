"""Triton's kernels run in its interpreter where there is no GPU; it must be told before Triton is imported. Where there
is no Triton, there is nothing to test of it.

Tests may run in several processes at once (`pytest -n auto`): one for each core, and each computes with one thread.
"""

import os
from importlib.util import find_spec

import pytest
import torch

from headlong.env import available_cores, available_memory
from support import interpreter

MEMORY_OF_A_WORKER = 3 << 30

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
collect_ignore_glob = [] if find_spec("triton") else ["ops/test_triton_*.py"]
if find_spec("triton") and os.environ.get("TRITON_INTERPRET") == "1":
    interpreter.improve()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """As many workers as have a core and memory of their own."""
    cores, memory = available_cores(), available_memory()
    return cores if memory is None else max(1, min(cores, memory // MEMORY_OF_A_WORKER))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Libraries read these variables when they are loaded: workers inherit them from here."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
