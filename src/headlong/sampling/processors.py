"""Turns adjusted logits into the distribution that a request asked for, at every draft position by its own prefix.

Each function touches only the entries that asked for it, so a row's bits do not depend on its neighbours' settings.
Order: what changes.py does, then temperature, top-k, top-p, min-p.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from headlong.params import SamplingParams
from headlong.sampling.entries import Entries
from headlong.sampling.table import SamplingTable

CANDIDATES = 128
"""Best tokens among which top-p looks first."""


class FilterSet(NamedTuple):
    """Which filters a request has."""

    applied: tuple[bool, ...]
    most: int
    """The most tokens that top-k keeps, or more."""

    @classmethod
    def of(cls, params: SamplingParams) -> "FilterSet":
        return cls(tuple(wanted(params) for wanted, _ in _FILTERS), params.top_k)


ANY_FILTERS = FilterSet((), 0)
"""Stands for every set of filters where the op that filters need not know which it is."""


class SamplingSignature(NamedTuple):
    """What rows have in common whose tokens can be chosen without asking the host."""

    filters: FilterSet | None
    """How the rows that are sampled are filtered; None if none is."""
    greedy: bool
    """Whether any row wants the best tokens."""
    penalised: bool
    """Whether any row has penalties."""
    biased: bool
    """Whether any row has a bias or bans."""
    early: bool = False
    """Whether any row has a minimum length."""
    constrained: bool = False
    """Whether a grammar says what some rows may take: the host has to be asked for that, and for nothing else."""

    @property
    def changes(self) -> bool:
        """Whether anything is done to logits before tokens are chosen."""
        return self.penalised or self.biased or self.early


def shape(logits_LV: Tensor, entries: Entries, table: SamplingTable, index: list[int]) -> Tensor:
    """Temperature and filters for the sampled entries `index`: log-probabilities up to a constant, float64,
    with -inf for what was cut."""
    at_M = torch.tensor(index, dtype=torch.long, device=logits_LV.device)
    slots_M = entries.slots_L[at_M]
    logits = heated(logits_LV[at_M], slots_M, table)
    params = [entries.params[i] for i in index]
    for wanted, cut in _FILTERS:
        chosen = [m for m, p in enumerate(params) if wanted(p)]
        if chosen:
            at = torch.tensor(chosen, device=logits.device)
            most = max(params[m].top_k for m in chosen)
            logits[at] = cut(logits[at], slots_M[at], table, most)
    return logits


def shape_all(logits_MV: Tensor, slots_M: Tensor, table: SamplingTable, filters: FilterSet) -> Tensor:
    """`shape` for entries that all have the same filters; asks the host for nothing."""
    logits = heated(logits_MV, slots_M, table)
    for applied, (_, cut) in zip(filters.applied, _FILTERS, strict=True):
        if applied:
            logits = cut(logits, slots_M, table, filters.most)
    return logits


def heated(logits_MV: Tensor, slots_M: Tensor, table: SamplingTable) -> Tensor:
    return logits_MV.double() / table.scalars["temperature"][slots_M, None]


def _top_k(logits_MV: Tensor, slots_M: Tensor, table: SamplingTable, most: int) -> Tensor:
    vocab = logits_MV.shape[1]
    k = table.scalars["top_k"][slots_M].long().clamp(max=vocab)
    best = torch.topk(logits_MV, min(most, vocab), dim=-1).values
    worst_kept = best.gather(1, k[:, None] - 1)
    return logits_MV.masked_fill(logits_MV < worst_kept, -torch.inf)


def _top_p(logits_MV: Tensor, slots_M: Tensor, table: SamplingTable, _: int) -> Tensor:
    """The smallest set of best tokens that holds at least p, of equal ones the first; the best one always stays."""
    p_MV, least_M1 = torch.softmax(logits_MV, dim=-1), table.scalars["top_p"][slots_M, None]
    if logits_MV.device.type == "cpu":
        return logits_MV.masked_fill(~_nucleus(p_MV, least_M1), -torch.inf)
    ordered, order = torch.sort(p_MV, dim=-1, descending=True, stable=True)
    cut = ordered.cumsum(-1) - ordered >= least_M1
    cut[:, 0] = False
    return logits_MV.masked_fill(torch.empty_like(cut).scatter_(1, order, cut), -torch.inf)


def _nucleus(p_MV: Tensor, least_M1: Tensor) -> Tensor:
    """The same set without sorting a whole vocabulary: its few best tokens mostly hold enough. A GPU would have to ask
    the host whether they do."""
    vocab, count = p_MV.shape[1], CANDIDATES
    while True:
        best_MC = torch.topk(p_MV, min(count, vocab), dim=-1).values
        kept_M1 = (best_MC.cumsum(-1) - best_MC < least_M1).sum(-1, keepdim=True).clamp(min=1)
        if count >= vocab or int(kept_M1.max()) < count:
            break
        count *= 8
    last_M1 = best_MC.gather(1, kept_M1 - 1)
    kept_MV, equal_MV = ~(p_MV < last_M1), p_MV == last_M1  # what is no number stays to be found
    spare_M1 = kept_MV.sum(-1, keepdim=True) - kept_M1
    if bool(spare_M1.any()):  # of tokens as likely as the last one only the first
        rank_MV = equal_MV.cumsum(-1)
        kept_MV &= ~equal_MV | (rank_MV <= equal_MV.sum(-1, keepdim=True) - spare_M1)
    return kept_MV


def _min_p(logits_MV: Tensor, slots_M: Tensor, table: SamplingTable, _: int) -> Tensor:
    floor = logits_MV.amax(-1, keepdim=True) + table.scalars["min_p"][slots_M, None].log()
    return logits_MV.masked_fill(logits_MV < floor, -torch.inf)


_FILTERS: tuple[
    tuple[Callable[[SamplingParams], bool], Callable[[Tensor, Tensor, SamplingTable, int], Tensor]], ...
] = (
    (lambda p: p.top_k > 0, _top_k),
    (lambda p: p.top_p < 1, _top_p),
    (lambda p: p.min_p > 0, _min_p),
)
