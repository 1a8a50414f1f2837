"""Prompts whose tiles walk their context: the bits that splits and their combination give, in any company."""

from dataclasses import replace

import pytest
import torch
from test_triton_attention import (
    all_equal,
    draw,
    make,
    randn,
    run,
    short_splits,  # noqa: F401
    true_bfloat16,  # noqa: F401
)

from headlong.ops.gated_attention import triton as op
from headlong.ops.gated_attention import triton_alike
from headlong.ops.gated_attention.triton import TritonGatedAttention
from support.ragged import Share

pytestmark = pytest.mark.usefixtures("short_splits")
SHAPES = {
    "three queries of a key head": ((3, 1, 36), "gated", {}),
    "two key heads, a window and sinks": ((4, 2, 20), "plain", {"window": 33, "sinks_H": randn(4, seed=9)}),
    "as wide as heads may be": ((2, 1, 256), "normed", {}),
}


@pytest.fixture
def walked(monkeypatch) -> list[int]:
    """Whether tokens walk, though they are few, is up to `WALKED_TOKENS`; the tokens of each launch that walks."""
    walk, counts = TritonGatedAttention.walk, []
    monkeypatch.setattr(op, "multiprocessors_of", lambda device: 0)  # noqa: ARG005
    monkeypatch.setattr(op, "walks_alike", lambda *given: True)  # noqa: ARG005
    monkeypatch.setattr(op, "WALKED_TOKENS", 3)

    def walking(net, queries, *rest):
        counts.append(len(queries))
        walk(net, queries, *rest)

    monkeypatch.setattr(TritonGatedAttention, "walk", walking)
    return counts


@pytest.mark.parametrize("shape", SHAPES)
def test_walking_has_the_bits_of_splits(shape, walked, monkeypatch):
    """Tokens before and after a split's end, in chunks, beside a prompt and a single token."""
    sizes, kind, own = SHAPES[shape]
    weights = replace(make(sizes, kind), **own)
    net, sequences = TritonGatedAttention(weights), draw([195, 4, 40], weights)
    chunks = [[Share(0, 186, 5), Share(1, 0, 4), Share(2, 39, 1)], [Share(0, 191, 4)]]
    found = run(net, sequences, chunks, torch.bfloat16, known=(186, 0, 39))
    monkeypatch.setattr(op, "WALKED_TOKENS", 100)
    split = [[Share(2, 39, 1), Share(0, 186, 7), Share(1, 0, 4)], [Share(0, 193, 1)], [Share(0, 194, 1)]]
    wanted = run(net, sequences, split, torch.bfloat16, seed=3, known=(186, 0, 39))
    assert walked == [10, 4] and wanted[0][186:].any(1).all()
    assert all_equal(found, wanted)


@pytest.mark.usefixtures("walked")
def test_walks_are_tried_before_they_serve(monkeypatch):
    """A device whose tiles of different sizes differ in their bits goes on with splits."""
    weights, tried = make((2, 1, 20)), []
    walk = TritonGatedAttention.walk

    def off_by_little(net, *given):
        tried.append(walk(net, *given))
        given[4].view(torch.int32)[0, 0] += 1

    monkeypatch.setattr(triton_alike, "KNOWN", 10)
    monkeypatch.setattr(triton_alike, "TOKENS", 8)
    monkeypatch.setattr(op, "walks_alike", triton_alike.walks_alike)
    net, (tokens,) = TritonGatedAttention(weights), draw([9], weights)
    for spoiled, walks in ((True, 1), (False, 1 + 3)):
        monkeypatch.setattr(TritonGatedAttention, "walk", off_by_little if spoiled else walking(walk, tried))
        monkeypatch.setattr(triton_alike, "_alike", {})
        for _ in range(2):
            run(net, [tokens], [[Share(0, 0, 9)]], torch.bfloat16)
        assert len(tried) == walks


def walking(walk, tried):
    return lambda net, *given: tried.append(walk(net, *given))
