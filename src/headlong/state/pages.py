"""Hands out numbered places (pages, slots) and takes them back. Knows nothing of what lies in them."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Pool:
    """Places 1…size. Place 0 is never handed out: padded rows and positions write there."""

    def __init__(self, size: int, what: str) -> None:
        self.size = size
        self.what = what
        self._free = list(range(size, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.size - len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` places, or None and no change if there are not that many."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def give_back(self, places: list[int]) -> None:
        self._free.extend(places)

    def check(self, held: list[int]) -> None:
        """Every place is either free or held, once."""
        everything = sorted([*self._free, *held])
        assert everything == list(range(1, self.size + 1)), f"{self.what}s leaked or held twice: {everything}"


def page_table(pages: Sequence[Sequence[int]], device: torch.device, spare: int = 0) -> Tensor:
    """Rectangular; short rows, and `spare` columns more, are filled up with page 0, which nobody reads."""
    width = spare + max(len(row) for row in pages)
    table = [[*row, *([0] * (width - len(row)))] for row in pages]
    return torch.tensor(table, dtype=torch.long, device=device)
