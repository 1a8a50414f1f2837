"""Norms and rotary embedding: against the formula in float64, row by row the same bits."""

import pytest
import torch
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from headlong.ops.norm.reference import RmsNorm, l2_norm
from headlong.ops.rope.reference import LARGEST_TABLE, Rotary, angles, rotate

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64)
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-13}
WIDTHS = (1, 3, 8, 20, 33, 48, 130, 257)
COUNTS = (1, 2, 3, 5, 8, 17, 33, 64, 70)


def draw(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def rms(x, weight, eps):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e3])
def test_rms_norm(width, dtype, scale):
    x, weight = draw(9, width, dtype=dtype) * scale, draw(width, dtype=dtype, seed=1)
    expected = rms(x, weight, 1e-6).to(dtype)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(RmsNorm(weight, 1e-6)(x), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_with_a_weight_for_each_head(dtype):
    x, weight = draw(6, 5, 20, dtype=dtype), draw(5, 20, dtype=dtype, seed=1)
    tolerance = TOLERANCE[dtype]
    expected = rms(x, weight, 1e-3).to(dtype)
    torch.testing.assert_close(RmsNorm(weight, 1e-3)(x), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_rms_norm(dtype):
    x, gate = draw(7, 3, 18, dtype=dtype), draw(7, 3, 18, dtype=dtype, seed=2)
    weight = draw(18, dtype=dtype, seed=1)
    expected = (rms(x, weight, 1e-6) * torch.nn.functional.silu(gate.double())).to(dtype)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(RmsNorm(weight, 1e-6).gated(x, gate), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_l2_norm(width, dtype):
    x = draw(9, 2, width, dtype=dtype)
    x[0] = 0.0
    norm = (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()
    found = l2_norm(x, torch.tensor(1e-6, dtype=dtype))
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found, (x.double() / norm).to(dtype), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_norm_bits_do_not_depend_on_the_other_rows(width, dtype):
    x, gate = draw(70, width, dtype=dtype), draw(70, width, dtype=dtype, seed=2)
    norm, eps = RmsNorm(draw(width, dtype=dtype, seed=1), 1e-6), torch.tensor(1e-6, dtype=dtype)
    functions = (
        lambda at: norm(x[at]),
        lambda at: norm.gated(x[at], gate[at]),
        lambda at: l2_norm(x[at], eps),
    )
    for function in functions:
        alone = torch.cat([function(slice(i, i + 1)) for i in range(70)])
        for count in COUNTS:
            assert torch.equal(function(slice(count)), alone[:count])
            assert torch.equal(function(slice(70 - count, 70)), alone[70 - count :])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(2, 2), (12, 6), (20, 20), (33, 10), (64, 16)])
def test_rotation(head_dim, rotary_dim, dtype):
    """Pairs (i, i + half) turn as complex numbers; what lies past the rotary part stays."""
    theta, half = 10000.0, rotary_dim // 2
    positions = torch.tensor([0, 1, 2, 17, 500, 31])
    x = draw(len(positions), 3, head_dim, dtype=dtype)
    found = rotate(x, angles(positions, Rotary.of(theta, rotary_dim, head_dim, CPU), dtype))
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) * 2 / rotary_dim)
    turn = torch.polar(torch.ones(()).double(), positions.double()[:, None, None] * frequency)
    pairs = torch.complex(x[..., :half].double(), x[..., half:rotary_dim].double()) * turn
    expected = torch.cat([pairs.real, pairs.imag, x[..., rotary_dim:].double()], -1).to(dtype)
    # Angles are taken in float32, as the reference model takes them: position · 2⁻²⁴ off at most.
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0.0)
    near = positions < 32
    torch.testing.assert_close(found[near], expected[near], atol=1e-5, rtol=0.0)
    assert torch.equal(found[..., rotary_dim:], x[..., rotary_dim:])
    assert torch.equal(found[0], x[0]), "position 0 does not turn"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "head_dim", "rotary_dim"), [(1, 2, 2), (3, 20, 10), (5, 12, 12), (4, 64, 16)]
)
def test_rotation_bits_do_not_depend_on_the_other_rows(heads, head_dim, rotary_dim, dtype):
    rotary = Rotary.of(10000.0, rotary_dim, head_dim, CPU)
    positions = torch.randint(4000, (70,), generator=torch.Generator().manual_seed(0))
    x = draw(70, heads, head_dim, dtype=dtype)

    def turned(at):
        return rotate(x[at], angles(positions[at], rotary, dtype))

    alone = torch.cat([turned(slice(i, i + 1)) for i in range(70)])
    for count in COUNTS:
        assert torch.equal(turned(slice(count)), alone[:count])
        assert torch.equal(turned(slice(70 - count, 70)), alone[70 - count :])


@pytest.mark.parametrize("first", [0, LARGEST_TABLE])
@pytest.mark.parametrize("sections", [(4, 2, 2), (3, 3, 2)], ids=str)
def test_several_positions_turn_a_token_as_the_reference_model_has_it(sections, first):
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    config = Qwen3_5TextConfig(
        head_dim=32, rope_parameters={**rope, "mrope_section": list(sections), "mrope_interleaved": True}
    )
    generator = torch.Generator().manual_seed(0)
    positions = first + torch.randint(900, (3, 40), generator=generator)
    cos, sin = Qwen3_5TextRotaryEmbedding(config)(torch.zeros(1), positions[:, None])
    rotary = Rotary.of(10000.0, 16, 32, CPU, sections=sections)
    found = angles(positions, rotary, torch.float32)
    assert found.cos.shape == found.sin.shape == (40, 1, 32)
    torch.testing.assert_close(found.cos[:, 0, :16], cos[0], atol=0.0, rtol=0.0)
    torch.testing.assert_close(found.sin[:, 0, 8:16], sin[0, :, 8:], atol=0.0, rtol=0.0)
    torch.testing.assert_close(-found.sin[:, 0, :8], sin[0, :, :8], atol=0.0, rtol=0.0)
    assert (found.cos[..., 16:] == 1.0).all() and (found.sin[..., 16:] == 0.0).all()


@pytest.mark.parametrize("first", [0, LARGEST_TABLE])
def test_equal_positions_are_one(first):
    """Bit for bit, whether the heads know of several positions or not."""
    positions = first + torch.tensor([0, 3, 1, 999])
    wanted = angles(positions, Rotary.of(10000.0, 16, 32, CPU), torch.float32)
    rotary = Rotary.of(10000.0, 16, 32, CPU, sections=(4, 2, 2))
    for given in (positions, positions.expand(3, -1)):
        found = angles(given, rotary, torch.float32)
        assert torch.equal(found.cos, wanted.cos) and torch.equal(found.sin, wanted.sin)
