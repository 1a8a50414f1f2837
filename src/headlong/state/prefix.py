"""Finds pages and checkpoints by the tokens they stand for, so that prompts that begin alike are read once.

A full page is known by the hash of its own tokens and of the key before it, which stands for everything earlier. The
page where a row ended, a tail, is known likewise by the tokens it has. Recurrent models can go on only where there is
a checkpoint; others wherever a page or a tail ends.

What a sequence's state depends on besides its tokens is hashed with them: its extras, each of which counts from one
position on. One at position 0 (an adapter, a tenant) keeps whole sequences apart; one further on (an image that stands
for placeholder tokens) leaves what is before it to be shared. Equal tokens with different extras never share.

Pages of rows that never draft lack the head's keys: they are not `primed`, and serve only rows that never draft
either. The head's key at a page's last place also depends on the token after it; where two sequences part exactly
there, the later one's drafts see the earlier one's. That concerns drafts alone. Knows no row and no layer.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice

import torch

from headlong.state.checkpoints import Checkpoint, CheckpointStore
from headlong.state.pages import Pages

ROOT = b""
"""The key before the first page."""


Extras = tuple[tuple[int, bytes], ...]
"""Pairs (position from which the extra counts, what it is), ascending by position."""


def key_of(parent: bytes, tokens: Sequence[int], extras: Extras = ()) -> bytes:
    """The key of a page or a tail with these tokens; its extras' positions count from its own first token."""
    # The extras are the hash function's key, so that no bytes of theirs can pass for tokens.
    parts = (position.to_bytes(8) + len(what).to_bytes(8) + what for position, what in extras)
    salt = blake2b(b"".join(parts), digest_size=32).digest() if extras else b""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=16, key=salt).digest()


def extras_on(extras: Extras, first: int, end: int) -> Extras:
    """Returns the extras of a sequence that stand at positions `first` to `end`, counted from `first`."""
    return tuple((position - first, what) for position, what in extras if first <= position < end)


@dataclass(frozen=True)
class Entry:
    """What one page holds: a whole page of tokens, or fewer where a row ended."""

    key: bytes
    parent: bytes
    tokens: tuple[int, ...]
    page: int
    primed: bool
    extras: Extras = ()
    """Their positions count from the page's first token."""


@dataclass(frozen=True)
class Match:
    """What there is of a sequence. The pages hold its first `length` tokens, the last of them perhaps more."""

    length: int = 0
    pages: tuple[int, ...] = ()
    keys: tuple[bytes, ...] = ()
    """The keys of the full pages among them."""
    checkpoint: bytes | None = None
    shared_len: int = 0
    """Tokens on full pages that are there, whether or not they can be used: where another sequence parted."""


@dataclass
class Published:
    """What a row offers: its tokens, pages and keys; `keys` grows with the pages that were hashed."""

    tokens: tuple[int, ...]
    pages: Sequence[int]
    primed: bool
    keys: list[bytes] = field(default_factory=list)
    extras: Extras = ()


class PrefixCache:
    """An index over pages and checkpoints. It holds no page itself: what nobody holds may be taken at any time."""

    def __init__(
        self, num_pages: int, page_size: int, device: torch.device, sizes: tuple[int, int], checkpointed: bool
    ) -> None:
        """`sizes` are the bytes of checkpoints on the device and in host memory."""
        self.page_size = page_size
        self.checkpointed = checkpointed
        self.pages = Pages(num_pages, self._evicted)
        self.checkpoints = CheckpointStore(device, *sizes, self._lost)
        self._entries: dict[bytes, Entry] = {}
        """The pages that are known, by key; the least recently used comes first."""
        self._by_page: dict[int, Entry] = {}
        self._tails: dict[bytes, dict[bytes, Entry]] = {}
        """Tails, by the key of the page before them and by their own."""

    def __len__(self) -> int:
        """How many pages are known."""
        return len(self._entries)

    def find(self, tokens: Sequence[int], primed: bool, extras: Extras = ()) -> Match:
        """The longest part that can be restored and leaves at least a token to read; counts as no use."""
        best: Entry | None = None
        end, pages, keys, parent = 0, [], [], ROOT
        for first in range(0, len(tokens), self.page_size):
            for tail in self._tails.get(parent, {}).values():
                after = first + len(tail.tokens)
                usable = after > end and self._usable(tail, primed, after, len(tokens))
                if (
                    usable
                    and tuple(tokens[first:after]) == tail.tokens
                    and extras_on(extras, first, after) == tail.extras
                ):
                    best, end = tail, after
            after = first + self.page_size
            entry = self._entries.get(key_of(parent, tokens[first:after], extras_on(extras, first, after)))
            if entry is None or len(entry.tokens) < self.page_size or (primed and not entry.primed):
                break
            parent = entry.key
            pages.append(entry.page)
            keys.append(parent)
            if self._usable(entry, primed, first + self.page_size, len(tokens)):
                best, end = entry, first + self.page_size
        shared_len = len(pages) * self.page_size
        # Without a checkpoint there is no last hidden state either: the last token is read again and gives it.
        length = end if self.checkpointed else end - 1
        if best is None or not length:
            return Match(shared_len=shared_len)
        whole = pages[: (end - 1) // self.page_size]
        return Match(
            length=length,
            pages=(*whole, best.page)[: -(-length // self.page_size)],
            keys=tuple(keys[: length // self.page_size]),
            checkpoint=best.key if self.checkpointed else None,
            shared_len=shared_len,
        )

    def offer(self, row: Published, length: int, save: Callable[[], Checkpoint], *, tail: bool) -> None:
        """Makes known the first `length` tokens of a row and, where the model has memories, `save`s a checkpoint of
        them. A `tail` that does not fill its page is known too; its page must not change from here on."""
        num_full = length // self.page_size
        self._hash_pages(row, num_full)
        parent = row.keys[num_full - 1] if num_full else ROOT
        rest = row.tokens[num_full * self.page_size : length]
        on_rest = extras_on(row.extras, num_full * self.page_size, length)
        key = key_of(parent, rest, on_rest) if rest else parent
        # The last first: where they are known already, that is the order in which they go.
        if rest and tail and self._has_checkpoint(key, save):
            self._add(Entry(key, parent, rest, row.pages[num_full], row.primed, on_rest))
        for number in reversed(range(num_full)):
            self._add(self._full_page(row, number))
        if not rest:
            self._has_checkpoint(key, save)

    def use(self, key: bytes) -> Checkpoint:
        return self.checkpoints.use(key)

    def recent(self, limit: int) -> list[bytes]:
        """The keys of at most `limit` full pages after which a sequence can go on, the last used first. Changes
        nothing, and any thread may ask: whoever sends prompts to one of several engines looks for their pages here."""
        keys = self.checkpoints.recent() if self.checkpointed else list(self._entries)[::-1]
        entries = (self._entries.get(key) for key in keys)
        full = (entry.key for entry in entries if entry is not None and len(entry.tokens) == self.page_size)
        return list(islice(full, limit))

    def forget(self, page: int) -> None:
        """Forgets a page, which is its holder's alone from now on, or free."""
        self._remove(self._by_page[page])
        self.pages.uncache(page)

    def clear(self) -> None:
        """Forgets all pages and checkpoints; rows keep what they hold."""
        for page in list(self._by_page):
            self.forget(page)

    def check(self, held: Sequence[int]) -> None:
        """`held` are the rows' pages, one entry for each holder."""
        for key, entry in self._entries.items():
            assert key == entry.key == key_of(entry.parent, entry.tokens, entry.extras), (
                "a page is known by the wrong hash"
            )
            assert 0 < len(entry.tokens) <= self.page_size, "a page is known for more tokens than it holds"
            assert self._by_page[entry.page] is entry, "two entries for one page"
            assert (key in self._tails.get(entry.parent, {})) == (len(entry.tokens) < self.page_size)
        assert len(self._by_page) == len(self._entries), "pages known by no key"
        assert all(key in self._entries for tails in self._tails.values() for key in tails)
        assert self.checkpoints.keys <= self._entries.keys(), "a checkpoint without its page"
        self.checkpoints.check()
        self.pages.check(held, set(self._by_page))

    def _usable(self, entry: Entry, primed: bool, end: int, num_tokens: int) -> bool:
        if primed and not entry.primed:
            return False
        return end < num_tokens and entry.key in self.checkpoints if self.checkpointed else end <= num_tokens

    def _has_checkpoint(self, key: bytes, save: Callable[[], Checkpoint]) -> bool:
        """Saves a checkpoint where the model needs one and there is none yet; gives whether there is one now."""
        return not self.checkpointed or key in self.checkpoints or self.checkpoints.put(key, save())

    def _hash_pages(self, row: Published, count: int) -> None:
        for number in range(len(row.keys), count):
            parent = row.keys[number - 1] if number else ROOT
            row.keys.append(key_of(parent, *self._on_page(row, number)))

    def _full_page(self, row: Published, number: int) -> Entry:
        parent = row.keys[number - 1] if number else ROOT
        tokens, extras = self._on_page(row, number)
        return Entry(row.keys[number], parent, tokens, row.pages[number], row.primed, extras)

    def _on_page(self, row: Published, number: int) -> tuple[tuple[int, ...], Extras]:
        """The tokens and the extras of one page of a row."""
        first, end = number * self.page_size, (number + 1) * self.page_size
        return row.tokens[first:end], extras_on(row.extras, first, end)

    def _add(self, entry: Entry) -> None:
        """Makes a page known, unless one that serves as well is known already."""
        known = self._entries.get(entry.key)
        if known is not None and (known.primed or not entry.primed):
            self.pages.touch(known.page)
            self._entries[entry.key] = self._entries.pop(entry.key)  # the last used are the last
            return
        if known is not None:
            self._remove(known, with_checkpoint=False)
            self.pages.uncache(known.page)
        self.pages.cache(entry.page)
        self._entries[entry.key] = self._by_page[entry.page] = entry
        if len(entry.tokens) < self.page_size:
            self._tails.setdefault(entry.parent, {})[entry.key] = entry

    def _remove(self, entry: Entry, with_checkpoint: bool = True) -> None:
        del self._entries[entry.key], self._by_page[entry.page]
        if len(entry.tokens) < self.page_size:
            del self._tails[entry.parent][entry.key]
            if not self._tails[entry.parent]:
                del self._tails[entry.parent]
        if with_checkpoint:
            self.checkpoints.drop(entry.key)

    def _evicted(self, page: int) -> None:
        self._remove(self._by_page[page])

    def _lost(self, key: bytes) -> None:
        """Forgets the tail whose checkpoint was evicted; a full page without one may still lead to a later one."""
        entry = self._entries.get(key)
        if entry is not None and len(entry.tokens) < self.page_size:
            self.forget(entry.page)
