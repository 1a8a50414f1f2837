"""The ops of DeepSeek-V4's layers by themselves: what sums and choices are, and that bits are a token's own."""

import pytest
import torch

from headlong.ops.compressed_attention.reference import ReferenceCompressedAttention
from headlong.ops.compressed_attention.weights import CompressedAttentionWeights
from headlong.ops.compressor.reference import ReferenceCompressor
from headlong.ops.compressor.weights import CompressorWeights
from headlong.ops.grouped_linear.rows import rows_of
from headlong.ops.hyper_connection.native import NativeHyperConnection
from headlong.ops.hyper_connection.reference import ReferenceHyperConnection, doubly_stochastic
from headlong.ops.hyper_connection.weights import HyperWeights, StreamSizes
from headlong.ops.indexer.reference import ReferenceIndexer
from headlong.ops.indexer.weights import IndexerSizes
from headlong.ops.linear.reference import ReferenceLinear
from headlong.ops.norm.reference import RmsNorm
from headlong.ops.ordered_sum import halving_sum, sum_in_order
from headlong.ops.paged_attention.reference import prepare
from headlong.ops.rope.pairs import PairRope, fixed_turn, turn_of, turned
from headlong.ops.rope.reference import Rotary, angles, frequencies_of
from headlong.quant import rtn
from headlong.quant.format import PackedWeight
from headlong.types import Rows

PAGE, HEADS, DIM, RATIO, WINDOW = 16, 3, 20, 4, 9
ROPE, FREQUENCIES = PairRope(2, 3), frequencies_of(160000.0, 6)
ROTARY = Rotary.beside([frequencies_of(10000.0, 4), FREQUENCIES], torch.device("cpu"))


def step_of(start: int, count: int, slot: int = 1):
    """One row's step on pages 3, 1, 4, …, with its angles."""
    pages = torch.tensor([[3, 1, 4, 2, 5]])
    step = prepare(Rows((slot,), (start,), (count,), (0,), (0,)), pages, PAGE)
    return step, angles(torch.arange(start, start + count), ROTARY, torch.float32)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_pairs_are_turned_as_complex_numbers():
    _, found = step_of(5, 4)
    turn, x = turn_of(found, ROPE), random(4, 2, DIM)
    wanted = x[..., -6:].double().unflatten(-1, (3, 2)).contiguous()
    phase = torch.arange(5, 9, dtype=torch.float64)[:, None, None] * FREQUENCIES.double()
    wanted = torch.view_as_real(torch.view_as_complex(wanted) * torch.polar(torch.ones_like(phase), phase))
    there = turned(x, turn)
    torch.testing.assert_close(there[..., -6:].double(), wanted.flatten(-2), atol=1e-6, rtol=0.0)
    assert torch.equal(there[..., :-6], x[..., :-6])
    torch.testing.assert_close(turned(there, turn.back()), x, atol=1e-6, rtol=0.0)
    _, before = step_of(2, 4)
    earlier = turn.earlier(fixed_turn(3, FREQUENCIES))
    for part, other in zip(earlier, turn_of(before, ROPE), strict=True):
        torch.testing.assert_close(part, other, atol=1e-6, rtol=0.0)


@pytest.mark.parametrize("count", [1, 2, 5, 8, 13])
def test_sums_in_a_fixed_order(count):
    x = random(3, count, 7)
    for found in (halving_sum(x, 1), sum_in_order(x, 1)):
        torch.testing.assert_close(found, x.sum(1), atol=1e-5, rtol=0.0)
    longer = torch.cat([x, torch.zeros(3, 4, 7)], 1)
    assert torch.equal(sum_in_order(longer, 1), sum_in_order(x, 1))
    assert torch.equal(halving_sum(x[1:2], 1), halving_sum(x, 1)[1:2])


@pytest.mark.parametrize("num_series", [1, 2])
@pytest.mark.parametrize("cuts", [[48], [1] * 48, [3, 9, 4, 17, 15]])
def test_entries_are_weighted_sums_of_their_tokens(num_series, cuts):
    """However tokens come, over a state full of NaN."""
    width = 2 * num_series * DIM
    weights = CompressorWeights(
        RATIO, DIM, num_series, random(RATIO, num_series * DIM, seed=2), RmsNorm(torch.ones(DIM), 1e-6),
        ROPE, FREQUENCIES,
    )  # fmt: skip
    core, given = ReferenceCompressor(weights), random(48, width, seed=3)
    ring, entries = (torch.full(shape, torch.nan) for shape in ((3, weights.span, width), (6, 4, DIM)))
    start = 0
    for count in cuts:
        step, turns = step_of(start, count)
        core(given[start : start + count], ring, entries, turns, step)
        start += count
    values, gates = given.view(48, 2, num_series, DIM).unbind(1)
    gates = gates + weights.bias_JX.view(RATIO, num_series, DIM).repeat(12, 1, 1)
    for entry in range(12):
        own = slice(entry * RATIO, (entry + 1) * RATIO)
        parts = [(values[own, -1], gates[own, -1])]
        if num_series == 2 and entry:
            before = slice((entry - 1) * RATIO, entry * RATIO)
            parts.insert(0, (values[before, 0], gates[before, 0]))
        value, gate = (torch.cat(each) for each in zip(*parts, strict=True))
        made = weights.norm((gate.softmax(0) * value).sum(0, keepdim=True))
        _, turns = step_of(entry * RATIO, 1)
        wanted = turned(made, turn_of(turns, ROPE))[0]
        page = [3, 1, 4, 2, 5][(own.stop - 1) // PAGE]
        torch.testing.assert_close(entries[page, entry % 4], wanted, atol=1e-5, rtol=0.0)


def indexed(queries, gates, entries, start, count, top_k=3):
    core = ReferenceIndexer(IndexerSizes(HEADS, DIM, RATIO, top_k, ROPE))
    step, turns = step_of(start, count)
    return core(queries, gates, entries, turns, step)


def test_the_best_entries_are_chosen_ascending():
    queries, gates, entries = random(6, HEADS * DIM), random(6, HEADS, seed=1), random(6, 4, DIM, seed=2)
    found = indexed(queries, gates, entries, 40, 6)
    flat = entries[[3, 1, 4, 2, 5]].flatten(0, 1)
    for token, position in enumerate(range(40, 46)):
        _, turns = step_of(position, 1)
        q = turned(queries[token].view(1, HEADS, DIM), turn_of(turns, ROPE))[0]
        scores = (gates[token] @ (q @ flat.T).relu())[: (position + 1) // RATIO]
        best = scores.sort(descending=True, stable=True).indices[:3]
        assert found[token].tolist() == sorted(best.tolist())
        alone = indexed(queries[token][None], gates[token][None], entries, position, 1)
        assert torch.equal(alone[0], found[token])


def test_of_equal_scores_the_earlier_entry_is_chosen():
    entries = random(1, 1, DIM).expand(6, 4, DIM).contiguous()
    entries[:, :, -6:] = 0.0
    found = indexed(random(9, HEADS * DIM), torch.ones(9, HEADS), entries, 12, 9)
    assert found.tolist() == [[0, 1, 2]] * 9
    few = indexed(random(9, HEADS * DIM), torch.ones(9, HEADS), entries, 2, 9)
    assert few.tolist() == [[-1] * 2, *[[0, -1]] * 4, *[[0, 1]] * 4]


def attention(ratio=RATIO, on_pages=False):
    norm, sinks_H = RmsNorm(1.0 + random(DIM, seed=9), 1e-6), random(HEADS, seed=8)
    return ReferenceCompressedAttention(
        CompressedAttentionWeights(HEADS, DIM, WINDOW, ratio, 1e-6, norm, sinks_H, ROPE, on_pages)
    )


def attended(core, queries, given, entries, chosen, cuts):
    """A row's tokens in so many steps, over a window full of NaN."""
    shape = (6, PAGE, 32) if core.weights.on_pages else (3, WINDOW + 1, DIM)
    window, found, start = torch.full(shape, torch.nan), [], 0
    for count in cuts:
        own = slice(start, start + count)
        step, turns = step_of(start, count)
        picked = None if chosen is None else chosen[own]
        found.append(core(queries[own], given[own], window, entries, picked, turns, step))
        start += count
    return torch.cat(found)


@pytest.mark.parametrize("chosen", [False, True])
def test_attention_is_softmax_over_window_entries_and_a_sink(chosen):
    core, count = attention(), 40
    queries, given, entries = (
        random(count, HEADS * DIM),
        random(count, DIM, seed=1),
        random(6, 4, DIM, seed=2),
    )
    lists = None
    if chosen:
        lists = torch.full((count, 2), -1)
        for position in range(count):
            ended = (position + 1) // RATIO
            lists[position, : min(2, ended)] = torch.tensor([0, ended - 1][: min(2, ended)])
    found = attended(core, queries, given, entries, lists, [count])
    _, turns = step_of(0, count)
    turn, flat = turn_of(turns, ROPE), entries[[3, 1, 4, 2, 5]].flatten(0, 1)
    keys = turned(core.weights.norm(given), turn)
    plain = RmsNorm(torch.ones(DIM), 1e-6)(queries.view(count, HEADS, DIM))
    q = turned(plain, turn) * DIM**-0.5
    for n in range(count):
        numbers = range((n + 1) // RATIO) if lists is None else {i for i in lists[n].tolist() if i >= 0}
        k = torch.cat([keys[max(0, n + 1 - WINDOW) : n + 1], flat[list(numbers)]])
        weights = torch.cat([q[n] @ k.T, core.weights.sinks_H[:, None]], 1).softmax(-1)[:, :-1]
        out = turned((weights @ k)[None], turn.back().of(torch.tensor([n])))
        torch.testing.assert_close(found[n], out.flatten(), atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("ratio", [0, RATIO])
@pytest.mark.parametrize("cuts", [[1] * 40, [7, 1, 1, 20, 11]])
def test_bits_do_not_depend_on_cuts(ratio, cuts):
    queries, given = random(40, HEADS * DIM), random(40, DIM, seed=1)
    entries = random(6, 4, DIM, seed=2) if ratio else None
    wanted = attended(attention(ratio), queries, given, entries, None, [40])
    assert torch.equal(attended(attention(ratio), queries, given, entries, None, cuts), wanted)
    if not ratio:
        on_pages = attention(ratio, on_pages=True)
        assert torch.equal(attended(on_pages, queries, given, None, None, cuts), wanted)


def test_streams_are_mixed_doubly_stochastically():
    sizes = StreamSizes(4, 8, 1e-6, 1e-6, 20)
    comb = random(5, 4, 4)
    found = doubly_stochastic(comb, sizes)
    for dim in (1, 2):
        torch.testing.assert_close(found.sum(dim), torch.ones(5, 4), atol=1e-3, rtol=0.0)
    assert torch.equal(doubly_stochastic(comb[2:3], sizes)[0], found[2])


def test_rows_of_a_packed_weight_are_its_own():
    format, parts = rtn.quantize(random(12, 32), "int8")
    whole = format.pack(parts, (12, 32))
    groups = [group for group in rows_of(whole, 3) if isinstance(group, PackedWeight)]
    assert torch.equal(torch.cat([group.dequantize(0, 4) for group in groups]), whole.dequantize(0, 12))
    assert torch.equal(groups[2].dequantize_rows(torch.tensor([3, 0])), whole.dequantize(0, 12)[[11, 8]])
    assert groups[1].grouping() == whole.grouping()
    assert torch.equal(groups[1].grouped(1, 3).codes_RD, whole.grouped(5, 7).codes_RD)


@pytest.mark.parametrize(("streams", "iterations"), [(4, 20), (3, 1), (2, 7)])
def test_native_mixes_are_the_references(streams, iterations):
    """To rounding; and a token's bits are its own."""
    width = (2 + streams) * streams
    sizes = StreamSizes(streams, 8, 1e-6, 1e-6, iterations)
    weights = HyperWeights(sizes, random(width, 8 * streams), random(width, seed=1), random(3, seed=2))
    fn = ReferenceLinear(weights.fn_MX)
    native, reference = NativeHyperConnection(weights, fn), ReferenceHyperConnection(weights, fn)
    raw_NM = 3.0 * random(70, width, seed=3)
    found = native.mixes(raw_NM)
    for mine, wanted, alone in zip(found, reference.mixes(raw_NM), native.mixes(raw_NM[41:42]), strict=True):
        torch.testing.assert_close(mine, wanted, atol=2e-6, rtol=1e-5)
        assert torch.equal(mine[41:42], alone)
