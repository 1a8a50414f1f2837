"""Whole numbers from the host to a device: all of a step's in one copy that nobody waits for."""

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGN = 4
"""The multiple of numbers at which each list begins, as a tensor of its own would: kernels are compiled for how their
arguments are aligned."""


def upload(
    lists: Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype = torch.long
) -> list[Tensor]:
    """Returns one tensor for each list."""
    if device.type == "cpu":
        return [torch.tensor(values, dtype=dtype) for values in lists]
    sizes = [len(values) + -len(values) % ALIGN for values in lists]
    together = [number for values in lists for number in (*values, *((0,) * (-len(values) % ALIGN)))]
    there = torch.tensor(together, dtype=dtype).to(device, non_blocking=True)
    return [part[: len(values)] for part, values in zip(there.split(sizes), lists, strict=True)]
