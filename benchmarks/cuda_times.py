"""How long work on a GPU takes, by CUDA events."""

import statistics
from collections.abc import Callable

import torch


def milliseconds(work: Callable[[], object], repeats: int = 10) -> float:
    """The median, after two runs that count for nothing."""
    for _ in range(2):
        work()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)
