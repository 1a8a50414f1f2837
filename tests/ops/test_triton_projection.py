"""A layer's first product in two: the parts are those of the whole, and cores that add partial sums give the same
bits."""

import pytest
import torch
from test_triton_attention import make, true_bfloat16  # noqa: F401
from test_triton_attention import run as attend
from test_triton_delta_net import draw_sequences, draw_steps, on_device
from test_triton_delta_net import run as mix
from test_triton_linear import DEVICE, split_up, tokens, weight_of

from headlong.ops.delta_net.triton import TritonDeltaNet
from headlong.ops.gated_attention.triton import TritonGatedAttention
from headlong.ops.linear.triton import TritonLinear
from headlong.ops.linear.triton_projection import GivenProjected, TritonProjected, TritonProjection, parts_of
from headlong.ops.linear.triton_split_k import BLOCK, PartialSums, epilogue_kernel
from headlong.ops.linear.triton_weight import GemmWeight
from headlong.ops.norm.triton import norm_args, partial_norm_args
from support.ragged import Share

STACKS = {
    "one": ["bfloat16"],
    "one kind": ["bfloat16", "bfloat16"],
    "scaled blocks": ["fp8_block", "fp8_block"],
    "whole numbers": ["int4_asym", "int4_asym"],
    "nvfp4": ["nvfp4_modelopt", "nvfp4_modelopt"],
    "several kinds": ["fp8_channel", "bfloat16", "fp8_channel"],
}
OUTS, INS = 128, 130


def stack(kinds):
    return [weight_of(kind, (OUTS, INS)) for kind in kinds]


def added(sums: PartialSums) -> torch.Tensor:
    """By a kernel's own way."""
    partials = sums.partials_PNO
    _, num_tokens, num_outs = partials.shape if partials.ndim == 3 else (1, *partials.shape)
    out = torch.empty(num_tokens, num_outs, device=DEVICE)
    epilogue_kernel[-(-num_outs // BLOCK), num_tokens](
        sums.partials_PNO,
        None,
        None,
        None,
        out,
        num_outs,
        *partial_norm_args(None, None),
        **sums.args,
        BLOCK=BLOCK,
    )
    return out


@pytest.mark.parametrize("reordered", [False, True], ids=["in order", "reordered"])
@pytest.mark.parametrize("kinds", STACKS.values(), ids=STACKS)
def test_rows_may_be_left_out(kinds, reordered):
    total, generator = OUTS * len(kinds), torch.Generator().manual_seed(2)
    order = torch.randperm(total, generator=generator) if reordered else torch.arange(total)
    order, x = order[30 : total - 7], tokens(3, INS)
    multiply, whole = TritonLinear(stack(kinds), order), TritonLinear(stack(kinds))
    assert multiply.out_features == len(order)
    torch.testing.assert_close(multiply(x), whole(x)[:, order.to(DEVICE)], rtol=1e-5, atol=1e-4)


def test_a_weight_that_is_left_out_is_not_there():
    """Nor does it cost a launch of its own, though it is of another kind."""
    multiply = TritonLinear(stack(["bfloat16", "fp8_block"]), torch.arange(OUTS))
    assert len(multiply.weights) == 1 and multiply.weights[0].num_outs == OUTS


def test_blocks_of_scales_stay_where_whole_ones_are_left_out():
    weight = weight_of("fp8_block", (512, INS))
    assert TritonLinear([weight], torch.arange(128, 512)).weights[0].layout.scale_rows == 128
    assert TritonLinear([weight], torch.arange(64, 512)).weights[0].layout.scale_rows == 1


def test_parts_of_floats_do_not_hold_the_others():
    """A whole weight in order stays where it is; a view of a part would keep all of it in memory."""
    weight = weight_of("bfloat16", (OUTS, INS))
    (whole,), (part,) = (TritonLinear([weight], torch.arange(n)).weights for n in (OUTS, 96))
    assert whole.codes.data_ptr() == weight.data_ptr()
    assert part.codes.untyped_storage().nbytes() == part.codes.nbytes


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kinds", STACKS.values(), ids=STACKS)
def test_both_parts_are_the_whole(kinds, biased):
    total, x = OUTS * len(kinds), tokens(3, INS)
    order = torch.arange(total).roll(9)
    bias = torch.linspace(-1, 1, total, device=DEVICE) if biased else None
    gates = slice(40, total - 20)
    expected = GivenProjected(TritonLinear(stack(kinds), order, bias)(x), gates)
    found = TritonProjection(stack(kinds), order, bias, gates, torch.bfloat16)(x)
    close = {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(found.first(), expected.first(), **close)
    assert torch.equal(added(found.partial_sums()), found.first())
    sums, wanted = found.gates(), expected.gates()
    assert sums is not None and wanted is not None
    torch.testing.assert_close(added(sums), wanted.partials_PNO, **close)


@pytest.mark.parametrize("kind", ["bfloat16", "fp8_block"])
def test_partial_sums_are_left_to_whoever_asks(kind, monkeypatch):
    """Whether the inputs are ready or not; too many tokens are added, with the same bits."""
    multiply, x = split_up(TritonLinear([weight_of(kind, (OUTS, 3 * INS))])), tokens(5, 3 * INS)
    for ready in (False, True):
        sums = multiply.partial_sums(x, inputs_ready=ready)
        assert sums.args["NUM_PARTIALS"] > 1 and torch.equal(added(sums), multiply(x))
    monkeypatch.setattr(multiply, "_tokens_at_once", lambda _: 4)
    sums = multiply.partial_sums(x)
    assert sums.args["NUM_PARTIALS"] == 1 and torch.equal(added(sums), multiply(x))


@pytest.mark.parametrize("fits", [True, False])
def test_inputs_that_are_converted_are_waited_for(fits, monkeypatch):
    """They are written by the kernel before."""
    multiply, x = TritonLinear([weight_of("bfloat16", (OUTS, INS))]), tokens(2, INS)
    honest, ready = GemmWeight.partial_sums, []
    monkeypatch.setattr(
        GemmWeight,
        "partial_sums",
        lambda self, *given, **how: ready.append(how) or honest(self, *given, **how),
    )
    multiply.partial_sums(x.bfloat16() if fits else x.float(), inputs_ready=True)
    assert ready == [{"inputs_ready": fits}]


def test_without_gates():
    found = TritonProjection(stack(["bfloat16"]), None, None, slice(64, 64), torch.bfloat16)(tokens(2, INS))
    assert found.gates() is None and found.first().shape == (2, OUTS)
    assert GivenProjected(found.first(), slice(64, 64)).gates() is None


class SplitUp(TritonProjected):
    """What a core is given, each sum split in three; `whole` is the same in one."""

    def __init__(self, sums: torch.Tensor, gates: slice, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        parts = torch.randn(3, *sums.shape, generator=generator).to(sums.device)
        parts[0] = sums
        self._parts, self._gates = parts, gates
        self.whole = GivenProjected(parts[0] + parts[1] + parts[2], gates)

    def _sums(self, parts: torch.Tensor) -> PartialSums:
        tensor = parts.contiguous()
        _, num_tokens, num_outs = tensor.shape
        cut = {"num_tokens": num_tokens, "num_outs": num_outs, "steps_per_tile": 3, "steps_per_split": 1}
        return PartialSums(
            tensor, {**cut, "BLOCK_N": 16, "NUM_PARTIALS": 3, "EVEN_SPLITS": True, **norm_args(None)}
        )

    def first(self):
        return self.whole.first()

    def partial_sums(self):
        gates = self._gates
        return self._sums(torch.cat([self._parts[..., : gates.start], self._parts[..., gates.stop :]], 2))

    def gates(self):
        return self._sums(self._parts[..., self._gates])


def both_ways(net, drive):
    """What comes out where a core's inputs are whole, and where they are split up."""
    honest, results = type(net).__call__, []
    for whole in (True, False):

        def call(self, given, *rest, whole=whole):
            made = SplitUp(given, self.gates, seed=len(given))
            return honest(self, made.whole if whole else made, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(net), "__call__", call)
            results.append(drive())
    return results


def test_attention_adds_partial_sums():
    weights = make((4, 2, 20))
    net, lengths = TritonGatedAttention(weights), [9, 3]
    width = (2 * 4 + 2 * 2) * 20
    sequences = [torch.randn(n, width, generator=torch.Generator().manual_seed(n)) for n in lengths]
    steps = [[Share(0, 0, 5), Share(1, 0, 3)], [Share(0, 5, 1, drafts=2, accept=1)]]
    whole, cut = both_ways(net, lambda: attend(net, sequences, steps))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(cut, whole, strict=True))
    assert not torch.equal(whole[0], attend(net, sequences, steps)[0])


def test_delta_net_adds_partial_sums():
    sizes = (1, 2, 16, 24)
    net, sequences = TritonDeltaNet(on_device(sizes)), draw_sequences(sizes)
    whole, cut = both_ways(net, lambda: mix(net, sequences, draw_steps(0)))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(cut[0], whole[0], strict=True))
    assert torch.equal(cut[1].committed_SHDE[1:-1], whole[1].committed_SHDE[1:-1])


def test_tensors_are_parted():
    sums = torch.arange(12.0).view(2, 6)
    asked = parts_of(sums, slice(1, 3))
    gates = asked.gates()
    assert asked.first().tolist() == [[0, 3, 4, 5], [6, 9, 10, 11]]
    assert gates is not None and gates.partials_PNO.tolist() == [[1, 2], [7, 8]]
    assert parts_of(asked, slice(0, 0)) is asked
