"""The native CPU kernels: against the reference ops in float64, and bit for bit the same in any company."""

import shutil
from dataclasses import replace

import pytest
import torch

from headlong.env import native_ops_wanted
from headlong.ops import native
from headlong.ops.delta_net.native import NativeDeltaNet
from headlong.ops.delta_net.reference import DeltaNetWeights, ReferenceDeltaNet
from headlong.ops.gated_attention.native import NativeGatedAttention
from headlong.ops.gated_attention.reference import GatedAttentionWeights, ReferenceGatedAttention
from headlong.ops.native_step import NativeStep
from headlong.ops.norm.native import NativeRmsNorm
from headlong.ops.norm.reference import RmsNorm
from headlong.ops.registry import choose_backend
from headlong.ops.rope.reference import Rotary, angles
from headlong.ops.silu_mul import native as native_silu_mul
from headlong.ops.silu_mul import reference as reference_silu_mul
from headlong.ops.silu_mul.activation import SILU
from headlong.types import Rows
from support import delta_states
from support.activations import CLAMPED, EXTREMES, OTHERS, check_clamped
from support.ragged import gather, plan_rows, scatter, schedule, token_by_token

CPU = torch.device("cpu")
MAX_DRAFTS, KERNEL, PAGE_SIZE = 8, 4, 16
LENGTHS = [37, 5, 20]
built = pytest.mark.skipif(native.library() is None, reason="native kernels are not built or are turned off")


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def delta_weights(key_heads, value_heads, key_dim, value_dim, dtype, *, tiled=False):
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return DeltaNetWeights(
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        randn(KERNEL, channels, seed=1).to(dtype),
        -randn(value_heads, seed=2).exp().to(dtype),
        randn(value_heads, seed=3).to(dtype),
        RmsNorm(randn(value_dim, seed=4).to(dtype), 1e-2),
        tiled,
    )


def run_delta(net, weights, sequences, steps):
    dtype = weights.rate.dtype
    slots, window = len(sequences) + 1, KERNEL - 1 + MAX_DRAFTS
    sizes = (weights.num_value_heads, weights.key_dim, weights.value_dim, MAX_DRAFTS)
    state = delta_states.zeros(slots, *sizes, dtype=dtype, device=CPU)
    state.drafts_SKHX.fill_(torch.nan)
    windows = torch.zeros(slots, window, weights.conv_channels, dtype=dtype)
    windows[:, KERNEL - 1 :] = torch.nan
    results = [torch.empty(len(s), sizes[0] * sizes[2], dtype=s.dtype) for s in sequences]
    generator = torch.Generator().manual_seed(0)
    for step in steps:
        rows = plan_rows(step)
        native_step = isinstance(net, NativeDeltaNet)
        plan = NativeStep.of(rows) if native_step else net.prepare(rows, KERNEL, window, CPU)
        scatter(step, net(gather(step, sequences, generator), state, windows, plan), results)
    return results


DELTA_SIZES = [(1, 1, 8, 8), (2, 4, 16, 24), (3, 3, 7, 5), (4, 8, 64, 64)]


def delta_sequences(sizes, dtype):
    key_heads, value_heads, key_dim, value_dim = sizes
    width = 2 * key_heads * key_dim + 2 * value_heads * value_dim + 2 * value_heads
    return [randn(n, width, seed=10 + i).to(dtype) for i, n in enumerate(LENGTHS)]


@built
@pytest.mark.parametrize("tiled", [False, True], ids=["grouped", "tiled"])
@pytest.mark.parametrize("sizes", DELTA_SIZES, ids=str)
def test_delta_net_is_the_reference(sizes, tiled):
    single, double = (delta_weights(*sizes, dtype, tiled=tiled) for dtype in (torch.float32, torch.float64))
    steps = list(schedule(LENGTHS, seed=1))
    found = run_delta(NativeDeltaNet(single), single, delta_sequences(sizes, torch.float32), steps)
    wanted = run_delta(ReferenceDeltaNet(double), double, delta_sequences(sizes, torch.float64), steps)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-4, atol=2e-5)


@built
@pytest.mark.parametrize("sizes", DELTA_SIZES, ids=str)
def test_delta_net_minds_its_own_business(sizes):
    weights = delta_weights(*sizes, torch.float32)
    sequences = delta_sequences(sizes, torch.float32)
    mixed = run_delta(NativeDeltaNet(weights), weights, sequences, schedule(LENGTHS, seed=2))
    for row, length in enumerate(LENGTHS):
        alone = run_delta(NativeDeltaNet(weights), weights, sequences, token_by_token(row, length))
        assert torch.equal(mixed[row], alone[row])


@pytest.mark.parametrize("sizes", [(2, 4, 16, 24), (3, 9, 7, 5)], ids=str)
@pytest.mark.parametrize("kind", [ReferenceDeltaNet, pytest.param(NativeDeltaNet, marks=built)])
def test_tiled_value_heads_are_the_grouped_ones_in_another_order(kind, sizes):
    """Value channels, gates, rates and biases moved, what comes out is moved alike, bit for bit."""
    key_heads, value_heads, key_dim, value_dim = sizes
    grouped, key_size = delta_weights(*sizes, torch.float32), 2 * key_heads * key_dim

    def moved(x, width):
        """The last dimension holds `width` numbers for each value head: from all of a key head side by side to one
        of each key head by turns."""
        return x.unflatten(-1, (key_heads, -1, width)).transpose(-3, -2).flatten(-3)

    tiled = replace(
        grouped,
        conv_TC=torch.cat(
            [grouped.conv_TC[:, :key_size], moved(grouped.conv_TC[:, key_size:], value_dim)], 1
        ),
        rate=moved(grouped.rate, 1),
        dt_bias=moved(grouped.dt_bias, 1),
        tiled=True,
    )
    widths = (value_dim, value_dim, 1, 1)
    split = [key_size, *(value_heads * width for width in widths)]
    sequences = delta_sequences(sizes, torch.float32)
    reordered = []
    for sequence in sequences:
        qk, *rest = sequence.split(split, dim=1)
        reordered.append(torch.cat([qk, *(moved(x, w) for x, w in zip(rest, widths, strict=True))], 1))
    steps = list(schedule(LENGTHS, seed=1))
    wanted = run_delta(kind(grouped), grouped, sequences, steps)
    found = run_delta(kind(tiled), tiled, reordered, steps)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, moved(theirs, value_dim))


ATTENTION_KINDS = {
    "gated": (True, True),
    "plain": (False, False),
    "normed": (False, True),
    "gates": (True, False),
}


def attention_weights(heads, kv_heads, head_dim, dtype, kind="gated"):
    gated, normed = ATTENTION_KINDS[kind]
    norm = RmsNorm(randn(heads + kv_heads, head_dim, seed=5).to(dtype), 1e-6) if normed else None
    return GatedAttentionWeights(heads, kv_heads, head_dim, norm, gated)


def run_attention(net, weights, sequences, steps, cache_dtype):
    heads, kv, dim = weights.num_heads, weights.num_kv_heads, weights.head_dim
    pages_each = 4
    shape = (1 + pages_each * len(sequences), kv, PAGE_SIZE, dim + -dim % 16)
    keys, values = (torch.full(shape, torch.nan, dtype=cache_dtype) for _ in range(2))
    rotary = Rotary.of(10000.0, 4, dim, CPU)
    results = [torch.empty(len(s), heads * dim, dtype=s.dtype) for s in sequences]
    generator = torch.Generator().manual_seed(0)
    for step in steps:
        rows = plan_rows(step)
        pages = torch.tensor([[1 + s.row * pages_each + p for p in range(pages_each)] for s in step])
        positions = torch.cat(
            [torch.arange(a, a + n) for a, n in zip(rows.starts, rows.query_lens, strict=True)]
        )
        rotation = angles(positions, rotary, torch.promote_types(sequences[0].dtype, torch.float32))
        plan = net.prepare(rows, pages, PAGE_SIZE)
        scatter(step, net(gather(step, sequences, generator), keys, values, rotation, plan), results)
    return results


ATTENTION_SIZES = [(1, 1, 8), (6, 2, 20), (4, 4, 16), (15, 3, 64)]


def attention_sequences(sizes, dtype, kind="gated"):
    heads, kv, dim = sizes
    width = (heads + kv + heads * ATTENTION_KINDS[kind][0] + kv) * dim
    return [randn(n, width, seed=20 + i).to(dtype) for i, n in enumerate(LENGTHS)]


@built
@pytest.mark.parametrize("kind", ATTENTION_KINDS)
@pytest.mark.parametrize("sizes", ATTENTION_SIZES, ids=str)
def test_attention_is_the_reference(sizes, kind):
    single, double = (attention_weights(*sizes, dtype, kind) for dtype in (torch.float32, torch.float64))
    steps = list(schedule(LENGTHS, seed=3))
    one, two = (
        attention_sequences(sizes, torch.float32, kind),
        attention_sequences(sizes, torch.float64, kind),
    )
    found = run_attention(NativeGatedAttention(single), single, one, steps, torch.float32)
    wanted = run_attention(ReferenceGatedAttention(double), double, two, steps, torch.float64)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


@built
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["gated", "plain"])
@pytest.mark.parametrize("sizes", ATTENTION_SIZES, ids=str)
def test_attention_minds_its_own_business(sizes, kind, dtype):
    """Whatever keys and values are kept in."""
    weights = attention_weights(*sizes, torch.float32, kind)
    sequences = attention_sequences(sizes, torch.float32, kind)
    mixed = run_attention(NativeGatedAttention(weights), weights, sequences, schedule(LENGTHS, seed=4), dtype)
    for row, length in enumerate(LENGTHS):
        steps = token_by_token(row, length)
        alone = run_attention(NativeGatedAttention(weights), weights, sequences, steps, dtype)
        assert torch.equal(mixed[row], alone[row])


@pytest.mark.parametrize("make", [pytest.param(NativeGatedAttention, marks=built), ReferenceGatedAttention])
@pytest.mark.parametrize("kind", ATTENTION_KINDS)
@pytest.mark.parametrize("sizes", ATTENTION_SIZES, ids=str)
def test_writing_leaves_what_attending_leaves(sizes, kind, make):
    weights = attention_weights(*sizes, torch.float32, kind)
    _, kv, dim = sizes
    (tokens, *_) = attention_sequences(sizes, torch.float32, kind)
    rotation = angles(torch.arange(len(tokens)), Rotary.of(10000.0, 4, dim, CPU), torch.float32)
    pages = torch.arange(1, 5)[None]
    left = []
    for act in ("__call__", "write"):
        net = make(weights)
        shape = (5, kv, PAGE_SIZE, dim + -dim % 16)
        keys, values = (torch.full(shape, 7.0) for _ in range(2))
        plan = net.prepare(Rows((1,), (0,), (len(tokens),), (0,), (0,)), pages, PAGE_SIZE)
        getattr(net, act)(tokens, keys, values, rotation, plan)
        assert not (keys == 7.0).all()
        left.append((keys, values))
    assert torch.equal(left[0][0], left[1][0]) and torch.equal(left[0][1], left[1][1])


@built
@pytest.mark.parametrize("size", [1, 7, 64, 385])
def test_norm_and_gate(size):
    norm = RmsNorm(randn(size, seed=6), 1e-6)
    x = randn(9, size, seed=7) * 10
    torch.testing.assert_close(NativeRmsNorm(norm)(x), norm(x), rtol=1e-5, atol=1e-6)
    gate_up = randn(9, 2 * size, seed=8) * 20
    for how in (SILU, CLAMPED, *OTHERS):
        whole = native_silu_mul.silu_mul(gate_up, how)
        torch.testing.assert_close(whole, reference_silu_mul.silu_mul(gate_up, how), rtol=1e-5, atol=1e-6)
        for row in range(9):
            assert torch.equal(native_silu_mul.silu_mul(gate_up[row : row + 1], how), whole[row : row + 1])


@built
def test_extremes_stay_finite_and_nan_stays_nan():
    out = native_silu_mul.silu_mul(EXTREMES)[0]
    torch.testing.assert_close(out[:5], torch.tensor([0.0, 0.0, 0.0, -1e6, 1e8]), rtol=1e-6, atol=1e-6)
    assert out[5].isnan()
    check_clamped(native_silu_mul.silu_mul(EXTREMES, CLAMPED)[0])


@pytest.mark.skipif(not native_ops_wanted(), reason="turned off by HEADLONG_NATIVE=0")
def test_native_kernels_have_torchs_threads_and_lend_them_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with native.threads_for_native:
            assert (torch.get_num_threads(), native.num_threads()) == (1, 2)
            with native.threads_for_native.lifted():
                assert (torch.get_num_threads(), native.num_threads()) == (2, 2)
            assert (torch.get_num_threads(), native.num_threads()) == (1, 2)
        with native.threads_for_native.lifted():
            assert torch.get_num_threads() == 2
        assert (torch.get_num_threads(), native.num_threads()) == (2, 2)
    finally:
        torch.set_num_threads(before)


def test_a_machine_with_a_compiler_has_the_kernels():
    """Or every test above would skip, and nobody would know that the source no longer compiles."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    assert compiler is None or native.library() is not None


def test_refusals_name_the_reason(monkeypatch):
    assert "float64" in str(native.refusal(torch.float64, CPU))
    assert "cuda" in str(native.refusal(torch.float32, torch.device("cuda")))
    monkeypatch.setattr(native, "library", lambda: None)
    assert native.refusal(torch.float32, CPU) == "are not built"
    assert choose_backend(torch.float32, CPU).name == "reference"
