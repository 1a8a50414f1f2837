"""The numbers of a step whose rows all feed as many tokens, as one flat array that travels to the device in one go.

Most of them are the same in every step of so many rows and drafts; a step fills in slots, starts and the like. On the
device the parts are views, so nothing is computed to take it apart.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headlong.ops.upload import ALIGN
from headlong.types import RowPlan

SLOT, START, COUNT, DRAFTS, REPLAY, FIRST = range(6)
"""Columns of `TritonStep.table_R6`."""


class Pass(NamedTuple):
    """Where a pass finds its rows and tokens, as `TritonStep` has them."""

    table_R6: Tensor
    row_N: Tensor
    position_N: Tensor


class EvenLayout:
    """R rows of one certain token and K drafts each: the target's pass, and K − 1 of the head's, each a token a row."""

    def __init__(self, num_rows: int, num_drafts: int) -> None:
        self.num_rows, self.num_drafts = num_rows, num_drafts
        self._parts: list[tuple[int, tuple[int, ...]]] = []
        self._values: list[np.ndarray] = []
        self._moving: list[np.ndarray] = []
        """Row that each number's start is added from, + 1; 0 for numbers that stay."""
        self._add_pass(1 + num_drafts, num_drafts, 0)
        for index in range(num_drafts - 1):
            self._add_pass(1, 0, index)
        self._add(np.zeros(num_rows, np.int64))
        self._template = np.concatenate(self._values).astype(np.int32)
        rows_X = np.concatenate(self._moving)
        self._start_at = rows_X.nonzero()[0]
        self._start_row = rows_X[self._start_at] - 1
        table = 6 * np.arange(num_rows)
        self._slot_at, self._replay_at = table + SLOT, table + REPLAY
        self._depth_at = self._parts[-1][0] + np.arange(num_rows)

    def fill(self, rows: Sequence[RowPlan]) -> Tensor:
        """All of a step's numbers, on the host."""
        flat = self._template.copy()
        fields = np.array([(row.slot, row.start, row.num_replay, row.num_drafts) for row in rows], np.int32)
        flat[self._start_at] += fields[self._start_row, 1]
        flat[self._slot_at] = fields[:, 0]
        flat[self._replay_at] = fields[:, 2]
        flat[self._depth_at] = fields[:, 3]
        return torch.from_numpy(flat)

    def passes(self, flat_X: Tensor) -> list[Pass]:
        """The target's, then the head's."""
        views = [flat_X[first : first + int(np.prod(shape))].view(shape) for first, shape in self._parts[:-1]]
        return [Pass(*views[i : i + 3]) for i in range(0, len(views), 3)]

    def slots(self, flat_X: Tensor) -> Tensor:
        return flat_X[: 6 * self.num_rows : 6]

    def depths(self, flat_X: Tensor) -> Tensor:
        """Drafts that each row really has: what it is fed beyond them is padding."""
        first, shape = self._parts[-1]
        return flat_X[first : first + shape[0]]

    def _add_pass(self, each: int, drafts: int, ahead: int) -> None:
        """`each` tokens a row, the first `ahead` positions after the row's start."""
        row_R, place_J = np.arange(self.num_rows), np.arange(each)
        table_R6 = np.zeros((self.num_rows, 6), np.int64)
        table_R6[:, START], table_R6[:, COUNT], table_R6[:, DRAFTS] = ahead, each, drafts
        table_R6[:, FIRST] = each * row_R
        moving = np.zeros_like(table_R6)
        moving[:, START] = row_R + 1
        row_N = row_R.repeat(each)
        self._add(table_R6, moving)
        self._add(row_N)
        self._add(ahead + np.tile(place_J, self.num_rows), row_N + 1)

    def _add(self, values: np.ndarray, moving: np.ndarray | None = None) -> None:
        self._parts.append((sum(map(len, self._values)), values.shape))
        padding = (0, -values.size % ALIGN)
        self._values.append(np.pad(values.flatten(), padding))
        self._moving.append(np.pad((np.zeros_like(values) if moving is None else moving).flatten(), padding))
