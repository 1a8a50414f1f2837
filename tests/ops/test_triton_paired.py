"""A small matrix of floats beside a packed one: one launch gives the bits of two."""

import pytest
import torch
from test_triton_linear import DEVICE, draw, tokens, weight_of

from headlong.ops.linear import triton as linear
from headlong.ops.linear.triton import TritonLinear
from headlong.ops.linear.triton_weight import FEW
from headlong.ops.norm.normed import PartialNorm

INS = 1280
PACKED = ["fp8_block", "fp8_channel", "int4_asym", "int8_channel", "nvfp4_modelopt"]


def pair(packed: str, *, order: torch.Tensor | None = None, biased: bool = False) -> TritonLinear:
    """Outputs of floats stand on both sides of the packed ones'."""
    weights = [
        weight_of("bfloat16", (8, INS)),
        weight_of(packed, (140, INS)),
        weight_of("bfloat16", (72, INS)),
    ]
    bias = draw(len(order) if order is not None else 220, seed=3).to(DEVICE) if biased else None
    return TritonLinear(weights, order, bias)


def one_by_one(multiply: TritonLinear, given) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiply, "_pair", None)
        return multiply(given)


@pytest.mark.parametrize("count", [1, 3, 9, FEW])
@pytest.mark.parametrize("packed", PACKED)
def test_together_as_apart(packed, count):
    multiply = pair(packed, biased=count == 3)
    assert multiply._pair is not None and len(multiply.weights) == 2
    x = tokens(count, INS)
    assert torch.equal(multiply(x), one_by_one(multiply, x))


def test_outputs_in_another_order():
    order = torch.randperm(220, generator=torch.Generator().manual_seed(1))[:200]
    multiply, x = pair("fp8_block", order=order), tokens(2, INS)
    assert multiply._pair is not None
    assert torch.equal(multiply(x), one_by_one(multiply, x))


def test_lengths_are_divided_by():
    multiply, x = pair("fp8_block"), tokens(3, INS)
    squares = torch.rand(3, 5, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    half = PartialNorm(x.bfloat16(), squares, 0.25)
    found = multiply(half)
    assert torch.equal(found, one_by_one(multiply, half))
    lengths = (squares.double().sum(1, keepdim=True) + 0.25).sqrt()
    torch.testing.assert_close(found.double(), multiply(x).double() / lengths, rtol=1e-6, atol=1e-6)


def test_many_tokens_go_apart(monkeypatch):
    """And have the bits of few."""
    multiply, x = pair("fp8_block"), tokens(FEW + 1, INS)
    few = multiply(x[:FEW])
    monkeypatch.setattr(linear, "paired_gemm", None)
    assert torch.equal(multiply(x)[:FEW], few)


@pytest.mark.parametrize(
    "kinds",
    [["fp8_block"], ["bfloat16", "float32"], ["fp8_block", "int4_asym"], ["fp8_block", "float32"]],
    ids="+".join,
)
def test_no_pair(kinds):
    assert TritonLinear([weight_of(kind, (72, INS)) for kind in kinds])._pair is None


def test_a_large_matrix_of_floats_is_no_small_one():
    assert TritonLinear([weight_of("fp8_block", (140, INS)), weight_of("bfloat16", (600, INS))])._pair is None
