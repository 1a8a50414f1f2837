"""Applies constraints' packed masks to a step's logits. Knows masks and drafts, not who makes them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headlong.types import Constraint


class Asked(NamedTuple):
    """A constrained row of a step: `num_tokens` entries from `first_entry` on, after `offset` and more drafts."""

    constraint: Constraint
    row: int
    offset: int
    first_entry: int
    num_tokens: int


class Allowed(NamedTuple):
    """The M entries that may not take every token, None if those are all there are, and which they may take."""

    index_M: Tensor | None
    mask_MV: Tensor


def collect(
    asked: Sequence[Asked],
    drafts_RK: Tensor | None,
    vocab_size: int,
    device: torch.device,
    *,
    patient: bool = True,
) -> Allowed | None:
    """Asks every constraint for its masks, and waits for each if `patient`; reads back the drafts of its row where any
    stand before an entry."""
    if not asked:
        return None
    depth = max(one.offset + one.num_tokens - 1 for one in asked)
    drafts: list[list[int]] = [[] for _ in asked]
    if depth:
        assert drafts_RK is not None, "entries after drafts need them"
        drafts = drafts_RK[torch.tensor([one.row for one in asked], device=device), :depth].tolist()
    index, packed = [], []
    for one, line in zip(asked, drafts, strict=True):
        before = line[: one.offset + one.num_tokens - 1]
        for place, mask in enumerate(
            one.constraint.masks(before, one.offset, one.num_tokens, patient=patient)
        ):
            if mask is not None:
                index.append(one.first_entry + place)
                packed.append(np.frombuffer(mask, dtype=np.uint8, count=-(-vocab_size // 8)))
    if not index:
        return None
    bits = np.unpackbits(np.stack(packed), axis=1, count=vocab_size, bitorder="little")
    return Allowed(torch.tensor(index, device=device), torch.from_numpy(bits).view(torch.bool).to(device))


def packed(masks: Sequence[bytes | None], vocab_size: int) -> Tensor:
    """A bit for each token, on the host; all of them where everything may stand."""
    size = -(-vocab_size // 8)
    bits_MB = np.full((len(masks), size), 255, dtype=np.uint8)
    for line, mask in zip(bits_MB, masks, strict=True):
        if mask is not None:
            line[:] = np.frombuffer(mask, dtype=np.uint8, count=size)
    return torch.from_numpy(bits_MB)


def unpacked(bits_MB: Tensor, vocab_size: int) -> Tensor:
    """True for each token that may stand."""
    place_8 = torch.arange(8, dtype=torch.uint8, device=bits_MB.device)
    return (bits_MB[:, :, None] >> place_8 & 1).bool().flatten(1)[:, :vocab_size]


def constrain(logits_MV: Tensor, mask_MV: Tensor) -> Tensor:
    """-inf for what is not allowed. Where bans and biases left nothing that is, all that is becomes equal."""
    kept = logits_MV.masked_fill(~mask_MV, -torch.inf)
    nothing_M = kept.amax(-1) == -torch.inf
    # Hardly ever; on a GPU finding out would stall it.
    if kept.device.type == "cpu" and not nothing_M.any():
        return kept
    return kept.masked_fill(nothing_M[:, None] & mask_MV, 0.0)
