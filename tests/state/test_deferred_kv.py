"""What pages owe the head goes where they go: kept with them, copied with them, gone when they are taken anew."""

import pytest
import torch

from headlong.state.deferred_kv import DeferredKv, OnPage
from headlong.state.paged_kv import PagedKvSpec
from headlong.state.specs import Capacity, PrefixCapacity
from headlong.state.state import State

SIZE, WIDTH = 16, 4


def piece(page: int, start: int, count: int) -> OnPage:
    return OnPage(page, start, torch.full((count, WIDTH), float(page)), torch.arange(start, start + count))


def make_state(num_pages: int) -> State:
    capacity = Capacity(
        num_pages=num_pages,
        page_size=SIZE,
        num_slots=2,
        max_drafts=4,
        kv_dtype=torch.float32,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    prefix = PrefixCapacity(device_bytes=0, host_bytes=0, head=True)
    return State({"layers.0": PagedKvSpec(1, 8)}, WIDTH, capacity, prefix)


def test_pieces_are_copies_and_all_or_nothing():
    deferred = DeferredKv(10)
    assert not deferred
    whole = piece(3, 18, 9)
    assert deferred.add([whole._replace(hidden_ND=whole.hidden_ND[:6], tokens_N=whole.tokens_N[:6])])
    whole.hidden_ND.zero_()
    assert not deferred.add([piece(4, 32, 3), piece(5, 48, 2)]) and deferred.num_pairs == 6
    assert deferred.add([piece(3, 24, 4)]) and deferred.num_pairs == 10
    found = deferred.on([7, 3, 3])
    assert [(one.start, one.num_pairs) for one in found] == [(18, 6), (24, 4)]
    assert found[0].hidden_ND.eq(3.0).all()
    deferred.check(SIZE)
    deferred.drop([7, 3])
    assert not deferred and deferred.num_pairs == 0


@pytest.mark.parametrize("fault", ["count", "page", "beyond"])
def test_books_are_checked(fault):
    deferred = DeferredKv(100)
    deferred.add([piece(3, 16, 8)])
    if fault == "count":
        deferred.num_pairs += 1
    elif fault == "page":
        deferred._pieces[4] = deferred._pieces.pop(3)
    else:
        deferred.add([piece(5, 8, 9)])
    with pytest.raises(AssertionError):
        deferred.check(SIZE)


def test_pages_keep_what_they_owe_until_they_are_taken_anew():
    state = make_state(num_pages=4)
    tokens = tuple(range(40))
    first = state.admit("a", tokens)
    assert first is not None
    first.length = 40
    old = list(first.pages)
    assert state.deferred_kv.add([piece(old[0], 10, 6), piece(old[2], 32, 8)])
    state.release("a", tokens)
    state.check_integrity()
    # The last page is copied, since the row will write to it; its debts are, too.
    second = state.admit("b", (*tokens, 1))
    assert second is not None and second.num_cached == 39
    assert second.pages[:2] == old[:2] and second.pages[2] != old[2]
    assert [(one.page, one.start) for one in state.deferred_kv.on(second.pages)] == [
        (old[0], 10),
        (second.pages[2], 32),
    ]
    state.release("b")
    state.drop_cache()
    third = state.admit("c", tuple(range(100, 160)))
    assert third is not None and set(third.pages) >= set(old)
    assert not state.deferred_kv and state.deferred_kv.num_pairs == 0
