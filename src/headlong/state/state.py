"""Everything a sequence leaves behind in the engine, and the one place where a step is committed.

Owns pages, slots, the layers' tensors, the head's carry and each row's last token, and what is kept of rows for
prompts that begin like them. `commit` keeps what the target accepted and forgets the rest, for every kind of state at
once. Knows no model and no schedule.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headlong.errors import ConfigError
from headlong.ops.upload import upload
from headlong.state.checkpoints import Checkpoint
from headlong.state.deferred_kv import ROOM, DeferredKv
from headlong.state.layer_state import LayerState, Places
from headlong.state.oom import refusing_oom_on
from headlong.state.pages import Pages, Pool
from headlong.state.prefix import Extras, Match, PrefixCache, Published
from headlong.state.specs import CHECKPOINTS_PER_SLOT, Capacity, LayerSpec, PrefixCapacity, bytes_per_slot
from headlong.types import Plan


@dataclass
class RowState:
    """One sequence's holdings. `length` tokens are committed; `num_replay` of them (the drafts accepted last)
    are still to be replayed into the recurrent memories."""

    slot: int
    length: int = 0
    num_replay: int = 0
    pages: list[int] = field(default_factory=list)
    num_cached: int = 0
    """Tokens it did not have to read, since they were there when it was admitted."""
    unprimed: list[tuple[int, Tensor]] = field(default_factory=list)
    """(position, the target's hidden state there) of pairs the head has not read; the next token of the last is the
    first one the row feeds."""
    primed: bool = True
    """Whether the head's keys of its pages will be written, as far as there is a head."""
    cuts: tuple[int, ...] = ()
    """Lengths at which a checkpoint is wanted, ascending."""
    keys: list[bytes] = field(default_factory=list)
    """The prefix cache's keys of its full pages, as far as they were hashed."""
    extras: Extras = ()
    """What its state depends on besides its tokens."""
    hidden_JD: Tensor | None = None
    """The target's hidden states of the last certain token and the accepted drafts: a view of the step's own."""
    ahead: bool = False
    """Whether a step is under way that was launched before its last one was read: unless that ended it, its memories
    are further than it knows."""


class State:
    """All state of one model's rows. Layers are named as the model names them, the head's among them."""

    def __init__(
        self,
        specs: Mapping[str, LayerSpec],
        hidden_size: int,
        capacity: Capacity,
        prefix: PrefixCapacity | None = None,
    ) -> None:
        """Without a `prefix` capacity nothing is kept of rows that left."""
        self.page_size = capacity.page_size
        self.max_drafts = capacity.max_drafts
        self.slots = Pool(capacity.num_slots, "slot")
        self.rows: dict[str, RowState] = {}
        self.layers: dict[str, LayerState] = {
            name: _allocate(name, spec, capacity) for name, spec in specs.items()
        }
        places, device = capacity.num_slots + 1, capacity.device
        carried = device if capacity.head is None else capacity.head.device
        self.carry_SD = torch.zeros(places, hidden_size, dtype=capacity.dtype, device=carried)
        """The head's output for the last committed pair: where the next draft starts."""
        self.last_token_S = torch.zeros(places, dtype=torch.long, device=device)
        """The token that each row sampled last and has not yet fed to the model."""
        bytes_per_pair = hidden_size * self.carry_SD.element_size()
        self.deferred_kv = DeferredKv(ROOM // bytes_per_pair if device.type == "cpu" else 0)
        """What the head has yet to write on pages, whoever holds the pages."""
        self.caching = prefix is not None
        self.head = prefix is not None and prefix.head
        checkpointed = any(spec.needs_checkpoints for spec in specs.values())
        sizes = _store_sizes(specs, capacity, prefix)
        self.prefix = PrefixCache(capacity.num_pages, self.page_size, device, sizes, checkpointed)

    @property
    def pages(self) -> Pages:
        return self.prefix.pages

    def admit(
        self,
        row_id: str,
        tokens: Sequence[int] = (),
        *,
        drafts: bool = True,
        reuse: bool = True,
        extras: Extras = (),
    ) -> RowState | None:
        """A slot for a row that has `tokens` to read, with pages for them and one more, and with as much of it
        committed as is there already; or None, and no change, while slots or pages are short. `drafts`: whether it ever
        will draft; `reuse`: whether it takes what is kept of others; `extras`: what its state depends on
        besides its tokens."""
        if not self.slots.num_free:
            return None
        primed = drafts or not self.head
        found = self._find(tokens, primed, reuse, extras)
        checkpoint = None if found.checkpoint is None else self.prefix.use(found.checkpoint)
        pages = self._take(found.pages, self.pages_for(len(tokens) + 1) if tokens else 0)
        if pages is None:
            return None
        slot = self.slots.take_one()
        row = RowState(slot, found.length, 0, pages, found.length, primed=primed, keys=list(found.keys))
        row.extras = extras
        row.cuts = self._cuts(found, len(tokens))
        self.rows[row_id] = row
        # From here on a fault finds the row with all it holds.
        self._copy_last(found.pages, pages)
        for layer in self.layers.values():
            layer.clear(slot)
        if checkpoint is not None:
            self._restore(row, checkpoint)
        return row

    def fits(
        self,
        tokens: Sequence[int],
        *,
        drafts: bool = True,
        reuse: bool = True,
        extras: Extras = (),
        without: Collection[str] = (),
    ) -> bool:
        """Whether a row would be admitted if the rows `without` had left."""
        if not self.slots.num_free and not without:
            return False
        leaving = Counter(page for row_id in without for page in self.rows[row_id].pages)
        freed = sum(self.pages.holders(page) == count for page, count in leaving.items())
        found = self._find(tokens, drafts or not self.head, reuse, extras)
        held = sum(self.pages.holders(page) > leaving[page] for page in found.pages[:-1])
        return self.pages_for(len(tokens) + 1) - held <= self.pages.num_free + freed

    def reserve(self, row_id: str, length: int) -> bool:
        """Makes room for `length` tokens in all; False, and no change, if pages are short."""
        row = self.rows[row_id]
        pages = self._fresh(max(0, self.pages_for(length) - len(row.pages)))
        if pages is None:
            return False
        row.pages.extend(pages)
        return True

    def pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def chunk_end(self, row_id: str, end: int, total: int) -> int:
        """Where a chunk that may reach to `end`, of `total` tokens, should stop: where a checkpoint is wanted, or, if
        more will follow anyway, at the last page boundary."""
        row = self.rows[row_id]
        for cut in row.cuts:
            if row.length < cut < end:
                return cut
        boundary = end // self.page_size * self.page_size
        wanted = self.caching and self.prefix.checkpointed
        return boundary if wanted and end < total and boundary > row.length else end

    def commit(
        self,
        plan: Plan,
        accepted: Sequence[int],
        tokens_L: Tensor | None = None,
        hidden_ND: Tensor | None = None,
    ) -> None:
        """Ends a step: every row keeps its certain tokens and its `accepted` drafts, and nothing else.

        `tokens_L` are a verdict's; without them each row's last token is where it belongs already, since the step
        stored it on the device itself, or nobody will ask for it. `hidden_ND` are the target's hidden states of the
        plan's tokens, where the prefix cache or the head will want them."""
        self._move_lengths(plan, accepted, hidden_ND)
        if tokens_L is not None:
            self._store_last_tokens(plan, accepted, tokens_L)

    def _move_lengths(self, plan: Plan, accepted: Sequence[int], hidden_ND: Tensor | None) -> None:
        flat = 0
        for row_plan, count in zip(plan.rows, accepted, strict=True):
            row = self.rows[row_plan.request.id]
            row.length += row_plan.num_certain + count
            row.num_replay = count
            if self.head and hidden_ND is not None:
                last = flat + row_plan.num_certain - 1
                row.hidden_JD = hidden_ND[last : last + 1 + count]
            flat += row_plan.query_len

    def _store_last_tokens(self, plan: Plan, accepted: Sequence[int], tokens_L: Tensor) -> None:
        """The token after each sampling row's accepted drafts, without a readback."""
        sampling = [i for i, row in enumerate(plan.rows) if row.samples]
        if sampling:
            firsts = plan.first_logits
            last, slots = upload(
                [[firsts[i] + accepted[i] for i in sampling], [plan.rows[i].slot for i in sampling]],
                tokens_L.device,
            )
            self.last_token_S[slots] = tokens_L[last]

    def at_checkpoint(self, row_id: str) -> bool:
        """Whether what a row has committed can be offered to others while it goes on."""
        length = self.rows[row_id].length
        aligned = length % self.page_size == 0 or not self.prefix.checkpointed
        return self.caching and aligned and length >= self.page_size

    def publish(self, row_id: str, tokens: tuple[int, ...]) -> None:
        """Offers the full pages of a row, whose tokens these are, to prompts that begin alike; it goes on."""
        row = self.rows[row_id]
        self._offer(row, tokens[: row.length // self.page_size * self.page_size], tail=False)

    def release(self, row_id: str, tokens: tuple[int, ...] | None = None) -> None:
        """Frees all that a row held. With its tokens, what it committed of them is kept for others."""
        row = self.rows[row_id]
        if tokens is not None:
            self._offer(row, tokens, tail=True)
        del self.rows[row_id]
        self.pages.give_back(row.pages)
        self.slots.give_back([row.slot])

    def drop_cache(self) -> None:
        """Forgets all that is kept for others; rows keep what they hold."""
        self.prefix.clear()

    def check_integrity(self) -> None:
        """Asserts that no page or slot is lost or miscounted, and that what is kept is known by its own tokens."""
        self.prefix.check([page for row in self.rows.values() for page in row.pages])
        self.slots.check([row.slot for row in self.rows.values()])
        for layer in self.layers.values():
            layer.check(Places(self.pages.size, self.slots.size))
        self.deferred_kv.check(self.page_size)
        for row_id, row in self.rows.items():
            assert len(row.pages) >= self.pages_for(row.length), f"{row_id}: committed tokens without a page"
            assert len(set(row.pages)) == len(row.pages), f"{row_id}: a page twice"
            for page in row.pages[row.length // self.page_size :]:
                assert self.pages.holders(page) == 1, f"{row_id}: others hold a page it writes to"

    def _find(self, tokens: Sequence[int], primed: bool, reuse: bool, extras: Extras) -> Match:
        return self.prefix.find(tokens, primed, extras) if self.caching and reuse and tokens else Match()

    def _take(self, found: Sequence[int], count: int) -> list[int] | None:
        """`count` pages: those found, with a fresh one in place of the last since the row will write to it, and more
        fresh ones. If there is none for the last, it is taken itself, unless somebody holds it: a hit never needs more
        room than reading the prompt would."""
        if not found:
            return self._fresh(count)
        *shared, last = found
        self.pages.share(found)
        fresh = self._fresh(count - len(shared))
        if fresh is not None:
            self.pages.give_back([last])
            return [*shared, *fresh]
        if self.pages.holders(last) == 1:
            fresh = self._fresh(count - len(found))
        if fresh is None:
            self.pages.give_back(found)
            return None
        self.prefix.forget(last)
        return [*found, *fresh]

    def _fresh(self, count: int) -> list[int] | None:
        """Fresh pages with one holder each; None, and no change, if there are not that many."""
        pages = self.pages.take(count)
        if pages:
            self.deferred_kv.drop(pages)
        return pages

    def _copy_last(self, found: Sequence[int], pages: Sequence[int]) -> None:
        if not found or pages[len(found) - 1] == found[-1]:
            return
        for layer in self.layers.values():
            layer.copy_page(found[-1], pages[len(found) - 1])
        self.deferred_kv.copy(found[-1], pages[len(found) - 1])

    def _restore(self, row: RowState, saved: Checkpoint) -> None:
        for name, tensors in saved.layers.items():
            self.layers[name].restore(row.slot, tensors)
        row.num_replay = saved.num_replay
        if saved.hidden_D is not None:
            hidden_D = saved.hidden_D.to(self.carry_SD.device)
            row.hidden_JD = hidden_D.expand(1 + saved.num_replay, -1)
            if row.primed:
                row.unprimed = [(row.length - 1, hidden_D)]

    def _cuts(self, found: Match, num_tokens: int) -> tuple[int, ...]:
        """The last page boundary that leaves a token to read, and the place where another sequence parted from this
        one without leaving a checkpoint; each only if it would save a page's worth of reading over what was found."""
        if not (self.caching and self.prefix.checkpointed and num_tokens):
            return ()
        last = (num_tokens - 1) // self.page_size * self.page_size
        wanted = {last, min(last, found.shared_len)}
        return tuple(sorted(cut for cut in wanted if cut - found.length >= self.page_size))

    def _offer(self, row: RowState, tokens: tuple[int, ...], *, tail: bool) -> None:
        """Tokens may be fewer than are committed: a row may end inside the drafts that were accepted last. Those are in
        no memory yet, so that leaving the last of them out is exact."""
        length = min(row.length, len(tokens))
        if not self.caching or not length:
            return
        num_replay = row.num_replay - (row.length - length)

        def save() -> Checkpoint:
            assert num_replay >= 0, "a row can only be cut among its last drafts"
            saved = {name: layer.save(row.slot, num_replay) for name, layer in self.layers.items()}
            layers = {name: tensors for name, tensors in saved.items() if tensors is not None}
            hidden = None if row.hidden_JD is None else row.hidden_JD[num_replay].clone()
            return Checkpoint(layers, num_replay, hidden)

        published = Published(tokens, row.pages, row.primed, row.keys, row.extras)
        self.prefix.offer(published, length, save, tail=tail)


def _allocate(name: str, spec: LayerSpec, capacity: Capacity) -> LayerState:
    """The layer's tensors, which take as many bytes as memory was planned for."""
    if spec.rollback is None:
        raise ConfigError(
            f"{name}: its state ({type(spec).__name__}) cannot be rolled back, so it cannot be served"
        )
    own = capacity.of(name)
    with nullcontext() if own is capacity else refusing_oom_on(own.device):
        layer = spec.allocate(own)
    promised = (own.num_pages + 1) * spec.bytes_per_page(own.page_size, own.kv_dtype)
    promised += (own.num_slots + 1) * spec.bytes_per_slot(own.max_drafts, own.dtype)
    assert layer.num_bytes == promised, (
        f"{name}: {layer.num_bytes} bytes were allocated, but {promised} counted"
    )
    return layer


def _store_sizes(
    specs: Mapping[str, LayerSpec], capacity: Capacity, prefix: PrefixCapacity | None
) -> tuple[int, int]:
    """Bytes of checkpoints on the device and in host memory."""
    if prefix is None:
        return 0, 0
    slot = bytes_per_slot(specs.values(), capacity.max_drafts, capacity.dtype)
    usual = CHECKPOINTS_PER_SLOT * capacity.num_slots * slot
    device = usual if prefix.device_bytes is None else prefix.device_bytes
    return device, 4 * device if prefix.host_bytes is None else prefix.host_bytes
