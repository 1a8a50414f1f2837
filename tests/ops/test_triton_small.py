"""The small Triton kernels, norm, MLP gate and best token: the references, bit for bit alike in company."""

from functools import partial

import pytest
import torch

from headlong.ops.argmax import reference as reference_argmax
from headlong.ops.norm.reference import RmsNorm
from headlong.ops.silu_mul import reference as reference_silu_mul
from headlong.ops.silu_mul.activation import SILU
from support.activations import CLAMPED, EXTREMES, OTHERS, check_clamped

triton = pytest.importorskip("triton")
from headlong.ops.argmax import triton as triton_argmax  # noqa: E402
from headlong.ops.norm.triton import TritonRmsNorm  # noqa: E402
from headlong.ops.silu_mul import triton as triton_silu_mul  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [1, 7, 64, 385, 2560]
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_norm(size, dtype):
    norm, x = RmsNorm(randn(size, seed=1).to(dtype), 1e-6), randn(9, size, seed=2) * 10
    whole, exact = TritonRmsNorm(norm)(x), RmsNorm(randn(size, seed=1), 1e-6)
    exact.weight, exact.eps = norm.weight.float(), norm.eps.float()
    torch.testing.assert_close(whole, exact(x), **CLOSE)
    for row in range(9):
        assert torch.equal(TritonRmsNorm(norm)(x[row : row + 1]), whole[row : row + 1])


@pytest.mark.parametrize("size", SIZES)
def test_narrow_results_are_the_wide_ones_rounded(size):
    norm, x, gate_up = RmsNorm(randn(size, seed=1), 1e-6), randn(9, size, seed=2), randn(5, 2 * size, seed=4)
    half = torch.float16
    narrow, wide = TritonRmsNorm(norm, half)(x), TritonRmsNorm(norm)(x)
    # How a row is summed may hang on what is stored: by a bit of float32, which may tip a rounding over.
    torch.testing.assert_close(narrow.float(), wide, rtol=2**-11 + 2**-20, atol=2**-24)
    assert torch.equal(triton_silu_mul.silu_mul(gate_up, half), triton_silu_mul.silu_mul(gate_up).to(half))


def test_a_row_that_is_no_number_spoils_no_other():
    norm, x = RmsNorm(randn(40, seed=1), 1e-6), randn(3, 40, seed=2)
    clean = TritonRmsNorm(norm)(x)
    x[1] = torch.nan
    poisoned = TritonRmsNorm(norm)(x)
    assert poisoned[1].isnan().all() and torch.equal(poisoned[::2], clean[::2])


@pytest.mark.parametrize("size", [*SIZES, 1025])
def test_gate(size):
    gate_up = randn(5, 2 * size, seed=4) * 20
    for how in (SILU, CLAMPED, *OTHERS):
        gate = partial(triton_silu_mul.silu_mul, activation=how)
        whole = gate(gate_up)
        torch.testing.assert_close(whole, reference_silu_mul.silu_mul(gate_up, how), **CLOSE)
        for row in range(5):
            assert torch.equal(gate(gate_up[row : row + 1]), whole[row : row + 1])


def test_extremes_stay_finite_and_nan_stays_nan():
    out = triton_silu_mul.silu_mul(EXTREMES.to(DEVICE))[0].cpu()
    torch.testing.assert_close(out[:5], torch.tensor([0.0, 0.0, 0.0, -1e6, 1e8]), rtol=1e-6, atol=1e-6)
    assert out[5].isnan()
    check_clamped(triton_silu_mul.silu_mul(EXTREMES.to(DEVICE), activation=CLAMPED)[0].cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 2, 63, 1000, 4095, 4096, 4097, 20000])
def test_best(size, dtype):
    logits = randn(6, size, seed=5).to(dtype)
    logits[1] = torch.nan
    logits[2, size // 2 :] = torch.nan
    logits[3] = -torch.inf
    logits[4] = 1.5
    logits[5] = logits[5].round()
    found = triton_argmax.argmax(logits)
    assert found.dtype == torch.long
    assert torch.equal(found.cpu(), reference_argmax.argmax(logits.cpu()))
    for row in range(6):
        assert torch.equal(triton_argmax.argmax(logits[row : row + 1]), found[row : row + 1])


def test_best_reads_no_padding():
    """Rows may be wider than the vocabulary, and what lies between them is nobody's token."""
    wide = randn(4, 5000, seed=6)
    wide[:, 4500:] = torch.nan
    assert torch.equal(triton_argmax.argmax(wide[:, :4500]), wide[:, :4500].argmax(-1))


@pytest.mark.parametrize("places", [(0, 4096), (4095, 4096), (5, 9000), (9000, 9999)])
@pytest.mark.parametrize("value", [9.0, torch.inf, torch.nan])
def test_of_equal_ones_the_first(places, value):
    logits = randn(1, 10000, seed=7)
    logits[0, list(places)] = value
    assert triton_argmax.argmax(logits).item() == places[0]
