"""Compressed entries of a row: how many a token sees, and the numbers of some of them gathered from pages."""

import torch
import torch.nn.functional as F
from torch import Tensor

from headlong.ops.places import Places

PART = 16
"""How many keys are multiplied at a time: products of one shape have the same bits whoever else is there."""
MAX_GATHER = 1 << 22
"""The number of elements gathered at a time, which bounds the memory of long prompts."""


def num_ended(places: Places, ratio: int) -> Tensor:
    """Returns how many entries have ended by each token's position, itself included."""
    return (places.position_N + 1) // ratio


def gathered(
    entries: Tensor, places: Places, tokens_M: Tensor, number_ME: Tensor, ratio: int
) -> tuple[Tensor, Tensor]:
    """Returns these entries of these tokens' rows, in parts [M, parts, PART, D], and which of them there are. Where the
    number is −1, or no entry of that number has ended by the token's position, there are zeros."""
    number_ME = F.pad(number_ME, (0, -number_ME.shape[1] % PART), value=-1)
    exists_ME = (number_ME >= 0) & (number_ME < num_ended(places, ratio)[tokens_M, None])
    position_ME = ((number_ME + 1) * ratio - 1).masked_fill(~exists_ME, 0)
    page_ME = places.page_of(places.row_N[tokens_M], position_ME)
    found = entries[page_ME, position_ME % places.page_size // ratio]
    found = found.masked_fill_(~exists_ME[..., None], 0.0).unflatten(1, (-1, PART))
    return found, exists_ME.unflatten(1, (-1, PART))


def all_ended(places: Places, ratio: int) -> Tensor:
    """Returns the numbers of all entries that each token sees, −1 after the last: [N, most]."""
    ended_N = num_ended(places, ratio)
    number_E = torch.arange(int(ended_N.max()), device=ended_N.device)
    return torch.where(number_E < ended_N[:, None], number_E, -1)
