"""What is the same in every step whose rows all feed as many tokens, kept on the device; a step fills in the rest.

The host tells where each row is in one small array. Where nothing of it changed, it is the very array of the step
before, and nothing travels.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headlong.ops.triton_step import START_ON_DEVICE
from headlong.ops.upload import ALIGN
from headlong.types import RowPlan

COUNT, DRAFTS, FIRST = 2, 3, 5
"""Columns of `TritonStep.table_R6` that stay."""


class Pass(NamedTuple):
    """Where a pass finds its rows and tokens, as `TritonStep` has them, and its tokens' place among all positions."""

    table_R6: Tensor
    row_N: Tensor
    position_N: Tensor
    tokens: slice


class EvenLayout:
    """R rows of one certain token and K drafts each: the target's pass, and K − 1 of the head's, each a token a row."""

    def __init__(self, num_rows: int, num_drafts: int, device: torch.device) -> None:
        self.num_rows, self.num_drafts = num_rows, num_drafts
        each, num_ahead = 1 + num_drafts, max(num_drafts - 1, 0)
        padded, self._tokens = _aligned(num_rows), _aligned(num_rows * each)
        table_PR6 = torch.zeros(1 + num_ahead, padded, 6, dtype=torch.int32)
        table_PR6[0, :num_rows, COUNT], table_PR6[0, :num_rows, DRAFTS] = each, num_drafts
        table_PR6[0, :num_rows, FIRST] = each * torch.arange(num_rows)
        table_PR6[1:, :num_rows, COUNT] = 1
        table_PR6[1:, :num_rows, FIRST] = torch.arange(num_rows)
        self.table_PR6 = table_PR6.to(device)
        self.position_X = torch.zeros(self._tokens + num_ahead * padded, dtype=torch.int32, device=device)
        row_R = torch.arange(num_rows, dtype=torch.int32)
        self._row_N, self._row_R = row_R.repeat_interleave(each).to(device), row_R.to(device)
        self._told: list[tuple[int, int, int, int]] = []
        self._given_R4 = torch.zeros(num_rows, 4, dtype=torch.int32)

    def given(self, rows: Sequence[RowPlan], *, go_on: bool) -> Tensor:
        """What the host tells of each row: its slot, start, drafts to replay and drafts. Nobody may change it."""
        told = [
            (row.slot, START_ON_DEVICE, 0, row.num_drafts)
            if go_on
            else (row.slot, row.start, row.num_replay, row.num_drafts)
            for row in rows
        ]
        if told != self._told:
            self._told, self._given_R4 = told, torch.tensor(told, dtype=torch.int32)
        return self._given_R4

    def passes(self) -> list[Pass]:
        """The target's, then the head's."""
        rows, padded = self.num_rows, self.table_PR6.shape[1]
        found = [self._pass(self.table_PR6[0, :rows], self._row_N, 0)]
        for index, table_R6 in enumerate(self.table_PR6[1:]):
            found.append(self._pass(table_R6[:rows], self._row_R, self._tokens + index * padded))
        return found

    def _pass(self, table_R6: Tensor, row_N: Tensor, first: int) -> Pass:
        tokens = slice(first, first + len(row_N))
        return Pass(table_R6, row_N, self.position_X[tokens], tokens)


def _aligned(count: int) -> int:
    return count + -count % ALIGN
