"""What a device knows of the row in each slot: its pages, the tokens that end it, and where its last step left it.

Of a row that goes on only new pages travel.
"""

from collections.abc import Collection, Iterable

import torch

from headlong.ops.upload import upload
from headlong.state.state import RowState

MOST_STOPS = 8
"""The most tokens ending a row that a device knows of."""


class RowTable:
    """One line for each slot. It is updated before each step that reads it."""

    def __init__(self, num_slots: int, most_pages: int, device: torch.device) -> None:
        places = num_slots + 1
        self.pages_SP = torch.zeros(places, most_pages, dtype=torch.int32, device=device)
        """The pages of each row, in order. Past its own pages it is 0, where padding may write."""
        self.stops_SM = torch.full((places, MOST_STOPS), -1, dtype=torch.int32, device=device)
        self.place_S2 = torch.zeros(places, 2, dtype=torch.int32, device=device)
        """Where its next token goes, negative if it ended, and the drafts to replay; as the step before wrote it."""
        self._known: dict[int, tuple[RowState, int]] = {}
        """The row that was last seen in each slot, and how many pages it had."""

    def update(self, rows: Iterable[tuple[RowState, Collection[int]]]) -> None:
        """Uploads what is new of these rows, which come with the tokens that end them."""
        slots, places, pages = [], [], []
        for row, stops in rows:
            holder, count = self._known.get(row.slot, (None, 0))
            if holder is not row:
                self._enter(row.slot, stops)
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

    def _enter(self, slot: int, stops: Collection[int]) -> None:
        self.pages_SP[slot] = 0
        known = sorted(stops)[:MOST_STOPS]
        padded = [*known, *([-1] * (MOST_STOPS - len(known)))]
        self.stops_SM[slot] = torch.tensor(padded, dtype=torch.int32).to(
            self.stops_SM.device, non_blocking=True
        )
