"""Penalties on tokens that were seen. Only these are touched, however large the vocabulary."""

from array import array
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

NAMES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


class Seen:
    """The tokens of one row that are penalised, each once, and how often each was produced. Those of its prompt are
    among them where they count. On the host, which knows every token that was committed."""

    def __init__(self, prompt: Iterable[int], output: Iterable[int]) -> None:
        self.ids, self.counts = array("q"), array("i")
        self.num_produced = 0
        self._places: dict[int, int] = {}
        for token in prompt:
            self._place(token)
        self.count(output)

    def __len__(self) -> int:
        return len(self.ids)

    def count(self, tokens: Iterable[int]) -> None:
        """Takes note of what was produced."""
        for token in tokens:
            self.counts[self._place(token)] += 1
            self.num_produced += 1

    def _place(self, token: int) -> int:
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = len(self.ids)
            self.ids.append(token)
            self.counts.append(0)
        return place


class Penalised(NamedTuple):
    """A row of a step whose logits are changed: those of `num_tokens` entries from `first_entry` on."""

    seen: Seen
    first_entry: int
    num_tokens: int
    offset: int
    """Drafts of the row that count as produced at its first entry; at each further one it is one more."""


def penalise(
    logits_LV: Tensor, rows: list[Penalised], penalties_M3: Tensor, prefix_MK: Tensor | None
) -> None:
    """Applies penalties to logits in place. `penalties_M3` are those of repetition, presence and frequency, by entry of
    these rows; `prefix_MK` are the drafts of an entry's row, of which the first count as produced."""
    entry_T, ids_T, counts_T = _pairs(rows, logits_LV.device)
    offsets = [row.offset + ahead for row in rows for ahead in range(row.num_tokens)]
    drafted = [(m, place) for m, offset in enumerate(offsets) for place in range(offset)]
    if drafted:
        assert prefix_MK is not None, "entries after drafts need them"
        entry_T, ids_T, counts_T = _with_drafts(entry_T, ids_T, counts_T, drafted, prefix_MK)
    numbers = [row.first_entry + ahead for row in rows for ahead in range(row.num_tokens)]
    numbers_T = torch.tensor(numbers, device=logits_LV.device)[entry_T]
    repetition, presence, frequency = penalties_M3.to(logits_LV.dtype)[entry_T].unbind(1)
    logits_T = logits_LV[numbers_T, ids_T]
    logits_T = torch.where(logits_T > 0, logits_T / repetition, logits_T * repetition)
    logits_LV[numbers_T, ids_T] = logits_T - (counts_T > 0) * presence - counts_T * frequency


def _pairs(rows: list[Penalised], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens that each entry's row has seen: entry, token, and how often it was produced. What a row has seen is
    brought to the device once for all its entries."""
    ids_U = torch.from_numpy(np.concatenate([np.array(row.seen.ids) for row in rows])).to(device)
    counts_U = torch.from_numpy(np.concatenate([np.array(row.seen.counts) for row in rows])).to(device)
    lengths, shifts, first, total = [], [], 0, 0
    for row in rows:
        for _ in range(row.num_tokens):
            lengths.append(len(row.seen))
            shifts.append(first - total)
            total += len(row.seen)
        first += len(row.seen)
    lengths_M, shifts_M = torch.tensor([lengths, shifts], device=device)
    entry_T = torch.repeat_interleave(lengths_M, output_size=total)
    place_T = torch.arange(total, device=device) + shifts_M[entry_T]
    return entry_T, ids_U[place_T], counts_U[place_T]


def _with_drafts(
    entry_T: Tensor, ids_T: Tensor, counts_T: Tensor, drafted: list[tuple[int, int]], prefix_MK: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The seen tokens with the drafts appended. A token that is there twice has its whole count both times."""
    entry_D, place_D = torch.tensor(drafted, device=ids_T.device).unbind(1)
    produced_MK = torch.zeros_like(prefix_MK, dtype=torch.int32).index_put_(
        (entry_D, place_D), torch.ones_like(entry_D, dtype=torch.int32)
    )
    same_TK = (prefix_MK[entry_T] == ids_T[:, None]).int()
    before_MK = torch.zeros_like(produced_MK).index_add_(0, entry_T, same_TK * counts_T[:, None])
    same_MKK = (prefix_MK[:, :, None] == prefix_MK[:, None, :]).int()
    counts_MK = before_MK + (same_MKK * produced_MK[:, None, :]).sum(-1, dtype=torch.int32)
    counts_T = counts_T + (same_TK * produced_MK[entry_T]).sum(-1, dtype=torch.int32)
    return (
        torch.cat((entry_T, entry_D)),
        torch.cat((ids_T, prefix_MK[entry_D, place_D])),
        torch.cat((counts_T, counts_MK[entry_D, place_D])),
    )
