"""Where each token of a step is: its row, its row's slot, its position, and what else its row feeds.

Plain torch ops that need more of a step than pages read this; a backend's own kernels have it in their own form.

Shape letters: N tokens, R rows, P pages of the longest row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headlong.types import Rows


@dataclass(frozen=True)
class Places:
    """The tokens of a step, flattened row after row."""

    row_N: Tensor
    slot_N: Tensor
    position_N: Tensor
    start_N: Tensor
    """The position of the first token that the same row feeds."""
    end_N: Tensor
    """The position after the last one."""
    first_N: Tensor
    """The flat index of the first token that the same row feeds."""
    pages_RP: Tensor
    page_size: int

    @classmethod
    def of(cls, rows: Rows, pages_RP: Tensor, page_size: int) -> "Places":
        device = pages_RP.device
        counts_R = torch.tensor(rows.query_lens, device=device)
        starts_R = torch.tensor(rows.starts, device=device)
        row_N = torch.arange(len(rows.starts), device=device).repeat_interleave(counts_R)
        first_N = (counts_R.cumsum(0) - counts_R)[row_N]
        start_N = starts_R[row_N]
        return cls(
            row_N=row_N,
            slot_N=torch.tensor(rows.slots, device=device)[row_N],
            position_N=start_N + torch.arange(len(row_N), device=device) - first_N,
            start_N=start_N,
            end_N=(starts_R + counts_R)[row_N],
            first_N=first_N,
            pages_RP=pages_RP,
            page_size=page_size,
        )

    def page_of(self, row_N: Tensor, position: Tensor) -> Tensor:
        """Returns the pages on which these positions of these rows lie; `position` has a dimension more, or is [N]."""
        column = position // self.page_size
        return self.pages_RP[row_N.view(-1, *[1] * (position.dim() - 1)), column]
