"""A layer's first product in two: the parts are those of the whole, and cores that add pieces give the same bits."""

import pytest
import torch
from test_triton_attention import make, true_bfloat16  # noqa: F401
from test_triton_attention import run as attend
from test_triton_delta_net import draw_sequences, draw_steps, on_device
from test_triton_delta_net import run as mix
from test_triton_linear import DEVICE, in_pieces, tokens, weight_of

from headlong.ops.delta_net.triton import TritonDeltaNet
from headlong.ops.gated_attention.triton import TritonGatedAttention
from headlong.ops.linear.triton import TritonLinear
from headlong.ops.linear.triton_projection import GivenProjected, TritonProjection, parts_of
from headlong.ops.linear.triton_split_k import WIDTH, Pieces, add_pieces
from headlong.ops.linear.triton_weight import Matrix
from headlong.ops.norm.triton import length_args, room_args
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


def added(pieces: Pieces) -> torch.Tensor:
    """By a kernel's own way."""
    _, num_tokens, num_outs = pieces.tensor.shape if pieces.tensor.ndim == 3 else (1, *pieces.tensor.shape)
    out = torch.empty(num_tokens, num_outs, device=DEVICE)
    add_pieces[-(-num_outs // WIDTH), num_tokens](
        pieces.tensor, None, None, None, out, num_outs, *room_args(None, None), **pieces.cut, WIDTH=WIDTH
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
    assert len(multiply.matrices) == 1 and multiply.matrices[0].outs == OUTS


def test_blocks_of_scales_stay_where_whole_ones_are_left_out():
    weight = weight_of("fp8_block", (512, INS))
    assert TritonLinear([weight], torch.arange(128, 512)).matrices[0].kind.rows == 128
    assert TritonLinear([weight], torch.arange(64, 512)).matrices[0].kind.rows == 1


def test_parts_of_floats_do_not_hold_the_others():
    """A whole weight in order stays where it is; a view of a part would keep all of it in memory."""
    weight = weight_of("bfloat16", (OUTS, INS))
    (whole,), (part,) = (TritonLinear([weight], torch.arange(n)).matrices for n in (OUTS, 96))
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
    assert torch.equal(added(found.pieces()), found.first())
    sums, wanted = found.gates(), expected.gates()
    assert sums is not None and wanted is not None
    torch.testing.assert_close(added(sums), wanted.tensor, **close)


@pytest.mark.parametrize("kind", ["bfloat16", "fp8_block"])
def test_pieces_are_left_to_whoever_asks(kind, monkeypatch):
    """Known or not; too many tokens are added, with the same bits."""
    multiply, x = in_pieces(TritonLinear([weight_of(kind, (OUTS, 3 * INS))])), tokens(5, 3 * INS)
    for known in (False, True):
        pieces = multiply.pieces(x, known=known)
        assert pieces.cut["PIECES"] > 1 and torch.equal(added(pieces), multiply(x))
    monkeypatch.setattr(multiply, "_tokens_at_once", 4)
    pieces = multiply.pieces(x)
    assert pieces.cut["PIECES"] == 1 and torch.equal(added(pieces), multiply(x))


@pytest.mark.parametrize("fits", [True, False])
def test_inputs_that_are_converted_are_waited_for(fits, monkeypatch):
    """They are written by the kernel before."""
    multiply, x = TritonLinear([weight_of("bfloat16", (OUTS, INS))]), tokens(2, INS)
    honest, known = Matrix.multiply, []
    monkeypatch.setattr(
        Matrix, "multiply", lambda self, *given, **how: known.append(how) or honest(self, *given, **how)
    )
    multiply.pieces(x.bfloat16() if fits else x.float(), known=True)
    assert known == [{"known": fits}]


def test_without_gates():
    found = TritonProjection(stack(["bfloat16"]), None, None, slice(64, 64), torch.bfloat16)(tokens(2, INS))
    assert found.gates() is None and found.first().shape == (2, OUTS)
    assert GivenProjected(found.first(), slice(64, 64)).gates() is None


class InPieces:
    """What a core is given, each sum in three pieces; `whole` is the same in one."""

    def __init__(self, sums: torch.Tensor, gates: slice, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        parts = torch.randn(3, *sums.shape, generator=generator).to(sums.device)
        parts[0] = sums
        self._parts, self._gates = parts, gates
        self.whole = GivenProjected(parts[0] + parts[1] + parts[2], gates)

    def _pieces(self, parts: torch.Tensor) -> Pieces:
        tensor = parts.contiguous()
        _, num_tokens, num_outs = tensor.shape
        cut = {"num_tokens": num_tokens, "num_outs": num_outs, "num_steps": 3, "steps_each": 1}
        return Pieces(tensor, {**cut, "B": 16, "PIECES": 3, "EVENLY": True, **length_args(None)})

    def first(self):
        return self.whole.first()

    def pieces(self):
        gates = self._gates
        return self._pieces(torch.cat([self._parts[..., : gates.start], self._parts[..., gates.stop :]], 2))

    def gates(self):
        return self._pieces(self._parts[..., self._gates])


def both_ways(net, drive):
    """What comes out where a core's inputs are whole, and where they are in pieces."""
    honest, results = type(net).__call__, []
    for whole in (True, False):

        def call(self, given, *rest, whole=whole):
            made = InPieces(given, self.gates, seed=len(given))
            return honest(self, made.whole if whole else made, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(net), "__call__", call)
            results.append(drive())
    return results


def test_attention_adds_pieces():
    weights = make((4, 2, 20))
    net, lengths = TritonGatedAttention(weights), [9, 3]
    width = (2 * 4 + 2 * 2) * 20
    sequences = [torch.randn(n, width, generator=torch.Generator().manual_seed(n)) for n in lengths]
    steps = [[Share(0, 0, 5), Share(1, 0, 3)], [Share(0, 5, 1, drafts=2, accept=1)]]
    whole, cut = both_ways(net, lambda: attend(net, sequences, steps))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(cut, whole, strict=True))
    assert not torch.equal(whole[0], attend(net, sequences, steps)[0])


def test_delta_net_adds_pieces():
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
    assert gates is not None and gates.tensor.tolist() == [[1, 2], [7, 8]]
    assert parts_of(asked, slice(0, 0)) is asked
