"""Triton's kernels for DeepSeek-V4's layers: the references, bit for bit alike in company and however tokens come."""

from typing import Any

import pytest
import torch

from headlong.ops.compressed_attention.reference import ReferenceCompressedAttention
from headlong.ops.compressed_attention.weights import CompressedAttentionWeights
from headlong.ops.compressor.reference import ReferenceCompressor
from headlong.ops.compressor.weights import CompressorWeights
from headlong.ops.grouped_linear.rows import rows_of
from headlong.ops.hyper_connection.reference import ReferenceCollapse, ReferenceHyperConnection
from headlong.ops.hyper_connection.weights import HyperWeights, StreamSizes
from headlong.ops.indexer.reference import ReferenceIndexer
from headlong.ops.indexer.weights import IndexerSizes
from headlong.ops.linear.reference import ReferenceLinear
from headlong.ops.norm.normed import whole
from headlong.ops.norm.reference import RmsNorm
from headlong.ops.paged_attention.reference import prepare
from headlong.ops.rope.pairs import PairRope
from headlong.ops.rope.reference import Rotary, angles, frequencies_of
from headlong.quant.detect import detect
from headlong.quant.format import PackedWeight, Weight
from headlong.types import Rows
from support import deepseek_v4_files, packing
from support.steps import Driver, load

triton = pytest.importorskip("triton")
from headlong.ops import triton_step  # noqa: E402
from headlong.ops.compressed_attention import triton as compressed_attention  # noqa: E402
from headlong.ops.compressed_attention.triton import TritonCompressedAttention  # noqa: E402
from headlong.ops.compressor.triton import TritonCompressor  # noqa: E402
from headlong.ops.grouped_linear.triton import TritonGroupedLinear  # noqa: E402
from headlong.ops.hyper_connection.triton import TritonCollapse, TritonHyperConnection  # noqa: E402
from headlong.ops.indexer import triton as indexer  # noqa: E402
from headlong.ops.indexer.triton import TritonIndexer  # noqa: E402
from headlong.ops.triton_step import TritonStep  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
PAGE, HEADS, DIM, WINDOW = 16, 3, 20, 9
ROPE, FREQUENCIES = PairRope(2, 3), frequencies_of(160000.0, 6)
ROTARY = Rotary.beside([frequencies_of(10000.0, 4), FREQUENCIES], torch.device(DEVICE))
PAGES = [[3, 1, 4, 2, 5], [10, 7, 6, 8, 9]]


def step_of(kind, *rows: tuple[int, int, int]):
    """A step of rows (number, start, tokens), as a backend prepares it, and its angles. Row r has slot r + 1."""
    pages = torch.tensor([PAGES[row] for row, _, _ in rows], device=DEVICE)
    none = (0,) * len(rows)
    numbers, starts, counts = zip(*rows, strict=True)
    given = Rows(tuple(number + 1 for number in numbers), starts, counts, none, none)
    spans = zip(starts, counts, strict=True)
    positions = torch.cat([torch.arange(start, start + count) for start, count in spans]).to(DEVICE)
    make = TritonStep.of if kind == "triton" else prepare
    return make(given, pages, PAGE), angles(positions, ROTARY, torch.float32)


@pytest.fixture(autouse=True)
def short_steps(monkeypatch):
    """Steps sized for few positions: the interpreter's time is that of its programs."""
    monkeypatch.setattr(triton_step, "FEWEST_POSITIONS", 64)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def connection(size: int, *, collapses: bool = False) -> HyperWeights:
    sizes = StreamSizes(4, size, 1e-6, 1e-6, 20)
    mixes = 4 if collapses else 24
    scale = randn(1 if collapses else 3, seed=3).abs()
    return HyperWeights(sizes, randn(mixes, 4 * size, seed=1) / size**0.5, randn(mixes, seed=2), scale)


@pytest.mark.parametrize("size", [40, 1100])
def test_hyper_connections(size):
    weights = connection(size)
    made, true = (
        kind(weights, ReferenceLinear(weights.fn_MX))
        for kind in (TritonHyperConnection, ReferenceHyperConnection)
    )
    x, out = randn(3, 4, size, seed=4), randn(3, size, seed=5)
    (given, mix), (wanted, true_mix) = made(x, torch.clone), true(x, torch.clone)
    torch.testing.assert_close(given, wanted, **CLOSE)
    for found, expected in zip(mix, true_mix, strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(made.add(x, out, mix), true.add(x, out, true_mix), **CLOSE)
    alone, own = made(x[1:2], torch.clone)
    assert torch.equal(whole(alone)[0], whole(given)[1]) and torch.equal(own.comb_NSS[0], mix.comb_NSS[1])
    assert torch.equal(made.add(x[1:2], out[1:2], own)[0], made.add(x, out, mix)[1])


def test_the_collapse_and_one_embedding_for_all_streams():
    weights = connection(40, collapses=True)
    x = randn(3, 40, seed=4)[:, None].expand(-1, 4, -1)
    made, true = (
        kind(weights, ReferenceLinear(weights.fn_MX)) for kind in (TritonCollapse, ReferenceCollapse)
    )
    torch.testing.assert_close(made(x), true(x), **CLOSE)
    assert torch.equal(made(x[2:]), made(x)[2:])


def test_streams_that_are_no_power_of_two_are_left_to_the_reference():
    sizes = StreamSizes(3, 8, 1e-6, 1e-6, 20)
    assert "3 streams" in (TritonHyperConnection.supports(HyperWeights(sizes, *[torch.ones(1)] * 3)) or "")


CUTS = [
    [((0, 0, 48),)],
    [((0, n, 1),) for n in range(12)] + [((0, 12, 36),)],
    [((1, 0, 7), (0, 0, 13)), ((0, 13, 35), (1, 7, 2))],
]
"""One row's 48 tokens at once, the first ones one by one, and in company."""


@pytest.mark.parametrize(("ratio", "num_series"), [(4, 2), (20, 1)])
def test_a_compressor(ratio, num_series):
    """Entries are those of the reference, and the same bits however tokens come, over a state full of NaN."""
    width = 2 * num_series * DIM
    bias = randn(ratio, num_series * DIM, seed=2)
    norm = RmsNorm(1.0 + randn(DIM, seed=4), 1e-6)
    weights = CompressorWeights(ratio, DIM, num_series, bias, norm, ROPE, FREQUENCIES.to(DEVICE))
    given = [randn(48, width, seed=3), randn(9, width, seed=5)]

    def run(core, cuts):
        ring, entries = (
            torch.full(shape, torch.nan, device=DEVICE)
            for shape in ((3, weights.span + 2, width), (11, -(-PAGE // ratio), DIM))
        )
        for rows in cuts:
            step, turns = step_of(core.name, *rows)
            own = torch.cat([given[row][start : start + count] for row, start, count in rows])
            core(own, ring, entries, turns, step)
        ends = [((n + 1) * ratio - 1) for n in range(48 // ratio)]
        made = torch.stack([entries[PAGES[0][end // PAGE], end % PAGE // ratio] for end in ends])
        return made, ring[1]

    true, ring = run(ReferenceCompressor(weights), CUTS[0])
    first, own_ring = run(TritonCompressor(weights), CUTS[0])
    torch.testing.assert_close(first, true, **CLOSE)
    assert torch.equal(own_ring.nan_to_num(7.0), ring.nan_to_num(7.0))
    for cuts in CUTS[1:]:
        again, ring = run(TritonCompressor(weights), cuts)
        assert torch.equal(again, first) and torch.equal(ring[:, :1].isnan(), own_ring[:, :1].isnan())


def attention(ratio, on_pages=False):
    norm, sinks_H = RmsNorm(1.0 + randn(DIM, seed=9), 1e-6), randn(HEADS, seed=8)
    return CompressedAttentionWeights(HEADS, DIM, WINDOW, ratio, 1e-6, norm, sinks_H, ROPE, on_pages)


@pytest.mark.parametrize(
    ("ratio", "lists", "on_pages"), [(0, 0, False), (0, 0, True), (4, 0, False), (4, 5, False)]
)
def test_attention(monkeypatch, ratio, lists, on_pages):
    """Close to the reference, and the same bits however tokens come, over a window full of NaN; with so few keys in a
    split and at a time that there are several."""
    for name, value in {"SPLIT": 8, "KEYS": 4, "HEADS": 2}.items():
        monkeypatch.setattr(compressed_attention, name, value)
    queries, given = (
        [randn(n, size, seed=seed + n) for n in (48, 9)] for size, seed in ((HEADS * DIM, 0), (DIM, 1))
    )
    entries = randn(11, 4, DIM, seed=2) if ratio else None
    chosen = None
    if lists:
        chosen = [torch.full((n, lists), -1, device=DEVICE) for n in (48, 9)]
        for row, found in enumerate(chosen):
            for position in range(len(found)):
                ended = (position + 1) // ratio
                listed = torch.randperm(ended, generator=torch.Generator().manual_seed(position + row))[
                    :lists
                ]
                found[position, : len(listed)] = listed.sort().values

    def run(core, cuts):
        shape = (11, PAGE, 32) if on_pages else (3, WINDOW + 2, DIM)
        window, out = torch.full(shape, torch.nan, device=DEVICE), torch.empty(48, HEADS * DIM, device=DEVICE)
        for rows in cuts:
            step, turns = step_of(core.name, *rows)
            own = [
                None
                if parts is None
                else torch.cat([parts[row][start : start + n] for row, start, n in rows])
                for parts in (queries, given, chosen)
            ]
            found = core(own[0], own[1], window, entries, own[2], turns, step)
            for part, (row, start, n) in zip(found.split([n for _, _, n in rows]), rows, strict=True):
                if row == 0:
                    out[start : start + n] = part
        return out

    weights = attention(ratio, on_pages)
    true, first = (
        run(core(weights), CUTS[0]) for core in (ReferenceCompressedAttention, TritonCompressedAttention)
    )
    torch.testing.assert_close(first, true, **CLOSE)
    for cuts in CUTS[1:]:
        assert torch.equal(run(TritonCompressedAttention(weights), cuts), first)


def test_keys_alone():
    """What is written without attending is what attending writes."""
    weights, given = attention(0), randn(12, DIM, seed=1)
    step, turns = step_of("triton", (0, 0, 12))
    windows = [torch.full((3, WINDOW + 2, DIM), torch.nan, device=DEVICE) for _ in range(2)]
    core = TritonCompressedAttention(weights)
    core(randn(12, HEADS * DIM), given, windows[0], None, None, turns, step)
    core.write(given, windows[1], turns, step)
    assert torch.equal(windows[0].nan_to_num(7.0), windows[1].nan_to_num(7.0))


def test_the_indexer(monkeypatch):
    """The entries of the reference, ties to the earlier one, whoever else is there."""
    monkeypatch.setattr(indexer, "LISTED", 8)
    monkeypatch.setattr(indexer, "SCORED", 16)
    sizes = IndexerSizes(HEADS, DIM, 2, 5, ROPE)
    queries, gates, entries = randn(40, HEADS * DIM), randn(40, HEADS, seed=1), randn(11, 8, DIM, seed=2)
    entries[4, 2:5] = entries[4, 1]  # whose scores are equal
    gates[30:] = 0.0  # and all of them
    step, turns = step_of("reference", (0, 0, 40))
    wanted = ReferenceIndexer(sizes)(queries, gates, entries, turns, step)
    core = TritonIndexer(sizes)
    step, turns = step_of("triton", (0, 0, 40))
    found = core(queries, gates, entries, turns, step)
    assert found.long().tolist() == wanted.tolist()
    step, turns = step_of("triton", (1, 3, 2), (0, 27, 1))
    company = torch.cat([randn(2, HEADS * DIM, seed=8), queries[27:28]]), torch.cat([gates[:2], gates[27:28]])
    assert torch.equal(core(*company, entries, turns, step)[2], found[27])


def test_while_there_are_few_entries_all_are_listed():
    sizes = IndexerSizes(HEADS, DIM, 4, 64, ROPE)
    step, turns = step_of("triton", (0, 0, 9))
    found = TritonIndexer(sizes)(randn(9, HEADS * DIM), randn(9, HEADS), randn(11, 4, DIM), turns, step)
    assert found[:, :3].tolist() == [[-1] * 3] * 3 + [[0, -1, -1]] * 4 + [[0, 1, -1]] * 2
    assert found.shape == (9, 16) and bool((found[:, 3:] == -1).all())


def packed_rows(weight: PackedWeight, groups: int) -> list[PackedWeight]:
    return [group for group in rows_of(weight, groups) if isinstance(group, PackedWeight)]


@pytest.mark.parametrize(
    "how", ["fp8_powers", "fp8_channel", "mxfp4_deepseek", "nvfp4_modelopt", "int8_channel"]
)
def test_groups_of_packed_rows(how):
    """Rows of a weight are a weight of the same format where they can be cut there, and what it says they are."""
    parts = packing.pack(randn(256, 64).cpu(), how)
    weight = detect(packing.header(parts), (256, 64), {}).pack(parts, (256, 64))
    groups = packed_rows(weight, 2)
    assert [type(group) is type(weight) for group in groups] == [how != "int8_channel"] * 2
    assert torch.equal(torch.cat([group.dequantize(0, 128) for group in groups]), weight.dequantize(0, 256))
    small = packed_rows(weight, 8)
    assert torch.equal(torch.cat([group.dequantize(0, 32) for group in small]), weight.dequantize(0, 256))


@pytest.mark.parametrize("how", ["float", "fp8_powers", "nvfp4_modelopt"])
def test_groups_in_one_product(how):
    """The products of all groups are those of each with its own inputs, whoever else is there."""
    given, groups, outs, ins = randn(3, 4 * 128, seed=1), 4, 4 * 64, 128
    weight: Weight = randn(outs, ins).cpu()
    if how != "float":
        parts = packing.pack(weight, how)
        weight = detect(packing.header(parts), (outs, ins), {}).pack(parts, (outs, ins))
    linear = TritonGroupedLinear.load(weight, groups, torch.float32)
    assert linear is not None and TritonGroupedLinear.load(weight, 8, torch.float32) is None
    true = weight if isinstance(weight, torch.Tensor) else weight.dequantize(0, outs)
    wanted = torch.einsum("ngi,goi->ngo", given.unflatten(1, (groups, -1)), true.unflatten(0, (groups, -1)))
    found = linear(given)
    torch.testing.assert_close(found, wanted.flatten(1), rtol=1e-4, atol=1e-4)
    assert torch.equal(linear(given[1:2])[0], found[1])


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="the driver works on the CPU")
def test_a_whole_model(tmp_path, monkeypatch):
    """What the reference says of a prompt and then of one more token; and no part is left to it."""
    sizes = {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128, 0]}
    folder = deepseek_v4_files.make((), **sizes).write_meant(tmp_path)
    monkeypatch.setenv("HEADLONG_NATIVE", "0")
    found = {}
    for wanted in ("interpret", "0"):
        monkeypatch.setenv("HEADLONG_TRITON", wanted)
        built = load(folder)
        assert not getattr(built.ops, "foreign", [])
        driver = Driver(built)
        driver.open("a", [3, 7, 1, 9, 4, 4, 8, 2, 5, 6, 11])
        found[wanted] = [driver.feed("a", [count]).logits for count in (8, 2)]
    for ours, true in zip(*found.values(), strict=True):
        torch.testing.assert_close(ours, true, atol=1e-4, rtol=1e-4)
