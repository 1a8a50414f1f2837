"""Kinds of layer state that exist in this file alone: the state serves them as it serves its own.

One keeps a running sum of all tokens in slots and takes drafts back by replay; the other keeps each token on its
page and takes drafts back by length. `pass_over` is their model: it feeds tokens as a step would, and gives what each
kind says of everything before and at each token, which is compared with the tokens themselves.
"""

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from headlong import SamplingParams
from headlong.state.layer_state import LayerState, Places, Saved
from headlong.state.paged_kv import PagedKvSpec
from headlong.state.specs import (
    Capacity,
    LayerSpec,
    PrefixCapacity,
    Rollback,
)
from headlong.state.state import State
from headlong.types import Plan, Request, RowPlan

PAGE, DRAFTS, SLOTS, PAGES = 8, 3, 3, 12


@dataclass(frozen=True)
class RunningSumSpec(LayerSpec):
    rollback = Rollback.REPLAY
    needs_checkpoints = True

    def allocate(self, capacity: Capacity) -> "RunningSum":
        places = capacity.num_slots + 1
        return RunningSum(torch.zeros(places, dtype=capacity.dtype), torch.zeros(places, capacity.max_drafts))

    def bytes_per_slot(self, max_drafts: int, dtype: torch.dtype) -> int:
        return dtype.itemsize + max_drafts * torch.float32.itemsize


@dataclass(frozen=True)
class RunningSum(LayerState):
    sums_S: Tensor
    drafts_SK: Tensor

    @property
    def num_bytes(self) -> int:
        return self.sums_S.nbytes + self.drafts_SK.nbytes

    def check(self, places: Places) -> None:
        assert len(self.sums_S) == len(self.drafts_SK) == places.slots + 1

    def clear(self, slot: int) -> None:
        self.sums_S[slot] = 0

    def save(self, slot: int, num_replay: int) -> Saved:
        return self.sums_S[slot].clone(), self.drafts_SK[slot, :num_replay].clone()

    def restore(self, slot: int, saved: Saved) -> None:
        total, drafts = saved
        self.sums_S[slot] = total
        self.drafts_SK[slot, : len(drafts)] = drafts

    def feed(self, row: RowPlan, tokens: tuple[int, ...]) -> list[float]:
        """The sum up to each token."""
        self.sums_S[row.slot] += self.drafts_SK[row.slot, : row.num_replay].sum()
        found = []
        for token in tokens[: row.num_certain]:
            self.sums_S[row.slot] += token
            found.append(float(self.sums_S[row.slot]))
        drafts = torch.tensor(tokens[row.num_certain :], dtype=torch.float32)
        self.drafts_SK[row.slot, : len(drafts)] = drafts
        return [*found, *(float(self.sums_S[row.slot]) + drafts.cumsum(0)).tolist()]


@dataclass(frozen=True)
class TokensOnPagesSpec(LayerSpec):
    rollback = Rollback.LENGTH

    def allocate(self, capacity: Capacity) -> "TokensOnPages":
        return TokensOnPages(torch.zeros(capacity.num_pages + 1, capacity.page_size, dtype=capacity.kv_dtype))

    def bytes_per_token(self, kv_dtype: torch.dtype) -> int:
        return kv_dtype.itemsize


@dataclass(frozen=True)
class TokensOnPages(LayerState):
    tokens_PS: Tensor

    @property
    def num_bytes(self) -> int:
        return self.tokens_PS.nbytes

    def check(self, places: Places) -> None:
        assert self.tokens_PS.shape == (places.pages + 1, PAGE)

    def copy_page(self, source: int, target: int) -> None:
        self.tokens_PS[target] = self.tokens_PS[source]

    def feed(self, row: RowPlan, tokens: tuple[int, ...]) -> list[float]:
        """The sum up to each token, of what lies on the pages."""
        found = []
        for position, token in enumerate(tokens, row.start):
            self.tokens_PS[row.pages[position // PAGE], position % PAGE] = token
            whole = self.tokens_PS[list(row.pages)].flatten()[: position + 1]
            found.append(float(whole.sum()))
        return found


SUMS, ON_PAGES = {"sum": RunningSumSpec()}, {"tokens": TokensOnPagesSpec()}
MODELS = {"slots": SUMS, "pages": ON_PAGES, "both": SUMS | ON_PAGES | {"attention": PagedKvSpec(1, 8)}}


def make_state(specs: dict[str, LayerSpec]) -> State:
    capacity = Capacity(
        num_pages=PAGES,
        page_size=PAGE,
        num_slots=SLOTS,
        max_drafts=DRAFTS,
        kv_dtype=torch.float64,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    return State(specs, 4, capacity, PrefixCapacity(device_bytes=1 << 12, host_bytes=1 << 12))


@pytest.fixture(params=MODELS)
def state(request) -> State:
    return make_state(MODELS[request.param])


def pass_over(
    state: State, row_id: str, text: tuple[int, ...], end: int, drafts: tuple[int, ...] = ()
) -> int:
    """Feeds the text up to `end`, then drafts; commits those that agree with the text. Gives how many did."""
    held = state.rows[row_id]
    tokens = (*text[held.length : end], *drafts)
    assert state.reserve(row_id, held.length + len(tokens))
    row = RowPlan(
        request=Request(row_id, text, SamplingParams(), 0),
        slot=held.slot,
        start=held.length,
        query_len=len(tokens),
        num_drafts=len(drafts),
        num_replay=held.num_replay,
        pages=tuple(held.pages),
        samples=True,
        num_generated=0,
        known_tokens=(),
    )
    before = sum(text[: held.length])
    wanted = [float(before + sum(tokens[: n + 1])) for n in range(len(tokens))]
    for name in state.layers.keys() & {"sum", "tokens"}:
        assert state.layers[name].feed(row, tokens) == wanted, name
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == text[end + accepted]:
        accepted += 1
    state.commit(Plan((row,), len(drafts)), (accepted,))
    state.check_integrity()
    return accepted


def read(state: State, row_id: str, text: tuple[int, ...], upto: int) -> None:
    """Reads a prompt in the chunks that the state asks for, offering what it may."""
    held = state.rows[row_id]
    while held.length < upto:
        pass_over(state, row_id, text, state.chunk_end(row_id, min(upto, held.length + 11), upto))
        if state.at_checkpoint(row_id):
            state.publish(row_id, text[: held.length])


def decode(state: State, row_id: str, text: tuple[int, ...], upto: int, rng: random.Random) -> None:
    """One certain token and up to three drafts a step, of which any number agrees with the text."""
    held = state.rows[row_id]
    while held.length < upto:
        end = held.length + 1
        drafts = list(text[end : end + rng.randrange(1 + DRAFTS)])
        if drafts and rng.random() < 0.7:
            drafts[rng.randrange(len(drafts))] += 1000
        pass_over(state, row_id, text, end, tuple(drafts))


def text_of(seed: int, count: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(1, 50) for _ in range(count))


def test_drafts_are_committed_and_taken_back(state):
    rng, texts = random.Random(0), {name: text_of(n, 60) for n, name in enumerate("ab")}
    for name, text in texts.items():
        assert state.admit(name, text[:5]) is not None
    for upto in range(5, 40, 5):
        for name, text in texts.items():
            decode(state, name, text, upto, rng)
    for name in texts:
        state.release(name)
    state.check_integrity()
    assert (state.pages.num_free, state.slots.num_free) == (PAGES, SLOTS)


def test_prompts_that_begin_alike_are_read_once(state):
    text = text_of(1, 60)
    assert state.admit("first", text[:30]).num_cached == 0
    read(state, "first", text, 30)
    decode(state, "first", text, 35, random.Random(1))
    other = (*text[:27], *text_of(2, 33))
    assert state.admit("beside", other[:40]).num_cached >= 16
    read(state, "beside", other, 40)
    length = state.rows["first"].length
    state.release("first", text[:length])
    state.release("beside")
    again = state.admit("again", text[:50])
    assert again.num_cached >= length - 1
    decode(state, "again", text, 45, random.Random(2))
    state.release("again")


def test_a_row_may_end_inside_its_last_drafts(state):
    """What is kept of it stops short of drafts that were accepted."""
    text = text_of(3, 60)
    state.admit("first", text[:20])
    read(state, "first", text, 20)
    assert pass_over(state, "first", text, 21, text[21:24]) == 3
    state.release("first", text[:22])
    assert state.admit("again", text[:40]).num_cached >= 21
    decode(state, "again", text, 40, random.Random(3))
    state.release("again")


def test_nothing_is_kept_once_the_cache_is_dropped(state):
    text = text_of(4, 60)
    state.admit("first", text[:24])
    read(state, "first", text, 24)
    state.release("first", text[:24])
    state.drop_cache()
    assert state.admit("again", text[:30]).num_cached == 0
    read(state, "again", text, 30)


def test_a_kind_that_counts_its_bytes_wrong_is_noticed():
    class Frugal(RunningSumSpec):
        def bytes_per_slot(self, max_drafts: int, dtype: torch.dtype) -> int:
            return super().bytes_per_slot(max_drafts, dtype) - 1

    with pytest.raises(AssertionError, match=r"sum: 80 bytes were allocated, but 76 counted"):
        make_state({"sum": Frugal()})
