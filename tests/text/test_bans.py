"""The automaton that keeps strings out of a text, against a plain search."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headlong.text.bans import BanConstraint, Bans

LETTERS = "abAB"
PIECES = [
    b"",
    b"a",
    b"b",
    b"A",
    b"ab",
    b"ba",
    b"Bb",
    b"aab",
    b"bABa",
    "é".encode(),
    "é".encode()[:1],
    b"\xa9",
]


@given(
    strings=st.lists(st.text(LETTERS + "é", min_size=1, max_size=5), min_size=1, max_size=5),
    tokens=st.lists(st.integers(0, len(PIECES) - 1), max_size=12),
)
@settings(max_examples=300, deadline=None, database=None)
def test_a_token_is_refused_where_it_completes_a_string(strings, tokens):
    wanted = [one.encode() for one in strings]
    bans, text, kept = Bans(wanted, PIECES), b"", []
    constraint = BanConstraint(bans)
    for token in tokens:
        (mask,) = constraint.masks((), 0, 1)
        whole = range(len(PIECES)) if mask is None else np.flatnonzero(_bits(mask))
        right = [
            n
            for n, piece in enumerate(PIECES)
            if not any(w.lower() in (text + piece).lower() for w in wanted)
        ]
        assert list(whole) == right
        if token in right:
            assert constraint.advance([token]) == 1
            text, kept = text + PIECES[token], [*kept, token]
    # Drafts are read on trial: the same masks as one by one, and none after a draft that cannot stand.
    fresh = BanConstraint(bans)
    assert fresh.masks(kept, len(kept), 1) == constraint.masks((), 0, 1)
    one_by_one = []
    for token in kept:
        one_by_one += fresh.masks((), 0, 1)
        fresh.advance([token])
    assert BanConstraint(bans).masks(kept, 0, len(kept)) == one_by_one


def test_nothing_after_a_draft_that_cannot_stand():
    constraint = BanConstraint(Bans([b"ab"], PIECES))
    masks = constraint.masks([1, 2, 1], 0, 4)
    assert masks[0] is not None and masks[1] is not None and masks[2:] == [None, None]


def _bits(mask: bytes) -> np.ndarray:
    return np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little", count=len(PIECES))
