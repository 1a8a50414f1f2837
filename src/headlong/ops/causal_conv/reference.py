"""Depthwise causal convolution of ragged rows over a window that can be rolled back.

A slot's window holds the `kernel - 1` inputs before the drafts of the last step, then those drafts' inputs.
Reading it at an offset of the accepted count is the rollback.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headlong.ops.elementwise import silu


@dataclass(frozen=True)
class ConvPlan:
    """Indices into [windows of all rows, then the new inputs], for a window of W and a kernel of T taps."""

    taps_NT: Tensor
    keep_RW: Tensor
    """What becomes the new window."""


def plan(
    query_lens: tuple[int, ...],
    num_drafts: tuple[int, ...],
    num_replay: tuple[int, ...],
    kernel: int,
    window: int,
    device: torch.device,
) -> ConvPlan:
    past = kernel - 1
    base = len(query_lens) * window
    taps, keep, flat = [], [], 0
    for row, (query_len, drafts, replay) in enumerate(zip(query_lens, num_drafts, num_replay, strict=True)):
        first = row * window + replay
        line = [*range(first, first + past), *range(base + flat, base + flat + query_len)]
        taps.extend(line[t : t + kernel] for t in range(query_len))
        kept = line[query_len - drafts :]
        keep.append(kept + [kept[-1]] * (window - len(kept)))
        flat += query_len
    return ConvPlan(torch.tensor(taps, device=device), torch.tensor(keep, device=device))


def causal_conv(
    x_NC: Tensor, windows_SWC: Tensor, weight_TC: Tensor, slots_R: Tensor, plan: ConvPlan
) -> Tensor:
    """silu(conv(x)); updates the windows of `slots_R`."""
    line = torch.cat((windows_SWC[slots_R].flatten(0, 1), x_NC))
    inputs_NTC = line[plan.taps_NT]
    out = inputs_NTC[:, 0] * weight_TC[0]
    for tap in range(1, weight_TC.shape[0]):
        out = out.add_(inputs_NTC[:, tap] * weight_TC[tap])
    windows_SWC[slots_R] = line[plan.keep_RW]
    return silu(out)
