"""The attention core's Triton kernels: against the reference, and bit for bit the same in any company."""

import random

import pytest
import torch

from headlong.ops.gated_attention import triton as op
from headlong.ops.gated_attention.reference import GatedAttentionWeights, ReferenceGatedAttention
from headlong.ops.gated_attention.triton import TritonGatedAttention
from headlong.ops.norm.reference import RmsNorm
from headlong.ops.paged_attention.reference import HEAD_ALIGN
from headlong.ops.rope.reference import Rotary, angles
from support import interpreter
from support.ragged import Share, gather, plan_rows, scatter, schedule, token_by_token

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16]
KINDS = {"gated": (True, True), "plain": (False, False), "normed": (False, True), "gates": (True, False)}
SIZES = [(2, 2, 64), (4, 2, 80), (6, 1, 256), (10, 2, 20)]
"""Heads, key heads, head size."""


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(sizes, kind="gated"):
    heads, kv, dim = sizes
    gated, normed = KINDS[kind]
    weight = randn(heads + kv, dim, seed=5)
    weight[:heads] *= dim**-0.5
    norm = RmsNorm(weight.to(DEVICE), 1e-6) if normed else None
    return GatedAttentionWeights(heads, kv, dim, norm, gated)


def draw(lengths, weights, seed=20):
    w = weights
    width = (w.num_heads * (1 + w.gated) + 2 * w.num_kv_heads) * w.head_dim
    return [randn(n, width, seed=seed + i) for i, n in enumerate(lengths)]


@pytest.fixture(autouse=True)
def true_bfloat16(monkeypatch):
    interpreter.round_bfloat16(monkeypatch)


class Pages:
    """A cache of NaN, whose pages rows hold in random order."""

    def __init__(self, lengths, weights, dtype, page_size=16, seed=0):
        spare = 8
        counts = [-(-(n + spare) // page_size) for n in lengths]
        numbers = list(range(1, sum(counts) + 1))
        random.Random(seed).shuffle(numbers)
        self.tables = [[numbers.pop() for _ in range(count)] for count in counts]
        self.page_size, self.dim = page_size, weights.head_dim
        width = self.dim + -self.dim % HEAD_ALIGN
        shape = (sum(counts) + 1, weights.num_kv_heads, page_size, width)
        self.keys, self.values = (torch.full(shape, torch.nan, dtype=dtype, device=DEVICE) for _ in range(2))

    def call(self, act, net, tokens, step):
        """Beyond a row's last page the table holds a number of no page."""
        rows, pages = plan_rows(step), [self.tables[share.row] for share in step]
        most = max(map(len, pages)) + 1
        nowhere = 0 if net.name == "reference" else 1 << 28
        table = torch.tensor([[*row, *([nowhere] * (most - len(row)))] for row in pages], device=DEVICE)
        spans = zip(rows.starts, rows.query_lens, strict=True)
        positions = torch.cat([torch.arange(start, start + count) for start, count in spans]).to(DEVICE)
        rotary = Rotary.of(10000.0, self.dim // 4 * 2, self.dim, DEVICE)
        rotation = angles(positions, rotary, torch.float32)
        plan = net.prepare(rows, table, self.page_size)
        return getattr(net, act)(tokens.to(DEVICE), self.keys, self.values, rotation, plan)


def run(net, sequences, steps, dtype=torch.float32, page_size=16, seed=0, known=()):
    """The first `known` tokens of each row are in the cache before the first step."""
    w = net.weights
    cache = Pages([len(s) for s in sequences], w, dtype, page_size, seed)
    for row, count in enumerate(known):
        if count:
            cache.call("write", ReferenceGatedAttention(w), sequences[row][:count], [Share(row, 0, count)])
    results = [torch.zeros(len(s), w.num_heads * w.head_dim, device=DEVICE) for s in sequences]
    generator = torch.Generator().manual_seed(1)
    for step in steps:
        tokens = gather(step, sequences, generator)
        scatter(step, cache.call("__call__", net, tokens, step), results)
    return results


def assert_close(found, wanted, rtol=1e-5, atol=1e-5):
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


def all_equal(found, wanted):
    return all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))


@pytest.fixture
def short_splits(monkeypatch):
    """Two splits of 32 positions, two of 64, two of 128 …, and few positions at a time."""
    sizes = {"FIRST_SPLIT": 32, "SPLITS_PER_SIZE": 2, "POSITIONS": 16, "COMBINED_SPLITS": 4}
    for name, value in sizes.items():
        monkeypatch.setattr(op, name, value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_reference(sizes, kind):
    weights = make(sizes, kind)
    sequences = draw([7, 1, 35], weights)
    steps = [[Share(0, 0, 5), Share(1, 0, 1)], [Share(2, 33, 2), Share(0, 5, 1, drafts=2, accept=1)]]
    found, wanted = (
        run(make_net(weights), sequences, steps, known=(0, 0, 33))
        for make_net in (TritonGatedAttention, ReferenceGatedAttention)
    )
    assert_close(found, wanted)


@pytest.mark.parametrize("sizes", [(4, 2, 80), (6, 1, 256)], ids=str)
def test_bfloat16_cache(sizes):
    """Queries and softmax weights are rounded as the cache is."""
    weights = make(sizes)
    sequences = draw([44, 3], weights)
    steps = [[Share(0, 40, 4), Share(1, 0, 3)]]
    found, wanted = (
        run(make_net(weights), sequences, steps, torch.bfloat16, known=(40,))
        for make_net in (TritonGatedAttention, ReferenceGatedAttention)
    )
    assert_close(found, wanted, rtol=2e-2, atol=1e-2)


@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize("page_size", [16, 64])
def test_several_splits(page_size):
    weights = make((2, 1, 20))
    sequences = draw([330, 67, 4], weights)
    steps = [[Share(0, 313, 17), Share(1, 63, 4), Share(2, 0, 4)]]
    found, wanted = (
        run(make_net(weights), sequences, steps, page_size=page_size, known=(313, 63))
        for make_net in (TritonGatedAttention, ReferenceGatedAttention)
    )
    assert_close(found, wanted)


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((1, 1, 64), torch.float32),
        ((3, 1, 20), torch.float32),
        ((2, 2, 16), torch.bfloat16),
        pytest.param((1, 1, 64), torch.bfloat16, marks=pytest.mark.slow),
        pytest.param((3, 1, 20), torch.bfloat16, marks=pytest.mark.slow),
        pytest.param((2, 2, 16), torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_bits_do_not_depend_on_company_chunks_or_drafts(sizes, dtype):
    weights, lengths = make(sizes), [7, 2, 11]
    net, sequences = TritonGatedAttention(weights), draw(lengths, weights)
    alone = [run(net, sequences, token_by_token(row, n), dtype)[row] for row, n in enumerate(lengths)]
    for seed in range(2):
        mixed = run(net, sequences, schedule(lengths, seed, max_drafts=4), dtype, seed=seed)
        assert all_equal(mixed, alone)


@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str
)
def test_bits_over_several_splits(dtype):
    """The last tokens of a long context one by one, at once, and in the company of a longer row and a prompt. They
    pass the ends of a block, a page and a split."""
    weights = make((3, 1, 36))
    net, sequences = TritonGatedAttention(weights), draw([199, 320, 9], weights)
    ways = (
        [[Share(0, at, 1)] for at in range(187, 199)],
        [[Share(0, 187, 12)]],
        [[Share(2, 0, 9), Share(0, 187, 8, drafts=6, accept=4), Share(1, 317, 3)]],
        [[Share(0, 187, 7)], [Share(1, 317, 1), Share(0, 194, 5)]],
    )
    results = [run(net, sequences, steps, dtype, seed=i, known=(187, 317))[0] for i, steps in enumerate(ways)]
    assert results[0].isfinite().all() and results[0][187:].any(1).all()
    assert all(torch.equal(result, results[0]) for result in results[1:])


@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str
)
def test_bits_do_not_depend_on_passes(dtype, monkeypatch):
    """Long prompts are attended some tokens at a time; where they are cut does not matter."""
    weights = make((12, 1, 16), "plain")
    net, sequences = TritonGatedAttention(weights), draw([35, 3, 21], weights)
    steps = [[Share(0, 29, 6), Share(1, 0, 3), Share(2, 19, 2)]]
    at_once = run(net, sequences, steps, dtype, known=(29, 0, 19))
    for tokens in (4, 8):
        monkeypatch.setattr(op, "MAX_PARTS", tokens * 2 * 12 * 16)
        assert all_equal(run(net, sequences, steps, dtype, known=(29, 0, 19)), at_once)


def test_more_rows_than_are_looked_at_at_a_time(monkeypatch):
    monkeypatch.setattr(op, "BLOCK_R", 4)
    weights, lengths = make((2, 1, 16)), [1, 2, 20, 1, 1, 2, 1]
    net, sequences = TritonGatedAttention(weights), draw(lengths, weights)
    together = run(net, sequences, [[Share(row, 0, n) for row, n in enumerate(lengths)]])
    for row in (0, 3, 5, 6):
        steps = [[Share(0, 0, lengths[row])]]
        assert torch.equal(run(net, [sequences[row]], steps)[0], together[row])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_writing_leaves_what_attending_leaves(kind, dtype):
    weights = make((2, 1, 20), kind)
    (tokens,), left = draw([18], weights), []
    for make_net, act in (
        (TritonGatedAttention, "__call__"),
        (TritonGatedAttention, "write"),
        (ReferenceGatedAttention, "write"),
    ):
        cache = Pages([18], weights, dtype)
        cache.call(act, make_net(weights), tokens, [Share(0, 0, 18)])
        left.append((cache.keys, cache.values))
    (keys, values), (written_keys, written_values), (true_keys, true_values) = left
    assert torch.equal(keys.nan_to_num(7.0), written_keys.nan_to_num(7.0))
    assert torch.equal(values.nan_to_num(7.0), true_values.nan_to_num(7.0))
    assert torch.equal(values.nan_to_num(7.0), written_values.nan_to_num(7.0))
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(keys, true_keys, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("sizes", [(1, 1), (32, 2), (128, 64)], ids=str)
def test_splits_cover_all_positions(sizes, monkeypatch):
    monkeypatch.setattr(op, "FIRST_SPLIT", sizes[0])
    monkeypatch.setattr(op, "SPLITS_PER_SIZE", sizes[1])
    begin = 0
    for split in range(7 * min(sizes[1], 8)):
        end = begin + (sizes[0] << split // sizes[1])
        assert op.split_of(begin) == op.split_of(end - 1) == split
        begin = end
