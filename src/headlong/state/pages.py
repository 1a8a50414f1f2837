"""Hands out numbered places (pages, slots) and takes them back. Knows nothing of what lies in them."""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headlong.ops.upload import upload


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

    def take_one(self) -> int:
        """One place; there must be one that is free."""
        return self._free.pop()

    def give_back(self, places: list[int]) -> None:
        self._free.extend(places)

    def check(self, held: list[int]) -> None:
        """Asserts that every place is either free or held, once."""
        everything = sorted([*self._free, *held])
        assert everything == list(range(1, self.size + 1)), f"{self.what}s leaked or held twice: {everything}"


class Pages:
    """Places that several rows may hold at once. A page that nobody holds but that is marked `cached` stays as it
    is until somebody needs a page: it counts as free, and the one released longest ago goes first."""

    def __init__(self, size: int, evicted: Callable[[int], None]) -> None:
        """`evicted` is told of each cached page that is taken for something else."""
        self.size = size
        self._evicted = evicted
        self._pool = Pool(size, "page")
        self._holders: Counter[int] = Counter()
        self._cached: set[int] = set()
        self._idle: dict[int, None] = {}
        """Pages that are cached and held by nobody; the first is evicted first."""

    @property
    def num_free(self) -> int:
        return self._pool.num_free + len(self._idle)

    @property
    def num_used(self) -> int:
        return self.size - self.num_free

    def holders(self, page: int) -> int:
        return self._holders[page]

    def take(self, count: int) -> list[int] | None:
        """`count` pages with one holder each, or None and no change if there are not that many."""
        if count > self.num_free:
            return None
        while self._pool.num_free < count:
            page = next(iter(self._idle))
            self._evicted(page)
            self.uncache(page)
        taken = self._pool.take(count)
        assert taken is not None
        self._holders.update(taken)
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """Adds one holder to each page."""
        for page in pages:
            assert page in self._cached, f"page {page} is shared but not cached"
            self._holders[page] += 1
            self._idle.pop(page, None)

    def give_back(self, pages: Sequence[int]) -> None:
        """Takes one holder from each page. Of a sequence's pages the last go first: they are of no use without the
        others."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                if page in self._cached:
                    self._idle[page] = None
                else:
                    self._pool.give_back([page])

    def cache(self, page: int) -> None:
        """Marks a held page as worth keeping."""
        assert self._holders[page], f"page {page} is cached but held by nobody"
        self._cached.add(page)

    def uncache(self, page: int) -> None:
        self._cached.remove(page)
        if page in self._idle:
            del self._idle[page]
            self._pool.give_back([page])

    def touch(self, page: int) -> None:
        """Marks a page as used most recently, as if it were released now."""
        if page in self._idle:
            del self._idle[page]
            self._idle[page] = None

    def check(self, held: Sequence[int], cached: set[int]) -> None:
        """`held` are the rows' pages, one entry for each holder; `cached` those the cache knows."""
        assert Counter(held) == self._holders, "pages' holders are miscounted"
        assert cached == self._cached, "the cache and the pages disagree on what is cached"
        assert set(self._idle) == cached - set(held), "cached pages that nobody holds are miscounted"
        self._pool.check([*set(held), *self._idle])


def page_table(pages: Sequence[Sequence[int]], device: torch.device, spare: int = 0) -> Tensor:
    """The rows' pages as a rectangular tensor: short rows, and `spare` columns more, are filled up with page 0, which
    nobody reads."""
    width = spare + max(len(row) for row in pages)
    if device.type == "cpu":
        return torch.tensor([[*row, *([0] * (width - len(row)))] for row in pages], dtype=torch.long)
    (flat,) = upload([[page for row in pages for page in (*row, *([0] * (width - len(row))))]], device)
    return flat.view(len(pages), width)
