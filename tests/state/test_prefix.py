"""What is kept of rows: pages with several holders, checkpoints in two bounded stores, and the index over both.

The state is driven without a model: `feed` writes into every place what the tokens so far determine, so that whatever
a hit restores can be compared with what reading would have left.
"""

import random

import pytest
import torch

from headlong.state.checkpoints import Checkpoint, CheckpointStore
from headlong.state.delta_net import DeltaNetSpec
from headlong.state.paged_kv import PagedKvSpec
from headlong.state.pages import Pages
from headlong.state.prefix import key_of
from headlong.state.specs import Capacity, PrefixCapacity
from headlong.state.state import State

PAGE, CHANNELS, KERNEL, DRAFTS = 16, 4, 4, 4
KV = {"attention": PagedKvSpec(1, 8), "mtp": PagedKvSpec(1, 8)}
HYBRID = KV | {"delta": DeltaNetSpec(1, 2, 3, CHANNELS, KERNEL)}
CPU = torch.device("cpu")


def make_state(specs=HYBRID, num_pages=40, num_slots=4, **prefix) -> State:
    capacity = Capacity(
        num_pages=num_pages,
        page_size=PAGE,
        num_slots=num_slots,
        max_drafts=DRAFTS,
        kv_dtype=torch.float64,
        dtype=torch.float64,
        device=CPU,
    )
    return State(specs, 4, capacity, PrefixCapacity(**({"head": True} | prefix)))


def mark(tokens, end) -> float:
    """A number that stands for the first `end` tokens."""
    return float(int.from_bytes(key_of(b"", tokens[:end])[:5], "big"))


def feed(state, row_id, tokens, end, num_drafts=0) -> None:
    """Settles tokens up to `end` as a step would, the last `num_drafts` as accepted drafts."""
    row = state.rows[row_id]
    assert state.reserve(row_id, end)
    for position in range(row.length, end):
        for layer in state.layers.values():
            if not hasattr(layer, "windows"):
                page, place = row.pages[position // PAGE], position % PAGE
                layer.keys[page, :, place] = layer.values[page, :, place] = mark(tokens, position + 1)
    certain = end - num_drafts
    for layer in state.layers.values():
        if hasattr(layer, "windows"):
            layer.delta.committed_SHDE[row.slot] = mark(tokens, certain)
            for place in range(num_drafts):
                layer.delta.drafts_SKHX[row.slot, place] = mark(tokens, certain + place + 1)
            for place in range(KERNEL - 1 + num_drafts):
                position = certain - (KERNEL - 1) + place
                layer.windows[row.slot, place] = mark(tokens, position + 1) if position >= 0 else 0.0
    if state.head:
        row.hidden_JD = torch.tensor(
            [[mark(tokens, n)] * 4 for n in range(certain, end + 1)], dtype=torch.float64
        )
    row.length, row.num_replay = end, num_drafts
    row.unprimed = []  # the head read it before what came after


def assert_holds(state, row_id, tokens) -> None:
    """A row has in every place what its settled tokens determine."""
    row = state.rows[row_id]
    certain = row.length - row.num_replay
    for layer in state.layers.values():
        if not hasattr(layer, "windows"):
            for position in range(row.length):
                page, place = row.pages[position // PAGE], position % PAGE
                wanted = mark(tokens, position + 1)
                assert (layer.keys[page, :, place] == wanted).all(), position
                assert (layer.values[page, :, place] == wanted).all(), position
            continue
        assert (layer.delta.committed_SHDE[row.slot] == (mark(tokens, certain) if certain else 0.0)).all()
        for place in range(row.num_replay):
            assert (layer.delta.drafts_SKHX[row.slot, place] == mark(tokens, certain + place + 1)).all()
        for place in range(KERNEL - 1):
            position = row.length - (KERNEL - 1) + place
            wanted = mark(tokens, position + 1) if position >= 0 else 0.0
            assert (layer.windows[row.slot, row.num_replay + place] == wanted).all()
    for position, hidden in row.unprimed:
        assert position == row.length - 1
        assert (hidden == mark(tokens, row.length)).all()


def tokens_of(seed, count, start=()) -> tuple[int, ...]:
    rng = random.Random(seed)
    return (*start, *(rng.randrange(50) for _ in range(count)))


def read(state, row_id, tokens, **options):
    """Admits, reads everything in the chunks the state asks for, and offers them."""
    row = state.admit(row_id, tokens, **options)
    assert row is not None
    assert_holds(state, row_id, tokens)
    while row.length < len(tokens):
        feed(state, row_id, tokens, state.chunk_end(row_id, min(len(tokens), row.length + 64), len(tokens)))
        if state.at_checkpoint(row_id):
            state.publish(row_id, tokens)
        state.check_integrity()
    return row


def test_pages_of_nobody_are_free_and_the_oldest_go_first():
    evicted = []
    pages = Pages(4, evicted.append)
    first, second = pages.take(2), pages.take(2)
    for page in (*first, *second):
        pages.cache(page)
    pages.give_back(first)
    assert (pages.num_free, pages.num_used) == (2, 2)
    pages.share([first[0]])
    pages.give_back(second)
    pages.give_back([first[0]])
    assert pages.num_free == 4
    assert pages.take(1) == [first[1]] and evicted == [first[1]]
    assert pages.take(4) is None and len(evicted) == 1
    assert sorted(pages.take(3)) == sorted([*second, first[0]])
    # Of one sequence the last page goes before the first; a page that was used again goes last.
    assert evicted == [first[1], second[1], second[0], first[0]]
    pages.check([*first, *second], set())


def test_a_page_goes_when_its_last_holder_does():
    pages = Pages(2, lambda _page: None)
    (page,) = pages.take(1)
    pages.cache(page)
    pages.share([page])
    pages.give_back([page])
    assert pages.num_free == 1 and pages.holders(page) == 1
    pages.uncache(page)
    pages.give_back([page])
    assert pages.num_free == 2
    pages.check([], set())
    with pytest.raises(AssertionError, match="miscounted"):
        pages.check([page], set())


def checkpoint(floats: int) -> Checkpoint:
    return Checkpoint({"layer": (torch.zeros(floats, dtype=torch.float64),)}, 0)


def test_checkpoints_go_to_the_host_and_away_the_least_used_first():
    lost: list[bytes] = []
    store = CheckpointStore(CPU, 16, 16, lost.append)
    for key in (b"a", b"b", b"c", b"d"):
        assert store.put(key, checkpoint(1))
    assert store.num_bytes == (16, 16)
    store.use(b"a")  # from the host back to the device; c takes its place
    assert store.put(b"e", checkpoint(1))
    assert lost == [b"b"]
    assert not store.put(b"f", checkpoint(3)), "larger than either store"
    assert lost == [b"b", b"f"] and b"a" in store
    store.check()
    store.drop(b"a")
    assert store.keys == {b"c", b"d", b"e"}
    store.check()


def test_a_small_checkpoint_fits_where_only_the_host_has_room():
    store = CheckpointStore(CPU, 0, 16, lambda _key: None)
    assert store.put(b"a", checkpoint(2))
    assert store.num_bytes == (0, 16)
    store.use(b"a")
    assert b"a" in store


@pytest.mark.parametrize("specs", [HYBRID, KV], ids=["hybrid", "attention"])
@pytest.mark.parametrize("length", [5, 16, 17, 31, 32, 33, 80])
def test_a_prompt_read_twice(specs, length):
    """The second time it starts at the last boundary there is and has at least one token to read."""
    state = make_state(specs)
    tokens = tokens_of(1, length)
    read(state, "a", tokens)
    state.release("a", tokens)
    state.check_integrity()
    again = state.admit("b", tokens)
    assert_holds(state, "b", tokens)
    if specs is KV:
        assert again.length == again.num_cached == length - 1 and not again.unprimed
    else:
        assert again.length == (length - 1) // PAGE * PAGE
        assert [position for position, _ in again.unprimed] == ([again.length - 1] if again.length else [])
    state.check_integrity()


@pytest.mark.parametrize("specs", [HYBRID, KV], ids=["hybrid", "attention"])
def test_a_conversation_goes_on_where_it_ended(specs):
    state = make_state(specs)
    tokens, expected = tokens_of(1, 37), 0
    for turn in range(4):
        row = read(state, f"turn{turn}", tokens)
        known = len(tokens)
        answer = tokens_of(10 + turn, 9, start=tokens)
        feed(state, f"turn{turn}", answer, known + 5)
        feed(state, f"turn{turn}", answer, known + 8, num_drafts=2)
        state.release(f"turn{turn}", answer)
        assert row.num_cached == expected
        expected = known + 8 - (specs is KV)
        tokens = tokens_of(20 + turn, 6, start=answer)
        state.check_integrity()
    assert state.pages.num_free == state.pages.size


@pytest.mark.parametrize("kept", range(4))
def test_a_row_that_ended_inside_accepted_drafts_is_kept_at_the_cut(kept):
    """Three drafts were accepted; the row's tokens end after `kept` of them."""
    state = make_state()
    tokens = tokens_of(3, 40)
    read(state, "a", tokens[:20])
    feed(state, "a", tokens, 24, num_drafts=3)
    state.release("a", tokens[: 21 + kept])
    row = state.admit("b", tokens)
    assert (row.length, row.num_replay) == (21 + kept, kept)
    assert_holds(state, "b", tokens)


def test_a_hit_writes_to_no_page_of_others():
    state = make_state()
    tokens = tokens_of(4, 40)
    read(state, "a", tokens)
    state.release("a", tokens)
    b = state.admit("b", tokens_of(5, 30, start=tokens))
    c = state.admit("c", tokens_of(6, 30, start=tokens))
    assert b.length == c.length == 40
    assert b.pages[:2] == c.pages[:2] and not set(b.pages[2:]) & set(c.pages[2:])
    feed(state, "b", tokens_of(5, 30, start=tokens), 70)
    assert_holds(state, "c", tokens)
    d = state.admit("d", tokens_of(7, 3, start=tokens))
    assert d.length == 40
    assert_holds(state, "d", tokens)
    state.check_integrity()


def test_where_two_prompts_parted_the_second_leaves_a_checkpoint_for_the_third():
    state = make_state()
    system = tokens_of(8, 100)
    for number, found in enumerate((0, 64, 96, 96)):
        tokens = tokens_of(50 + number, 40, start=system)
        assert read(state, f"row{number}", tokens).num_cached == found
        state.release(f"row{number}", tokens)


def test_rows_that_run_share_what_they_read():
    state = make_state()
    tokens = tokens_of(9, 70)
    a = read(state, "a", tokens)
    b = read(state, "b", tokens)
    assert b.num_cached == 64 and b.pages[:3] == a.pages[:3] and b.pages[3] != a.pages[3]
    used = state.pages.num_used
    state.release("a")
    assert_holds(state, "b", tokens)
    assert state.pages.num_used == used - 2
    state.check_integrity()


def test_of_a_text_that_two_rows_read_at_once_the_end_goes_first():
    """Only the first one's pages are kept; that the second left, too, makes them none the older."""
    state = make_state(KV, num_pages=8)
    tokens = tokens_of(10, 63)
    for row_id in "ab":
        state.admit(row_id, tokens)
    for row_id in "ab":
        feed(state, row_id, tokens, 63)
    for row_id in "ab":
        state.release(row_id, tokens)
    assert state.pages.take(4) is not None, "those that nothing is kept in"
    found = []
    for _ in range(4):
        found.append(state.prefix.find(tokens, primed=True).length)
        assert state.pages.take(1) is not None
    assert found == [62, 47, 31, 15]


def test_rows_that_never_draft_use_all_pages_but_leave_theirs_to_their_like():
    state = make_state()
    tokens = tokens_of(10, 50)
    read(state, "plain", tokens, drafts=False)
    state.release("plain", tokens)
    assert state.admit("drafting", tokens).num_cached == 0
    state.release("drafting")
    assert state.admit("plain too", tokens, drafts=False).num_cached == 48
    state.release("plain too")
    read(state, "drafting", tokens)
    state.release("drafting", tokens)
    assert state.admit("drafting too", tokens).num_cached == 48
    row = state.admit("plain again", tokens, drafts=False)
    assert row.num_cached == 48 and not row.unprimed
    state.check_integrity()


def test_without_a_head_all_rows_are_alike():
    state = make_state(HYBRID, head=False)
    tokens = tokens_of(10, 50)
    read(state, "plain", tokens, drafts=False)
    state.release("plain", tokens)
    row = state.admit("drafting", tokens)
    assert row.num_cached == 48 and not row.unprimed


def test_released_without_its_tokens_a_row_leaves_nothing():
    state = make_state()
    tokens = tokens_of(11, 10)
    read(state, "a", tokens)
    state.release("a")
    assert not len(state.prefix) and state.admit("b", tokens).num_cached == 0


@pytest.mark.parametrize(("device", "host"), [(0, 0), (0, 1 << 20), (400, 0), (1, 1)])
def test_stores_of_any_size(device, host):
    state = make_state(HYBRID, device_bytes=device, host_bytes=host)
    tokens = tokens_of(12, 70)
    for number in range(3):
        row = read(state, f"row{number}", tokens)
        assert row.num_cached == (64 if number and max(device, host) >= 400 else 0)
        state.release(f"row{number}", tokens)
        state.check_integrity()
    assert sum(state.prefix.checkpoints.num_bytes) <= device + host


def test_a_tail_goes_with_its_checkpoint():
    state = make_state(HYBRID, device_bytes=400, host_bytes=0)
    for number in range(6):
        tokens = tokens_of(number, 7)
        read(state, "a", tokens)
        state.release("a", tokens)
        state.check_integrity()
    assert 0 < len(state.prefix) == len(state.prefix.checkpoints) < 6
    assert state.admit("b", (*tokens, 1)).num_cached == 7


def test_a_hit_needs_no_more_room_than_reading():
    """Three pages, all of them of a row that left: there is none for a copy of the last, which is taken itself."""
    state = make_state(HYBRID, num_pages=3)
    tokens = tokens_of(13, 40)
    read(state, "a", tokens)
    state.release("a", tokens)
    assert state.pages.num_free == 3
    row = state.admit("b", (*tokens, 7))
    assert row.num_cached == 40
    assert_holds(state, "b", tokens)
    state.check_integrity()
    assert state.admit("c", (1,)) is None
    state.release("b", (*tokens, 7))
    state.check_integrity()


@pytest.mark.parametrize("num_pages", [6, 7])
def test_a_page_that_somebody_holds_is_never_taken(num_pages):
    """The first holds four pages; the second shares two or three of them and needs the rest fresh."""
    state = make_state(HYBRID, num_pages=num_pages)
    tokens = tokens_of(14, 49)
    read(state, "a", tokens)
    assert state.fits(tokens)
    row = state.admit("b", tokens)
    assert row.num_cached == 48
    feed(state, "b", tokens_of(15, 1, start=tokens[:48]), 49)
    assert_holds(state, "a", tokens)
    state.check_integrity()
    assert not state.fits(tokens_of(16, 60))
    assert state.fits(tokens_of(16, 60), without=["a", "b"])


def test_dropping_everything_leaves_rows_what_they_hold():
    state = make_state()
    tokens = tokens_of(17, 70)
    read(state, "a", tokens)
    read(state, "b", tokens)
    state.drop_cache()
    state.check_integrity()
    assert not len(state.prefix) and state.prefix.checkpoints.num_bytes == (0, 0)
    assert_holds(state, "a", tokens)
    assert state.admit("c", tokens).num_cached == 0
    for row in "abc":
        state.release(row, tokens)
        state.check_integrity()
    assert state.pages.num_free == state.pages.size


def test_integrity_sees_wrong_hashes_and_holders():
    state = make_state()
    tokens = tokens_of(18, 40)
    read(state, "a", tokens)
    entry = next(iter(state.prefix._entries.values()))
    object.__setattr__(entry, "tokens", (1,) * PAGE)
    with pytest.raises(AssertionError, match="wrong hash"):
        state.check_integrity()
    state = make_state()
    read(state, "a", tokens)
    state.rows["a"].pages.append(state.rows["a"].pages[0])
    with pytest.raises(AssertionError, match="miscounted"):
        state.check_integrity()


@pytest.mark.parametrize("specs", [HYBRID, KV], ids=["hybrid", "attention"])
@pytest.mark.parametrize("seed", range(6))
def test_random_rows(specs, seed):
    """Rows that begin alike come, grow and go in any order, in little room."""
    rng = random.Random(seed)
    state = make_state(specs, num_pages=rng.choice([8, 14, 30]), device_bytes=600, host_bytes=900)
    stems = [tokens_of(stem, 60) for stem in range(2)]
    rows: dict[str, tuple[int, ...]] = {}
    hits = 0
    for number in range(150):
        row_id = rng.choice([*rows, f"row{number}"])
        if row_id not in rows:
            tokens = tokens_of(
                rng.randrange(4), rng.randrange(1, 30), start=rng.choice(stems)[: rng.randrange(60)]
            )
            fits = state.fits(tokens)
            row = state.admit(row_id, tokens, drafts=rng.random() < 0.7)
            assert (row is not None) or not fits or not state.slots.num_free
            if row is None:
                continue
            rows[row_id] = tokens
            hits += row.num_cached
            assert row.num_cached < len(tokens)
            assert_holds(state, row_id, tokens)
            if rng.random() < 0.8:
                feed(state, row_id, tokens, state.chunk_end(row_id, len(tokens), len(tokens)))
                if state.at_checkpoint(row_id):
                    state.publish(row_id, tokens)
        elif rng.random() < 0.5 and state.reserve(row_id, len(rows[row_id]) + 5):
            row, drafts = state.rows[row_id], rng.randrange(4)
            rows[row_id] = tokens = tokens_of(number, 5, start=rows[row_id])
            feed(state, row_id, tokens, len(tokens) - 1, min(drafts, len(tokens) - 2 - row.length))
        else:
            tokens, row = rows.pop(row_id), state.rows[row_id]
            kept = len(tokens) - rng.randrange(row.num_replay + 1)
            state.release(row_id, tokens[:kept] if rng.random() < 0.9 else None)
        if rng.random() < 0.02:
            state.drop_cache()
        state.check_integrity()
        for other, tokens in rows.items():
            assert_holds(state, other, tokens)
    assert hits


@pytest.mark.parametrize("specs", [KV, HYBRID], ids=["attention", "hybrid"])
@pytest.mark.parametrize("length", [32, 40], ids=["full pages", "a tail"])
@pytest.mark.parametrize("position", [0, 16, 20, 39])
def test_equal_tokens_share_what_is_before_their_first_different_extra(specs, length, position):
    """Extras that lie past what was kept are nobody's business; equal ones share as if there were none."""
    tokens = tokens_of(3, 60)
    mine, other = ((position, b"mine"),), ((position, b"other"),)
    state = make_state(specs)

    def cached(row_id: str, extras) -> int:
        held = state.admit(row_id, tokens, extras=extras)
        state.check_integrity()
        state.release(row_id)
        return held.num_cached

    assert state.admit("first", tokens[:length], extras=mine).num_cached == 0
    while state.rows["first"].length < length:
        held = state.rows["first"]
        feed(state, "first", tokens, state.chunk_end("first", min(length, held.length + PAGE), length))
        if state.at_checkpoint("first"):
            state.publish("first", tokens[:length])
    state.release("first", tokens[:length])
    whole = length if specs is HYBRID else length - 1
    assert cached("equal", mine) == whole
    assert cached("equal and more", (*mine, (50, b"later"))) == whole
    if position >= length:
        assert cached("different", other) == cached("none", ()) == whole
    else:
        before = position // PAGE * PAGE
        assert (
            cached("different", other)
            == cached("none", ())
            == (before if specs is HYBRID else max(0, before - 1))
        )


def test_keys_without_extras_are_those_of_the_tokens_alone():
    tokens = tokens_of(5, PAGE)
    assert key_of(b"", tokens) == key_of(b"", tokens, ())
    keys = {
        key_of(b"", tokens, extras)
        for extras in ((), ((0, b""),), ((0, b"a"),), ((1, b"a"),), ((0, b"a"), (1, b"")), ((0, b"ab"),))
    }
    assert len(keys) == 6


def test_recent_keys_of_pages_are_those_used_last():
    state = make_state(KV)
    first, second = tokens_of(1, 40), tokens_of(2, 40)
    for row_id, tokens in (("a", first), ("b", second)):
        read(state, row_id, tokens)
        state.release(row_id, tokens)

    def keys(tokens):
        page = key_of(b"", tokens[:PAGE])
        return [page, key_of(page, tokens[PAGE : 2 * PAGE])]

    assert state.prefix.recent(9) == [*keys(second), *keys(first)], "tails are left out"
    read(state, "c", first)
    state.release("c", first)
    assert state.prefix.recent(9) == [*keys(first), *keys(second)]
    assert state.prefix.recent(1) == keys(first)[:1]
    state.drop_cache()
    assert state.prefix.recent(9) == []


def test_recent_keys_lead_to_checkpoints_where_those_are_needed():
    state = make_state(HYBRID)
    tokens = tokens_of(3, 40)
    read(state, "a", tokens)
    state.release("a", tokens)
    first = key_of(b"", tokens[:PAGE])
    # The prompt's last page boundary has a checkpoint; the page before it has none, and nothing can go on there.
    assert state.prefix.recent(9) == [key_of(first, tokens[PAGE : 2 * PAGE])]
