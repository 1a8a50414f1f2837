"""What is done to logits before tokens are chosen, in one order: penalties, biases and bans, early stops, masks.

Only the first two are done in two ways. `Entries` looks at every row on the host and penalises the tokens that were
seen, of entries that asked for it; rows of one signature are penalised by an op over the whole vocabulary, which asks
the host for nothing and is tried against the first way, bit for bit, before it serves. Greedy decoding obeys it all.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headlong.sampling.constraints import Allowed, constrain
from headlong.sampling.table import SamplingTable


class Early(NamedTuple):
    """The M entries with a minimum length: where they are, None if they are all there are, and whose."""

    index_M: Tensor | None
    slots_M: Tensor
    positions_M: Tensor


class Changes(Protocol):
    """What some rows of logits ask for."""

    def penalised(self, logits_LV: Tensor, /) -> Tensor:
        """Returns the logits with penalties, then biases and bans: new ones if anything at all is to be changed, with
        `early` and `allowed` still to come."""
        ...

    @property
    def early(self) -> Early | None:
        """The entries that may be too early for a token that ends their row; None if there are none."""
        ...

    @property
    def allowed(self) -> Allowed | None:
        """The tokens that constrained entries may take; None if there are none."""
        ...


def adjust(logits_LV: Tensor, changes: Changes, table: SamplingTable) -> Tensor:
    """Returns the logits that greedy decoding goes by. The input is left as it is."""
    logits_LV = changes.penalised(logits_LV)
    if (early := changes.early) is not None:
        too_early_M1 = (early.positions_M < table.earliest[early.slots_M])[:, None]
        barred_MV = table.stops[early.slots_M] & too_early_M1
        logits_LV = _changed(
            logits_LV, early.index_M, lambda logits_MV: logits_MV.masked_fill(barred_MV, -torch.inf)
        )
    if (allowed := changes.allowed) is not None:
        logits_LV = _changed(
            logits_LV, allowed.index_M, lambda logits_MV: constrain(logits_MV, allowed.mask_MV)
        )
    return logits_LV


def _changed(logits_LV: Tensor, index_M: Tensor | None, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Changes these lines in place, or returns all of them changed where there is no index."""
    if index_M is None:
        return change(logits_LV)
    logits_LV[index_M] = change(logits_LV[index_M])
    return logits_LV
