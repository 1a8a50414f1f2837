"""Pages and slots: who holds what, and what happens when they run out; and kinds of state refused."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headlong import SamplingParams
from headlong.errors import ConfigError
from headlong.state.delta_net import DeltaNetSpec
from headlong.state.layer_state import LayerState
from headlong.state.paged_kv import PagedKvSpec
from headlong.state.pages import Pool
from headlong.state.specs import Capacity, LayerSpec
from headlong.state.state import State
from headlong.types import Plan, Request, RowPlan

SPECS = {"layers.0": DeltaNetSpec(2, 3, 5, 16, 4), "layers.1": PagedKvSpec(2, 8)}


def make_state(specs=None, num_pages=6, num_slots=3) -> State:
    capacity = Capacity(
        num_pages=num_pages,
        page_size=16,
        num_slots=num_slots,
        max_drafts=8,
        kv_dtype=torch.float32,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return State(SPECS if specs is None else specs, 4, capacity)


def test_place_zero_is_never_handed_out():
    pool = Pool(5, "page")
    assert sorted(pool.take(5)) == [1, 2, 3, 4, 5]
    assert pool.take(1) is None


def test_take_is_all_or_nothing():
    pool = Pool(5, "page")
    held = pool.take(3)
    assert pool.take(3) is None
    assert pool.num_free == 2
    pool.give_back(held)
    assert pool.num_free == 5
    assert pool.take(0) == []


@pytest.mark.parametrize("fault", ["leaked", "held twice", "foreign"])
def test_a_pool_notices_what_is_wrong(fault):
    pool = Pool(4, "slot")
    held = pool.take(2)
    pool.check(held)
    wrong = {"leaked": held[:1], "held twice": [*held, held[0]], "foreign": [held[0], 9]}[fault]
    with pytest.raises(AssertionError, match="slots leaked or held twice"):
        pool.check(wrong)


def test_admission_ends_with_the_slots():
    state = make_state()
    slots = [state.admit(row).slot for row in "abc"]
    assert sorted(slots) == [1, 2, 3]
    assert state.admit("d") is None
    assert "d" not in state.rows
    state.release("b")
    assert state.admit("d").slot == slots[1]
    state.check_integrity()


def test_reserve_is_all_or_nothing_and_never_shrinks():
    state = make_state()
    state.admit("a"), state.admit("b")
    assert state.reserve("a", 16) and len(state.rows["a"].pages) == 1
    assert state.reserve("a", 17) and len(state.rows["a"].pages) == 2
    assert state.reserve("a", 1) and len(state.rows["a"].pages) == 2
    assert state.reserve("b", 64)
    assert not state.reserve("a", 33)
    assert len(state.rows["a"].pages) == 2 and state.pages.num_free == 0
    pages = [*state.rows["a"].pages, *state.rows["b"].pages]
    assert sorted(pages) == [1, 2, 3, 4, 5, 6]
    state.release("b")
    assert state.reserve("a", 33)
    state.check_integrity()


def test_integrity_needs_pages_for_settled_tokens():
    state = make_state()
    state.admit("a").length = 17
    state.reserve("a", 16)
    with pytest.raises(AssertionError, match="a: committed tokens without a page"):
        state.check_integrity()


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcd"), st.sampled_from(("admit", "reserve", "release")), st.integers(1, 90)
        )
    )
)
def test_nothing_leaks(actions):
    state = make_state()
    for row, action, length in actions:
        if action == "admit" and row not in state.rows:
            state.admit(row)
        elif action == "reserve" and row in state.rows:
            state.reserve(row, length)
        elif action == "release" and row in state.rows:
            state.release(row)
        state.check_integrity()
    for row in list(state.rows):
        state.release(row)
    assert (state.pages.num_free, state.slots.num_free) == (6, 3)


def test_admission_clears_the_slot_and_no_other():
    state = make_state()
    layer = state.layers["layers.0"]
    layer.windows.fill_(torch.nan)
    layer.delta.committed_SHDE.fill_(torch.nan)
    slot = state.admit("a").slot
    for tensor in (layer.windows, layer.delta.committed_SHDE):
        assert (tensor[slot] == 0).all()
        assert tensor[[s for s in range(4) if s != slot]].isnan().all()


def row_plan(state, row, query_len, num_drafts, samples=True) -> RowPlan:
    held = state.rows[row]
    return RowPlan(
        request=Request(row, (1,), SamplingParams(), 0),
        slot=held.slot,
        start=held.length,
        query_len=query_len,
        num_drafts=num_drafts,
        num_replay=held.num_replay,
        pages=tuple(held.pages),
        samples=samples,
        num_generated=0,
        known_tokens=(),
    )


def test_commit_moves_lengths_replays_and_last_tokens():
    """Three rows: a prompt chunk that does not sample, one that rejects, one that accepts two of three."""
    state = make_state()
    for row in "abc":
        state.admit(row)
    state.last_token_S.fill_(77)
    plan = Plan(
        (row_plan(state, "a", 9, 0, samples=False), row_plan(state, "b", 3, 2), row_plan(state, "c", 4, 3)), 3
    )
    tokens = torch.tensor([10, 11, 12, 20, 21, 22, 23])
    state.commit(plan, (0, 0, 2), tokens)
    found = {row: (held.length, held.num_replay) for row, held in state.rows.items()}
    assert found == {"a": (9, 0), "b": (1, 0), "c": (3, 2)}
    slots = [state.rows[row].slot for row in "abc"]
    assert state.last_token_S[slots].tolist() == [77, 10, 22]


def test_commit_without_tokens_leaves_the_last_tokens_that_the_device_stored():
    state = make_state()
    state.admit("a"), state.admit("b")
    state.last_token_S.copy_(torch.arange(4))
    plan = Plan((row_plan(state, "a", 3, 2), row_plan(state, "b", 4, 3)), 3)
    state.commit(plan, (1, 0))
    found = {row: (held.length, held.num_replay) for row, held in state.rows.items()}
    assert found == {"a": (2, 1), "b": (1, 0)}
    assert state.last_token_S.tolist() == [0, 1, 2, 3]


def test_a_kind_that_cannot_roll_back_is_refused_by_name():
    @dataclass(frozen=True)
    class SlidingSpec(LayerSpec):
        width: int

        def allocate(self, capacity: Capacity) -> LayerState:  # noqa: ARG002
            raise AssertionError("it is refused before it allocates")

    with pytest.raises(ConfigError, match=r"layers\.7: its state \(SlidingSpec\) cannot be rolled back"):
        make_state(SPECS | {"layers.7": SlidingSpec(4)})
