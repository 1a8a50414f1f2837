"""Triton's kernels run in its interpreter where there is no GPU; it must be told before Triton is imported. Where there
is no Triton, there is nothing to test of it."""

import os
from importlib.util import find_spec

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
collect_ignore_glob = [] if find_spec("triton") else ["ops/test_triton_*.py"]
