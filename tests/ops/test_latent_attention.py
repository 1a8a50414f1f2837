"""The latent attention core of every backend: its definition with keys and values expanded, and a token's bits whatever
the company."""

import random

import pytest
import torch

from headlong.ops import native
from headlong.ops.latent_attention.native import NativeLatentAttention
from headlong.ops.latent_attention.reference import ReferenceLatentAttention
from headlong.ops.latent_attention.weights import LatentAttentionWeights, LatentSizes
from headlong.ops.linear.native_source import Source
from headlong.ops.norm.reference import RmsNorm
from headlong.ops.rope.reference import Rotary, angles
from headlong.state.latent_kv import LatentKvSpec
from support import interpreter
from support.ragged import Share, gather, plan_rows, scatter, schedule, token_by_token

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
SIZES = [(4, 32, 16, 16, 24), (5, 19, 7, 6, 9)]
"""Heads, rank, plain and rotary part, values."""


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(sizes, interleaved=True, device=CPU):
    heads, rank, plain, rope, values = sizes
    return LatentAttentionWeights(
        LatentSizes(heads, rank, plain, rope, values, scale=0.3, interleaved=interleaved),
        norm=RmsNorm((1.0 + 0.3 * randn(rank, seed=1)).to(device), 1e-6),
        keys_HRP=(randn(heads, plain, rank, seed=2) * plain**-0.5).to(device).transpose(1, 2),
        values_HVR=(randn(heads, values, rank, seed=3) * rank**-0.5).to(device),
    )


def reference(weights):
    """The net, the reference with the same weights, and their device."""
    true = ReferenceLatentAttention(weights, torch.float32)
    return true, true, CPU


def in_c(weights):
    if (reason := native.refusal(torch.float32, CPU)) is not None:
        pytest.skip(f"native kernels {reason}")
    return NativeLatentAttention.load(weights, Source.of), reference(weights)[0], CPU


def on_gpu(weights):
    triton = pytest.importorskip("headlong.ops.latent_attention.triton")
    return triton.TritonLatentAttention(weights), reference(weights)[0], DEVICE


NETS = {"reference": reference, "native": in_c, "triton": on_gpu}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def true_bfloat16(monkeypatch):
    pytest.importorskip("triton")
    interpreter.round_bfloat16(monkeypatch)


@pytest.fixture
def short_splits(monkeypatch):
    """Two splits of 32 positions, two of 64, two of 128 …, and few positions at a time."""
    triton = pytest.importorskip("headlong.ops.latent_attention.triton")
    from headlong.ops.gated_attention import triton as splits

    for name, value in {"FIRST_SPLIT": 32, "SPLITS_PER_SIZE": 2}.items():
        monkeypatch.setattr(triton, name, value)
        monkeypatch.setattr(splits, name, value)
    for name, value in {"POSITIONS": 16, "COMBINED_SPLITS": 4}.items():
        monkeypatch.setattr(triton, name, value)


def draw(lengths, w, seed=20):
    """Queries and what becomes latents, side by side."""
    width = w.num_heads * (w.plain_dim + w.rope_dim) + w.rank + w.rope_dim
    return [randn(n, width, seed=seed + i) for i, n in enumerate(lengths)]


class Pages:
    """A cache of NaN, whose pages rows hold in random order."""

    def __init__(self, lengths, w, dtype, device, page_size=16, seed=0):
        counts = [-(-(n + 8) // page_size) for n in lengths]
        numbers = list(range(1, sum(counts) + 1))
        random.Random(seed).shuffle(numbers)
        self.tables = [[numbers.pop() for _ in range(count)] for count in counts]
        self.page_size, self.w, self.device = page_size, w, device
        width = LatentKvSpec(w.rank, w.rope_dim).padded_width
        self.latents = torch.full((sum(counts) + 1, page_size, width), torch.nan, dtype=dtype, device=device)
        self.latents[..., w.rank + w.rope_dim :] = 0.0

    def call(self, net, tokens, step, *, write=False):
        w, rows, pages = self.w, plan_rows(step), [self.tables[share.row] for share in step]
        most = max(map(len, pages))
        table = torch.tensor([[*row, *([0] * (most - len(row)))] for row in pages], device=self.device)
        spans = zip(rows.starts, rows.query_lens, strict=True)
        positions = torch.cat([torch.arange(start, start + count) for start, count in spans])
        rotary = Rotary.of(10000.0, w.rope_dim, w.rope_dim, self.device, amplitude=1.2)
        rotation = angles(positions.to(self.device), rotary, torch.float32)
        queries, given = tokens.to(self.device).split(
            (tokens.shape[1] - w.rank - w.rope_dim, w.rank + w.rope_dim), dim=1
        )
        queries, given = queries.contiguous(), given.contiguous()
        step = prepare(net, rows, table, self.page_size)
        if write:
            return net.write(given, self.latents, rotation, step)
        return net(queries, given, self.latents, rotation, step)


def prepare(net, rows, table, page_size):
    """What the attention core of the same backend prepares."""
    if net.name == "triton":
        from headlong.ops.triton_step import TritonStep

        return TritonStep.of(rows, table, page_size)
    from headlong.ops.gated_attention.native import NativeGatedAttention
    from headlong.ops.gated_attention.reference import ReferenceGatedAttention

    core = NativeGatedAttention if net.name == "native" else ReferenceGatedAttention
    return core.prepare(rows, table, page_size)


def run(made, sequences, steps, dtype=torch.float32, page_size=16, seed=0, known=()):
    """The first `known` tokens of each row are in the cache before the first step."""
    net, true, device = made
    cache = Pages([len(s) for s in sequences], net.sizes, dtype, device, page_size, seed)
    for row, count in enumerate(known):
        if count:
            cache.call(true, sequences[row][:count], [Share(row, 0, count)], write=True)
    w = net.sizes
    results = [torch.zeros(len(s), w.num_heads * w.value_dim, device=device) for s in sequences]
    generator = torch.Generator().manual_seed(1)
    for step in steps:
        scatter(step, cache.call(net, gather(step, sequences, generator), step), results)
    return results


def expanded(weights, sequence):
    """Every head's keys and values made of each latent, by the definition, in float64."""
    w = weights.sizes
    sequence, count = sequence.double(), len(sequence)
    query_size = w.num_heads * (w.plain_dim + w.rope_dim)
    plain, rotary = sequence[:, :query_size].view(count, w.num_heads, -1).split((w.plain_dim, w.rope_dim), -1)
    latent, key_rotary = sequence[:, query_size:].split((w.rank, w.rope_dim), -1)
    latent = (
        latent * (latent.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weights.norm.weight * w.rank**-0.5
    )
    frequencies = 10000.0 ** -(torch.arange(0, w.rope_dim, 2, dtype=torch.float64) / w.rope_dim)
    turn = torch.polar(torch.full((), 1.2, dtype=torch.float64), torch.arange(count)[:, None] * frequencies)

    def turned(x):
        pairs = x.unflatten(-1, (-1, 2)) if w.interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)
        return torch.view_as_complex(pairs.contiguous()) * turn.view(count, *[1] * (x.dim() - 2), -1)

    keys = torch.einsum("hrp,nr->nhp", weights.keys_HRP.double(), latent)
    scores = torch.einsum("nhp,mhp->hnm", plain, keys)
    scores = scores + torch.einsum("nhe,me->hnm", turned(rotary), turned(key_rotary).conj()).real
    scores = (scores * w.scale).masked_fill(~torch.ones(count, count, dtype=torch.bool).tril(), -torch.inf)
    values = torch.einsum("hvr,nr->nhv", weights.values_HVR.double(), latent)
    return torch.einsum("hnm,mhv->nhv", scores.softmax(-1), values).flatten(1)


@pytest.mark.parametrize("interleaved", [True, False], ids=["pairs", "halves"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("net", NETS)
def test_it_is_attention_to_expanded_latents(net, sizes, interleaved):
    made = NETS[net](make(sizes, interleaved, CPU if net != "triton" else DEVICE))
    sequences = draw([7, 1, 35], made[0].sizes)
    steps = [[Share(0, 0, 5), Share(1, 0, 1)], [Share(2, 33, 2), Share(0, 5, 1, drafts=2, accept=1)]]
    found = run(made, sequences, steps, known=(0, 0, 33))
    w = make(sizes, interleaved)
    for ours, sequence, first in zip(found, sequences, (0, 0, 33), strict=True):
        wanted = expanded(w, sequence)[first:].float()
        torch.testing.assert_close(ours[first:].cpu(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("net", ["native", "triton"])
def test_bfloat16_cache(net):
    """Queries and softmax weights may be rounded as the cache is."""
    sizes, steps = SIZES[0], [[Share(0, 40, 4), Share(1, 0, 3)]]
    weights = make(sizes, device=CPU if net != "triton" else DEVICE)
    sequences = draw([44, 3], weights.sizes)
    found, wanted = (
        run(made, sequences, steps, torch.bfloat16, known=(40,))
        for made in (NETS[net](weights), reference(make(sizes)))
    )
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("net", "dtype"),
    [
        pytest.param(
            net, dtype, marks=[pytest.mark.slow] if (net, dtype) == ("triton", torch.float32) else []
        )
        for net in NETS
        for dtype in DTYPES
    ],
)
def test_bits_do_not_depend_on_company_chunks_or_drafts(net, dtype):
    sizes, lengths = (3, 20, 8, 6, 12), [7, 2, 11]
    made = NETS[net](make(sizes, device=CPU if net != "triton" else DEVICE))
    sequences = draw(lengths, made[0].sizes)
    alone = [run(made, sequences, token_by_token(row, n), dtype)[row] for row, n in enumerate(lengths)]
    for seed in range(2):
        mixed = run(made, sequences, schedule(lengths, seed, max_drafts=4), dtype, seed=seed)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(mixed, alone, strict=True))


@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize("net", NETS)
def test_bits_over_several_splits(net):
    """The last tokens of a long context one by one, at once, and in the company of a longer row and a prompt. They
    pass the ends of a block, a page, a tile and a split."""
    made = NETS[net](make((3, 20, 8, 6, 12), device=CPU if net != "triton" else DEVICE))
    sequences = draw([199, 320, 9], made[0].sizes)
    ways = (
        [[Share(0, at, 1)] for at in range(187, 199)],
        [[Share(0, 187, 12)]],
        [[Share(2, 0, 9), Share(0, 187, 8, drafts=6, accept=4), Share(1, 317, 3)]],
        [[Share(0, 187, 7)], [Share(1, 317, 1), Share(0, 194, 5)]],
    )
    results = [run(made, sequences, steps, seed=i, known=(187, 317))[0] for i, steps in enumerate(ways)]
    assert results[0].isfinite().all() and results[0][187:].any(1).all()
    assert all(torch.equal(result, results[0]) for result in results[1:])
    wanted = expanded(make((3, 20, 8, 6, 12)), sequences[0])[187:].float()
    torch.testing.assert_close(results[0][187:].cpu(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("net", NETS)
def test_writing_leaves_what_attending_leaves(net, dtype):
    made = NETS[net](make((3, 20, 8, 6, 12), device=CPU if net != "triton" else DEVICE))
    (tokens,), left = draw([18], made[0].sizes), []
    for write in (False, True):
        cache = Pages([18], made[0].sizes, dtype, made[2])
        cache.call(made[0], tokens, [Share(0, 0, 18)], write=write)
        left.append(cache.latents.nan_to_num(7.0))
    assert torch.equal(*left)
