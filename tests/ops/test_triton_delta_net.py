"""The DeltaNet core in Triton: the reference step by step, and bit for bit alike however rows are cut."""

from dataclasses import replace

import pytest
import torch
from test_native import KERNEL, delta_weights, randn

from headlong.ops.delta_net.reference import ReferenceDeltaNet
from headlong.ops.norm.reference import RmsNorm
from headlong.ops.triton_step import TritonStep
from support.ragged import Share, gather, plan_rows, scatter, schedule, token_by_token

triton = pytest.importorskip("triton")
from headlong.ops.delta_net import triton as op  # noqa: E402
from headlong.ops.delta_net.triton import TritonDeltaNet  # noqa: E402
from support import delta_states  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
SIZES = [(1, 1, 8, 8), (2, 2, 7, 5), (1, 2, 16, 24)]  # key heads, value heads, key size, value size
SIZES += [(2, 4, 20, 40), (4, 8, 64, 64), (16, 48, 128, 128)] if ON_GPU else []
# The interpreter takes its time over every token.
LENGTHS = [57, 5, 31] if ON_GPU else [8, 2, 4]
MAX_DRAFTS, MAX_CHUNK = (8, 9) if ON_GPU else (3, 3)
SEEDS = range(4) if ON_GPU else range(1)
CLOSE = {"rtol": 2e-5, "atol": 1e-5}
PAST = KERNEL - 1
WINDOW = PAST + MAX_DRAFTS


def on_device(sizes, **options):
    weights = delta_weights(*sizes, torch.float32, **options)
    norm = RmsNorm(weights.norm.weight, 1.0)
    norm.weight, norm.eps = weights.norm.weight.to(DEVICE), weights.norm.eps.to(DEVICE)
    moved = {name: getattr(weights, name).to(DEVICE) for name in ("conv_TC", "rate", "dt_bias")}
    return replace(weights, norm=norm, **moved)


def draw_sequences(sizes):
    """One for each row."""
    key_heads, value_heads, key_dim, value_dim = sizes
    width = 2 * key_heads * key_dim + 2 * value_heads * value_dim + 2 * value_heads
    return [randn(n, width, seed=10 + i) for i, n in enumerate(LENGTHS)]


def draw_steps(seed):
    return list(schedule(LENGTHS, seed, MAX_CHUNK, MAX_DRAFTS))


def fresh_state(weights, num_rows):
    """Slots 1 to num_rows are empty; what is not to be read, slots 0 and the last among it, is no number."""
    sizes = (weights.num_value_heads, weights.key_dim, weights.value_dim, MAX_DRAFTS)
    state = delta_states.zeros(num_rows + 2, *sizes, device=DEVICE)
    state.drafts_SKHX.fill_(torch.nan)
    windows = torch.full((num_rows + 2, WINDOW, weights.conv_channels), torch.nan, device=DEVICE)
    state.committed_SHDE[[0, -1]] = torch.nan
    windows[1:-1, :PAST] = 0.0
    return state, windows


def plan(net, rows, window=WINDOW):
    if isinstance(net, TritonDeltaNet):
        return TritonStep.of(rows, torch.zeros(len(rows.slots), 1, device=DEVICE, dtype=torch.long), 16)
    return net.prepare(rows, KERNEL, window, DEVICE)


def run(net, sequences, steps, each=None):
    """Outputs per row, and the state; `each` is called with every step and what it left."""
    state, windows = fresh_state(net.weights, len(sequences))
    out_features = net.weights.num_value_heads * net.weights.value_dim
    results = [torch.full((len(s), out_features), torch.nan) for s in sequences]
    generator = torch.Generator().manual_seed(0)
    for step in steps:
        projected = gather(step, sequences, generator).to(DEVICE)
        flat = net(projected, state, windows, plan(net, plan_rows(step)))
        scatter(step, flat.cpu(), results)
        if each is not None:
            each(step, flat, state, windows)
    return results, state, windows


def snapshots(net, sequences, steps):
    """After every step: what came out, rejected drafts too, and all of the state that is read later."""
    found = []

    def keep(step, flat, state, windows):
        found.append(flat.clone())
        for share in step:
            slot = share.row + 1
            found.append(state.committed_SHDE[slot].clone())
            found.append(state.drafts_SKHX[slot, : share.drafts].clone())
            found.append(windows[slot, : PAST + share.drafts].clone())

    run(net, sequences, steps, keep)
    return found


class Watched:
    """A kernel, and a list of the grids it was launched with."""

    def __init__(self, kernel, launched):
        self.kernel, self.launched = kernel, launched

    def __getitem__(self, grid):
        self.launched.append(grid)
        return self.kernel[grid]


CASES = [(sizes, False) for sizes in SIZES] + [((2, 4, 8, 4), True)]


@pytest.mark.parametrize(("sizes", "tiled"), CASES, ids=str)
def test_every_step_is_the_reference(sizes, tiled):
    weights, sequences, steps = on_device(sizes, tiled=tiled), draw_sequences(sizes), draw_steps(seed=1)
    assert any(share.replay for step in steps for share in step)
    found = snapshots(TritonDeltaNet(weights), sequences, steps)
    wanted = snapshots(ReferenceDeltaNet(weights), sequences, steps)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_bits_do_not_depend_on_company_chunks_or_drafts(sizes):
    net, sequences = TritonDeltaNet(on_device(sizes)), draw_sequences(sizes)
    alone = [run(net, sequences, token_by_token(row, n))[0][row] for row, n in enumerate(LENGTHS)]
    for seed in SEEDS:
        results, state, windows = run(net, sequences, draw_steps(seed))
        assert all(torch.equal(a, b) for a, b in zip(results, alone, strict=True))
        for slot in (0, -1):
            assert state.committed_SHDE[slot].isnan().all() and state.drafts_SKHX[slot].isnan().all()
            assert windows[slot].isnan().all()


@pytest.mark.parametrize(("sizes", "tiled"), [((1, 2, 8, 12), False), *CASES[3:]], ids=str)
def test_few_and_many_tokens_run_by_different_kernels_to_the_same_bits(monkeypatch, sizes, tiled):
    net, sequences = TritonDeltaNet(on_device(sizes, tiled=tiled)), draw_sequences(sizes)
    steps = draw_steps(seed=8)
    assert any(share.replay and share.drafts for step in steps for share in step)
    launched, found = [], []
    monkeypatch.setattr(op.kernels, "token_inputs_kernel", Watched(op.kernels.token_inputs_kernel, launched))
    for few in (0, 10**6):
        monkeypatch.setattr(op, "FEW_TOKENS", few)
        monkeypatch.setattr(op, "FEW_OF_A_ROW", few)
        launched.clear()
        found.append(snapshots(net, sequences, steps))
        assert len(launched) == (0 if few else len(steps))
    assert all(torch.equal(many, few) for many, few in zip(*found, strict=True))


def test_rows_change_kernels_as_company_comes_and_goes(monkeypatch):
    """Some steps are of few tokens, some of many; their rows' bits are those of every token alone."""
    net, sequences = TritonDeltaNet(on_device(SIZES[-1])), draw_sequences(SIZES[-1])
    steps = draw_steps(seed=1)
    counts = [sum(share.certain + share.drafts for share in step) for step in steps]
    limit = sorted(counts)[len(counts) // 2]
    assert min(counts) <= limit < max(counts)
    alone = [run(net, sequences, token_by_token(row, n))[0][row] for row, n in enumerate(LENGTHS)]
    monkeypatch.setattr(op, "FEW_TOKENS", limit)
    monkeypatch.setattr(op, "FEW_OF_A_ROW", limit)
    assert all(torch.equal(a, b) for a, b in zip(run(net, sequences, steps)[0], alone, strict=True))


def test_no_room_for_drafts():
    """A state that keeps none: what is kept is the window alone."""
    sizes = (1, 2, 8, 12)
    weights, (sequence, *_) = on_device(sizes), draw_sequences(sizes)
    results = []
    for net in (TritonDeltaNet(weights), ReferenceDeltaNet(weights)):
        state = delta_states.zeros(2, 2, 8, 12, 0, device=DEVICE)
        windows = torch.zeros(2, PAST, weights.conv_channels, device=DEVICE)
        for start, end in ((0, 2), (2, 3), (3, 8)):
            step = plan_rows([Share(0, start, end - start)])
            results.append(net(sequence[start:end].to(DEVICE), state, windows, plan(net, step, PAST)))
        results += [state.committed_SHDE[1], windows[1]]
    half = len(results) // 2
    for ours, theirs in zip(results[:half], results[half:], strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_one_pass_of_a_whole_prompt():
    sizes = SIZES[-1]
    net, sequences = TritonDeltaNet(on_device(sizes)), draw_sequences(sizes)
    whole = run(net, sequences, [[Share(row, 0, n) for row, n in enumerate(LENGTHS)]])
    apart = run(net, sequences, [[Share(row, t, 1)] for row, n in enumerate(LENGTHS) for t in range(n)])
    assert all(torch.equal(a, b) for a, b in zip(whole[0], apart[0], strict=True))
    assert torch.equal(whole[1].committed_SHDE[1:-1], apart[1].committed_SHDE[1:-1])
    assert torch.equal(whole[2][1:-1, :PAST], apart[2][1:-1, :PAST])


@pytest.mark.parametrize("sizes", [(1, 2, 32, 16), *SIZES[5:]], ids=str)
def test_prompts_have_the_same_bits_however_programs_are_cut(monkeypatch, sizes):
    """Fewer columns to a program and several tokens to a turn, or not."""
    sequence, steps = draw_sequences(sizes)[0][:6], [[Share(0, 0, 4)], [Share(0, 4, 1)]]
    ways = [{"schedulers": 10**6}, {"schedulers": 0}, {"MANY_OF_A_ROW": 10**6}]
    found = []
    for way in ways:
        net = TritonDeltaNet(on_device(sizes))
        monkeypatch.setattr(op, "MANY_OF_A_ROW", way.get("MANY_OF_A_ROW", 3))
        net.schedulers = way.get("schedulers", 0)
        found.append((net.tile(4, 1), snapshots(net, [sequence], steps)))
    assert [(tile["COLUMNS"], tile["AT_ONCE"]) for tile, _ in found] == [(8, 4), (16, 4), (16, 1)]
    for _, snapshot in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(snapshot, found[0][1], strict=True))


@pytest.mark.parametrize("sizes", SIZES[2:], ids=str)
def test_rejected_drafts_leave_memory_and_window_as_they_were(sizes):
    """Drafts of which nothing stands, or none at all: the next step cannot tell them apart."""
    net, sequences, length = TritonDeltaNet(on_device(sizes)), draw_sequences(sizes), LENGTHS[0]
    drafted = [[Share(0, t, 1, drafts=t % (MAX_DRAFTS + 1))] for t in range(length)]
    found, wanted = (run(net, sequences, steps) for steps in (drafted, token_by_token(0, length)))
    assert torch.equal(found[0][0], wanted[0][0])
    assert torch.equal(found[1].committed_SHDE[1], wanted[1].committed_SHDE[1])
    assert torch.equal(found[2][1, :PAST], wanted[2][1, :PAST])


def test_weights_may_be_narrow():
    sizes, steps = (1, 2, 8, 4), draw_steps(seed=5)
    wide, sequences = on_device(sizes), draw_sequences(sizes)
    narrow = {name: getattr(wide, name).bfloat16() for name in ("conv_TC", "rate", "dt_bias")}
    rounded = replace(wide, **{name: tensor.float() for name, tensor in narrow.items()})
    found = run(TritonDeltaNet(replace(wide, **narrow)), sequences, steps)[0]
    wanted = run(ReferenceDeltaNet(rounded), sequences, steps)[0]
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_extreme_gates():
    """Memory that fades at once, memory that never does, and gates that are shut."""
    sizes = (1, 2, 8, 8)
    weights, sequences = on_device(sizes), draw_sequences(sizes)
    for sequence in sequences:
        sequence[1::5, -4:] = 200.0
        sequence[2::5, -4:] = -200.0
        sequence[3::5, -2:] = -17.0
    found, wanted = (
        run(kind(weights), sequences, draw_steps(3))[0] for kind in (TritonDeltaNet, ReferenceDeltaNet)
    )
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)
