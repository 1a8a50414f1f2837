"""Attention through a window and with sinks, by every backend: against plain softmax in float64, the same bits in any
company, and nothing before a window is read."""

import random
from dataclasses import replace

import pytest
import torch
from test_triton_attention import (
    DEVICE,
    Pages,
    all_equal,
    assert_close,
    draw,
    make,
    randn,
    run,
    short_splits,  # noqa: F401
    true_bfloat16,  # noqa: F401
)

from headlong.ops import native
from headlong.ops.gated_attention import triton as op
from headlong.ops.gated_attention.native import NativeGatedAttention
from headlong.ops.gated_attention.reference import GatedAttentionWeights, ReferenceGatedAttention
from headlong.ops.gated_attention.triton import TritonGatedAttention
from headlong.ops.rope.reference import Rotary, angles, rotate
from support.ragged import Share, schedule, token_by_token

pytestmark = pytest.mark.usefixtures("short_splits")
BACKENDS = [ReferenceGatedAttention, TritonGatedAttention]
if native.library() is not None and DEVICE.type == "cpu":
    BACKENDS.append(NativeGatedAttention)
NARROW = [(1, False), (5, True), (16, False), (33, True), (None, True)]
"""Windows and whether there are sinks: of a token, within a page, of a page, over splits, longer than all."""


def windowed(sizes, window, sinks, kind="plain") -> GatedAttentionWeights:
    weights = make(sizes, kind)
    sinks_H = 2.0 * randn(sizes[0], seed=9).to(DEVICE) if sinks else None
    return replace(weights, window=window, sinks_H=sinks_H)


def truth(weights, tokens):
    """All tokens of one row at once, in float64."""
    w, count = weights, len(tokens)
    rotary = Rotary.of(10000.0, w.head_dim // 4 * 2, w.head_dim, DEVICE)
    qkv = tokens.to(DEVICE).double().view(count, -1, w.head_dim)
    turned = rotate(
        qkv[:, : w.num_heads + w.num_kv_heads],
        angles(torch.arange(count, device=DEVICE), rotary, torch.float64),
    )
    group = w.num_heads // w.num_kv_heads
    k, v = (x.repeat_interleave(group, 1) for x in (turned[:, w.num_heads :], qkv[:, -w.num_kv_heads :]))
    scores = torch.einsum("nhd,mhd->hnm", turned[:, : w.num_heads], k) * w.head_dim**-0.5
    back = torch.arange(count, device=DEVICE)[:, None] - torch.arange(count, device=DEVICE)
    scores = scores.masked_fill((back < 0) | (back >= (w.window or count)), -torch.inf)
    if w.sinks_H is not None:
        scores = torch.cat([scores, w.sinks_H.double()[:, None, None].expand(-1, count, 1)], -1)
    return torch.einsum("hnm,mhd->nhd", scores.softmax(-1)[..., :count], v).flatten(1).float()


def cases(windows):
    """The interpreter takes its time, so of Triton's kernels some are tried only where tests may be slow."""
    return [
        pytest.param(net, *case, marks=[pytest.mark.slow] * (net is TritonGatedAttention and case[0] != 33))
        for net in BACKENDS
        for case in windows
    ]


@pytest.mark.parametrize(("net", "window", "sinks"), cases(NARROW))
def test_plain_softmax(net, window, sinks):
    """The end of a prompt in chunks that begin and end within windows, a decoded token, and a prompt shorter than the
    window."""
    weights = windowed((4, 2, 20), window, sinks)
    sequences = draw([75, 3], weights)
    steps = [[Share(0, 67, 4), Share(1, 0, 3)], [Share(0, 71, 3)], [Share(0, 74, 1)]]
    found = run(net(weights), sequences, steps, known=(67,))
    wanted = [truth(weights, tokens) for tokens in sequences]
    assert_close([found[0][67:], found[1]], [wanted[0][67:], wanted[1]])


@pytest.mark.parametrize(("net", "window", "sinks"), cases(NARROW[1:]))
def test_bits_do_not_depend_on_company_chunks_or_drafts(net, window, sinks):
    """A prompt, a verification and plain decoding, past the ends of a block, a page, a split and a window."""
    weights, known = windowed((2, 1, 20), window, sinks), 92
    sequences = draw([known + 8, 2], weights)
    alone = run(net(weights), sequences[:1], token_by_token(0, known + 8)[known:], known=(known,))[0]
    for way in (
        [[Share(0, known, 8)]],
        [[Share(1, 0, 2), Share(0, known, 1, drafts=4, accept=3)], [Share(0, known + 4, 4)]],
    ):
        assert torch.equal(run(net(weights), sequences, way, known=(known,))[0], alone)


@pytest.mark.parametrize("net", [net for net in BACKENDS if net is not TritonGatedAttention])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_in_random_schedules(net, dtype):
    weights, lengths = windowed((4, 2, 16), 21, True), [40, 3, 70]
    sequences = draw(lengths, weights)
    alone = [
        run(net(weights), sequences, token_by_token(row, n), dtype)[row] for row, n in enumerate(lengths)
    ]
    for seed in range(3):
        assert all_equal(run(net(weights), sequences, schedule(lengths, seed), dtype, seed=seed), alone)


@pytest.mark.parametrize("net", BACKENDS)
def test_nothing_before_a_window_is_read(net):
    """Pages that lie wholly before what the step's tokens see may hold anything."""
    weights, known = windowed((2, 1, 16), 40, True), 200
    (tokens,) = draw([known + 2], weights)
    found = []
    for rubbish in (False, True):
        cache = Pages([len(tokens)], weights, torch.float32)
        cache.call("write", ReferenceGatedAttention(weights), tokens[:known], [Share(0, 0, known)])
        if rubbish:
            old = cache.tables[0][: (known - 39) // 16]
            cache.keys[old] = cache.values[old] = torch.nan
        found.append(cache.call("__call__", net(weights), tokens[known:], [Share(0, known, 2)]))
    assert found[0].isfinite().all() and torch.equal(*found)


@pytest.mark.parametrize("net", BACKENDS)
def test_a_window_longer_than_all_changes_no_bit(net):
    plain = windowed((2, 1, 20), None, False)
    (tokens,) = draw([70], plain)
    found = [
        run(net(replace(plain, window=window)), [tokens], [[Share(0, 67, 3)]], known=(67,))[0]
        for window in (None, 70, 4096)
    ]
    assert torch.equal(found[1], found[0]) and torch.equal(found[2], found[0])


def test_windows_touch_no_more_splits_than_there_is_room_for():
    rng = random.Random(0)
    for _ in range(500):
        window, last = rng.randint(1, 300), rng.randint(0, 3000)
        touched = op.split_of(last) - op.split_of(max(last + 1 - window, 0)) + 1
        assert touched <= op.splits_seen(window, last + 1)
    assert op.splits_seen(128, 1 << 17) <= 128 // op.FIRST_SPLIT + 1
