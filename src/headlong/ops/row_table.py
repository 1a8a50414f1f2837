"""What a step feeds, row by row, in the form native kernels read: [rows, 5] int64."""

import torch
from torch import Tensor


def row_table(
    slots: tuple[int, ...],
    starts: tuple[int, ...],
    query_lens: tuple[int, ...],
    num_drafts: tuple[int, ...],
    num_replay: tuple[int, ...],
) -> Tensor:
    """The order of columns is that of the enum in csrc/native.c."""
    return torch.tensor(list(zip(slots, starts, query_lens, num_drafts, num_replay, strict=True)))
