"""Depthwise causal convolution of ragged rows over a window that can be rolled back.

A slot's window holds the `kernel - 1` inputs before the drafts of the last step, then those drafts' inputs.
Reading it at an offset of the accepted count is the rollback.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headlong.ops.elementwise import silu
from headlong.types import Rows


@dataclass(frozen=True)
class PreparedConv:
    """A step's rows laid out as lines: what the window holds before each row's tokens, then the tokens.

    `past` picks the former from the flattened windows; lines, taps and kept inputs index [past, new inputs].
    """

    past: Tensor
    taps_TN: Tensor
    keep_from: Tensor
    keep_to: Tensor
    """The places, in the flattened windows, that the kept inputs go to."""


def prepare(rows: Rows, kernel: int, window: int, device: torch.device) -> PreparedConv:
    before = kernel - 1
    base = len(rows.slots) * before
    past, taps, keep_from, keep_to, flat = [], [[] for _ in range(kernel)], [], [], base
    for row, slot in enumerate(rows.slots):
        query_len = rows.query_lens[row]
        first = slot * window + rows.num_replay[row]
        past.extend(range(first, first + before))
        line = [*range(row * before, (row + 1) * before), *range(flat, flat + query_len)]
        for tap in range(kernel):
            taps[tap].extend(line[tap : tap + query_len])
        kept = line[query_len - rows.num_drafts[row] :]
        keep_from.extend(kept)
        keep_to.extend(range(slot * window, slot * window + len(kept)))
        flat += query_len
    return PreparedConv(*(torch.tensor(index, device=device) for index in (past, taps, keep_from, keep_to)))


def causal_conv(x_NC: Tensor, windows_SWC: Tensor, weight_TC: Tensor, prepared: PreparedConv) -> Tensor:
    """Computes silu(conv(x)), and updates the windows of the step's slots."""
    flat_windows = windows_SWC.flatten(0, 1)
    line = torch.cat((flat_windows.index_select(0, prepared.past), x_NC))
    out = line.index_select(0, prepared.taps_TN[0]).mul_(weight_TC[0])
    for tap in range(1, weight_TC.shape[0]):
        out.addcmul_(line.index_select(0, prepared.taps_TN[tap]), weight_TC[tap])
    flat_windows.index_copy_(0, prepared.keep_to, line.index_select(0, prepared.keep_from))
    return silu(out)
