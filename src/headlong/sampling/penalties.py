"""Penalties on tokens that were seen. Only these are touched, however large the vocabulary."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

LEAST_ROOM = 64
NAMES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


class Seen:
    """The tokens of one row that are penalised, each once, and how often each was produced. Those of its prompt are
    among them where they count."""

    def __init__(self, prompt: Iterable[int], output: Iterable[int], device: torch.device) -> None:
        self._places: dict[int, int] = {}
        self._ids_T = torch.empty(0, dtype=torch.long, device=device)
        self._counts_T = torch.empty(0, dtype=torch.int32, device=device)
        self._list(prompt)
        self.count(output)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def ids_T(self) -> Tensor:
        return self._ids_T[: len(self)]

    @property
    def counts_T(self) -> Tensor:
        return self._counts_T[: len(self)]

    def count(self, tokens: Iterable[int]) -> None:
        """Takes note of what was produced."""
        tokens = list(tokens)
        self._list(tokens)
        places = torch.tensor([self._places[token] for token in tokens], dtype=torch.long)
        ones = torch.ones(len(tokens), dtype=torch.int32, device=self._counts_T.device)
        self._counts_T.index_add_(0, places.to(ones.device), ones)

    def _list(self, tokens: Iterable[int]) -> None:
        known = len(self)
        new = [token for token in dict.fromkeys(tokens) if token not in self._places]
        for token in new:
            self._places[token] = len(self._places)
        if len(self) > len(self._ids_T):
            self._make_room(known)
        self._ids_T[known : len(self)] = torch.tensor(new, dtype=torch.long)

    def _make_room(self, known: int) -> None:
        ids_T, counts_T, room = self._ids_T, self._counts_T, max(LEAST_ROOM, 2 * len(self))
        self._ids_T, self._counts_T = ids_T.new_zeros(room), counts_T.new_zeros(room)
        self._ids_T[:known], self._counts_T[:known] = ids_T[:known], counts_T[:known]


class Penalised(NamedTuple):
    """An entry of a step whose logits are changed."""

    number: int
    seen: Seen
    offset: int
    """Drafts of its row that count as produced."""


def penalise(
    logits_LV: Tensor, penalised: list[Penalised], penalties_M3: Tensor, prefix_MK: Tensor | None
) -> None:
    """In place. `penalties_M3` are of repetition, presence and frequency; the first `offset` of an entry's line of
    drafts count as produced."""
    device = logits_LV.device
    lengths = [len(one.seen) for one in penalised]
    entry_T = torch.repeat_interleave(torch.tensor(lengths, device=device), output_size=sum(lengths))
    ids_T = torch.cat([one.seen.ids_T for one in penalised])
    counts_T = torch.cat([one.seen.counts_T for one in penalised])
    drafted = [(m, place) for m, one in enumerate(penalised) for place in range(one.offset)]
    if drafted:
        assert prefix_MK is not None, "entries after drafts need them"
        entry_T, ids_T, counts_T = _with_drafts(entry_T, ids_T, counts_T, drafted, prefix_MK)
    rows_T = torch.tensor([one.number for one in penalised], device=device)[entry_T]
    repetition, presence, frequency = penalties_M3.to(logits_LV.dtype)[entry_T].unbind(1)
    logits_T = logits_LV[rows_T, ids_T]
    logits_T = torch.where(logits_T > 0, logits_T / repetition, logits_T * repetition)
    logits_LV[rows_T, ids_T] = logits_T - (counts_T > 0) * presence - counts_T * frequency


def _with_drafts(
    entry_T: Tensor, ids_T: Tensor, counts_T: Tensor, drafted: list[tuple[int, int]], prefix_MK: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, with drafts behind. A token that is there twice has its whole count both times."""
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
