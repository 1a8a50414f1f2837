"""Rings: what a slot keeps of its row's latest tokens, position p at place p % length.

A ring is rolled back by moving the row's length: what lies past it is written again before it is read. It must be
long enough that the tokens of a step that are taken back have overwritten nothing that is still to be read: for a
span of S tokens and K drafts, S − 1 + K places.
"""

import torch
from torch import Tensor

from headlong.ops.places import Places


def latest(given: Tensor, ring: Tensor, places: Places, tokens_M: Tensor, span: int) -> tuple[Tensor, Tensor]:
    """Returns of each of these tokens the `span` latest ones, itself last: [M, span, width], and whether there are such
    tokens; where not, there are zeros. `given` are the tokens of this step [N, width]; earlier ones are in the ring."""
    back_J = torch.arange(1 - span, 1, device=given.device)
    position_MJ = places.position_N[tokens_M][:, None] + back_J
    start_M1 = places.start_N[tokens_M][:, None]
    exists_MJ, is_given_MJ = position_MJ >= 0, position_MJ >= start_M1
    index_MJ = (places.first_N[tokens_M][:, None] + position_MJ - start_M1).clamp_(min=0)
    kept = ring[places.slot_N[tokens_M][:, None], position_MJ % ring.shape[1]]
    found = torch.where(is_given_MJ[..., None], given[index_MJ], kept)
    return found.masked_fill_(~exists_MJ[..., None], 0.0), exists_MJ


def write_ring(given: Tensor, ring: Tensor, places: Places) -> None:
    """Stores the latest tokens of each row; of a prompt's chunk only as many as there are places."""
    length = ring.shape[1]
    last_M = (places.position_N >= places.end_N - length).nonzero()[:, 0]
    ring[places.slot_N[last_M], places.position_N[last_M] % length] = given[last_M]
