"""What a step's Triton kernels share: which rows it feeds and where their tokens and pages are, on the device.

Kernels take from the host only what bounds a grid; all that varies between steps of one shape they read from here.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from headlong.env import triton_ops_wanted
from headlong.ops.places import Places
from headlong.ops.prepared import PreparedStep
from headlong.ops.upload import upload
from headlong.types import Rows

START_ON_DEVICE, ENDED = -1, -1
"""START_ON_DEVICE is the start of a row whose position only the device knows; ENDED is the position that the device
stores for a row that has ended."""
NUM_TIMESTAMPS = 4
"""The number of timestamps, in nanoseconds, that a step which is one CUDA graph records."""
SEEN_IN_PROMPT = 1 << 30
"""A flag in the counts of a row's tokens, for a token that is penalised because it stood in the prompt, though it was
not produced."""
FEWEST_POSITIONS = 1024
"""The fewest positions that a step's attention is sized for; larger steps double this, so that steps come in few
shapes, each of which is captured once."""


@dataclass(frozen=True)
class TritonStep(PreparedStep):
    """A prepared step of R rows with N tokens in all, flattened row after row. Integers are int32."""

    table_R6: Tensor
    """The table of rows: slot, position of the first token, tokens, drafts among them (the last ones), drafts of the
    last step to replay, and index of the first token among all N."""
    row_N: Tensor
    """The row that each token belongs to."""
    position_N: Tensor
    pages_RP: Tensor
    """The pages of each row, in order; entries after the last page are not read."""
    page_size: int
    most_tokens: int
    """The most tokens that any row has."""
    longest: int
    """The most positions that any row attends to, rounded up."""

    @cached_property
    def places(self) -> Places:
        slot_N, start_N, count_N, _, _, first_N = self.table_R6.long()[self.row_N.long()].unbind(1)
        row_N, position_N, pages_RP = self.row_N.long(), self.position_N.long(), self.pages_RP.long()
        return Places(
            row_N, slot_N, position_N, start_N, start_N + count_N, first_N, pages_RP, self.page_size
        )

    @property
    def key(self) -> Hashable:
        return self.page_size, self.most_tokens, self.longest

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.table_R6, self.row_N, self.position_N, self.pages_RP

    def over(self, tensors: Sequence[Tensor]) -> "TritonStep":
        table_R6, row_N, position_N, pages_RP = tensors
        return replace(self, table_R6=table_R6, row_N=row_N, position_N=position_N, pages_RP=pages_RP)

    @classmethod
    def of(cls, rows: Rows, pages_RP: Tensor, page_size: int) -> "TritonStep":
        device = pages_RP.device
        table, row_of, positions, first = [], [], [], 0
        for row, (slot, start, count, drafts, replay) in enumerate(zip(*rows, strict=True)):
            table.extend([slot, start, count, drafts, replay, first])
            row_of.extend([row] * count)
            positions.extend(range(start, start + count))
            first += count
        longest = round_up_positions(max(map(sum, zip(rows.starts, rows.query_lens, strict=True))))
        missing = -(-longest // page_size) - pages_RP.shape[1]
        table_X, row_N, position_N = upload([table, row_of, positions], device, torch.int32)
        return cls(
            table_R6=table_X.view(-1, 6),
            row_N=row_N,
            position_N=position_N,
            pages_RP=F.pad(pages_RP.to(torch.int32), (0, max(0, missing))),
            page_size=page_size,
            most_tokens=max(rows.query_lens),
            longest=longest,
        )


def round_up_positions(count: int) -> int:
    """Returns the number of positions that a step is sized for which attends to so many."""
    longest = FEWEST_POSITIONS
    while longest < count:
        longest *= 2
    return longest


def refusal(dtype: torch.dtype, device: torch.device) -> str | None:
    """Returns why Triton's kernels cannot serve this dtype and device; None if they can."""
    if device.type not in ("cuda", "cpu"):
        return f"run on CUDA devices, not on {device.type}"
    if not triton_ops_wanted(device.type):
        return "run on CUDA devices" if device.type == "cpu" else "are turned off by HEADLONG_TRITON=0"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"take bfloat16, float16 and float32, not {dtype}"
    if find_spec("triton") is None:
        return "need the package triton, which is not installed"
    return None
