"""What a step's tokens are to be chosen by: entries of rows that each ask for something, or rows of one signature.

`RaggedWanted` looks at every row on the host and touches only the entries that asked. `EvenWanted` asks the host for
nothing: the rows' signature decides which operations there are, and settings are gathered by slot on the device.
"""

from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import Tensor

from headlong.ops.backend import Penalise
from headlong.sampling.changes import Changes, Early
from headlong.sampling.constraints import Allowed, unpacked
from headlong.sampling.entries import Entries
from headlong.sampling.processors import SamplingSignature, shape, shape_all
from headlong.sampling.table import SamplingTable


class Wanted(Protocol):
    """What L rows of logits are chosen by, M of which are sampled."""

    @property
    def sampled(self) -> Literal["none", "some", "all"]:
        """How many of the rows are sampled; the others want their best token."""
        ...

    @property
    def changes(self) -> Changes:
        """What is done to all logits first."""
        ...

    def picked(self, adjusted_LV: Tensor) -> Tensor:
        """The rows that are sampled, [M, V]."""
        ...

    def shaped(self, adjusted_LV: Tensor) -> Tensor:
        """The scores of the sampled rows after temperature and filters, [M, V]."""
        ...

    @property
    def filters_M4(self) -> Tensor:
        """Temperature, top-k, top-p and min-p of the sampled rows, for an op that filters."""
        ...

    @property
    def keys_M4(self) -> Tensor:
        """The keys of the sampled rows' noise."""
        ...

    def mixed(self, best_L: Tensor, sampled_M: Tensor) -> Tensor:
        """The best tokens of some and the sampled ones of the others."""
        ...


class RaggedWanted:
    """Entries that are each chosen by their own request."""

    def __init__(self, table: SamplingTable, entries: Entries) -> None:
        self._table, self._entries = table, entries
        self._index = entries.which(lambda params: not params.greedy)
        self._all = len(self._index) == sum(row.num_tokens for row in entries.rows)

    @property
    def sampled(self) -> Literal["none", "some", "all"]:
        if not self._index:
            return "none"
        return "all" if self._all else "some"

    @property
    def changes(self) -> Changes:
        return self._entries

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
    """R rows of one signature, with `each` logits for every row. A row's last logits stand after all its drafts, each
    of the others after one less."""

    def __init__(
        self,
        table: SamplingTable,
        penalise: Penalise | None,
        slots_R: Tensor,
        positions_N: Tensor | None,
        drafts_RK: Tensor,
        signature: SamplingSignature,
        bits_NB: Tensor | None,
        least_filters_4: Tensor,
        each: int,
    ) -> None:
        """`least_filters_4` are those that take least time, for rows whose sampled token nobody asks for."""
        self._table, self._penalise, self._signature = table, penalise, signature
        self._slots_R, self._positions_N, self._drafts_RK = slots_R, positions_N, drafts_RK
        self._bits_NB, self._least_filters_4, self._each = bits_NB, least_filters_4, each

    @property
    def sampled(self) -> Literal["none", "some", "all"]:
        if self._signature.filters is None:
            return "none"
        return "some" if self._signature.greedy else "all"

    @property
    def changes(self) -> Changes:
        return self

    def penalised(self, logits_LV: Tensor) -> Tensor:
        signature, table = self._signature, self._table
        if signature.filters is not None:
            logits_LV = logits_LV.float()
        if not signature.penalised and not signature.biased:
            return logits_LV
        assert self._penalise is not None, "such rows have no signature then"
        counts_SV = table.tally.counts_SV if signature.penalised else None
        bias_SV = table.bias if signature.biased else None
        return self._penalise(
            logits_LV.float(), self._slots_R, table.changes_S5, counts_SV, bias_SV, self._drafts_RK
        )

    @property
    def early(self) -> Early | None:
        return Early(None, self._slots_N, self._positions) if self._signature.early else None

    @property
    def allowed(self) -> Allowed | None:
        bits_NB = self._bits_NB
        return None if bits_NB is None else Allowed(None, unpacked(bits_NB, self._table.vocab_size))

    def picked(self, adjusted_LV: Tensor) -> Tensor:
        return adjusted_LV

    def shaped(self, adjusted_LV: Tensor) -> Tensor:
        assert self._signature.filters is not None
        return shape_all(adjusted_LV, self._slots_N, self._table, self._signature.filters)

    @property
    def filters_M4(self) -> Tensor:
        filters_N4 = self._filters_N4
        if not self._signature.greedy:
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
