"""Every slot's pages as a device has them: of a row that goes on only its new pages travel."""

from collections.abc import Iterable

import torch
from torch import Tensor

from headlong.ops.upload import upload
from headlong.state.state import RowState


class PageMirror:
    """Rows show what they hold before each step that reads it here."""

    def __init__(self, num_slots: int, most_pages: int, device: torch.device) -> None:
        self.pages_SP = torch.zeros(num_slots + 1, most_pages, dtype=torch.int32, device=device)
        """Past a row's own pages it is 0: what is padded may write there."""
        self._known: dict[int, tuple[RowState, int]] = {}
        """By slot: who was seen there last, and with how many pages."""

    def update(self, rows: Iterable[RowState]) -> None:
        slots, places, pages = [], [], []
        for row in rows:
            holder, count = self._known.get(row.slot, (None, 0))
            if holder is not row:
                self.pages_SP[row.slot] = 0
                count = 0
            if len(row.pages) > count or holder is not row:
                self._known[row.slot] = row, len(row.pages)
                new = row.pages[count:]
                slots += [row.slot] * len(new)
                places += range(count, len(row.pages))
                pages += new
        if pages:
            slot_X, place_X, page_X = upload([slots, places, pages], self.pages_SP.device)
            self.pages_SP[slot_X, place_X] = page_X.to(torch.int32)

    def of(self, slots_R: Tensor, count: int) -> Tensor:
        """The first `count` pages of these slots."""
        return self.pages_SP[:, :count][slots_R]
