"""What a step's tokens are to be chosen by: entries of rows that each ask for something, or rows that ask alike.

The first kind looks at every row on the host and touches only the entries that asked. The second asks the host for
nothing: what rows have in common decides which operations there are, and settings are gathered by slot on the device.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import Tensor

from headlong.sampling.constraints import constrain, unpacked
from headlong.sampling.entries import Entries
from headlong.sampling.processors import Alike, adjust, shape, shape_all
from headlong.sampling.table import SamplingTable


class Wanted(Protocol):
    """Of L logits rows, M of which are sampled."""

    @property
    def sampled(self) -> Literal["none", "some", "all"]:
        """Which of them; the others want their best token."""
        ...

    def adjusted(self, logits_LV: Tensor) -> Tensor:
        """Penalties, bias, bans, minimum length and constraints: what greedy decoding obeys too."""
        ...

    def picked(self, adjusted_LV: Tensor) -> Tensor:
        """Those that are sampled, [M, V]."""
        ...

    def shaped(self, adjusted_LV: Tensor) -> Tensor:
        """Their scores after temperature and filters, [M, V]."""
        ...

    @property
    def filters_M4(self) -> Tensor:
        """Their temperature, top-k, top-p and min-p, for an op that filters."""
        ...

    @property
    def keys_M4(self) -> Tensor:
        """The keys of their noise."""
        ...

    def mixed(self, best_L: Tensor, sampled_M: Tensor) -> Tensor:
        """The best tokens of some and the sampled ones of the others."""
        ...


class RaggedWanted:
    """Entries, each by its own request."""

    def __init__(self, table: SamplingTable, entries: Entries) -> None:
        self._table, self._entries = table, entries
        self._index = entries.which(lambda params: not params.greedy)
        self._all = len(self._index) == sum(row.num_tokens for row in entries.rows)

    @property
    def sampled(self) -> Literal["none", "some", "all"]:
        if not self._index:
            return "none"
        return "all" if self._all else "some"

    def adjusted(self, logits_LV: Tensor) -> Tensor:
        return adjust(logits_LV, self._entries, self._table)

    def picked(self, adjusted_LV: Tensor) -> Tensor:
        return adjusted_LV if self._all else adjusted_LV[self._index_M]

    def shaped(self, adjusted_LV: Tensor) -> Tensor:
        return shape(adjusted_LV, self._entries, self._table, self._index)

    @property
    def filters_M4(self) -> Tensor:
        return self._table.filters(self._entries.slots_L[self._index_M])

    @property
    def keys_M4(self) -> Tensor:
        index_M = self._index_M
        return self._table.keys(self._entries.slots_L[index_M], self._entries.positions_L[index_M])

    def mixed(self, best_L: Tensor, sampled_M: Tensor) -> Tensor:
        best_L[self._index_M] = sampled_M
        return best_L

    @cached_property
    def _index_M(self) -> Tensor:
        return torch.tensor(self._index, device=self._entries.device)


class EvenWanted:
    """R rows that ask alike, with as many logits for each. The last of a row's stand after all its drafts, each of the
    others after one less."""

    def __init__(
        self,
        table: SamplingTable,
        penalise: Callable[..., Tensor] | None,
        slots_R: Tensor,
        positions_N: Tensor | None,
        drafts_RK: Tensor,
        asked: Alike,
        bits_NB: Tensor | None,
        least_filters_4: Tensor,
    ) -> None:
        """`least_filters_4` are those that take least time, for rows whose sampled token nobody asks for."""
        self._table, self._penalise, self._asked = table, penalise, asked
        self._slots_R, self._positions_N, self._drafts_RK = slots_R, positions_N, drafts_RK
        self._bits_NB, self._least_filters_4 = bits_NB, least_filters_4
        self._each = 1

    @property
    def sampled(self) -> Literal["none", "some", "all"]:
        if self._asked.kind is None:
            return "none"
        return "some" if self._asked.greedy else "all"

    def adjusted(self, logits_LV: Tensor) -> Tensor:
        asked, table = self._asked, self._table
        self._each = len(logits_LV) // len(self._slots_R)
        if asked.kind is not None:
            logits_LV = logits_LV.float()
        if asked.penalised or asked.biased:
            assert self._penalise is not None, "such rows are not alike then"
            counts_SV = table.tally.counts_SV if asked.penalised else None
            bias_SV = table.bias if asked.biased else None
            logits_LV = self._penalise(
                logits_LV.float(), self._slots_R, table.changes_S5, counts_SV, bias_SV, self._drafts_RK
            )
        if asked.early:
            too_early_N1 = (self._positions < table.earliest[self._slots_N])[:, None]
            logits_LV = logits_LV.masked_fill(table.stops[self._slots_N] & too_early_N1, -torch.inf)
        if self._bits_NB is None:
            return logits_LV
        return constrain(logits_LV, unpacked(self._bits_NB, logits_LV.shape[1]))

    def picked(self, adjusted_LV: Tensor) -> Tensor:
        return adjusted_LV

    def shaped(self, adjusted_LV: Tensor) -> Tensor:
        assert self._asked.kind is not None
        return shape_all(adjusted_LV, self._slots_N, self._table, self._asked.kind)

    @property
    def filters_M4(self) -> Tensor:
        filters_N4 = self._filters_N4
        if not self._asked.greedy:
            return filters_N4
        return torch.where(self._greedy_N[:, None], self._least_filters_4, filters_N4)

    @property
    def keys_M4(self) -> Tensor:
        return self._table.keys(self._slots_N, self._positions)

    def mixed(self, best_L: Tensor, sampled_M: Tensor) -> Tensor:
        return torch.where(self._greedy_N, best_L, sampled_M)

    @property
    def _positions(self) -> Tensor:
        assert self._positions_N is not None, "noise and minimum lengths are matters of the position"
        return self._positions_N

    @cached_property
    def _filters_N4(self) -> Tensor:
        return self._table.filters(self._slots_N)

    @cached_property
    def _greedy_N(self) -> Tensor:
        return self._filters_N4[:, 0] == 0.0

    @cached_property
    def _slots_N(self) -> Tensor:
        return self._slots_R if self._each == 1 else self._slots_R.repeat_interleave(self._each)
