"""Small products in any number: right, and bit for bit the same, on whatever path BLAS takes."""

import os
import subprocess
import sys

import pytest
import torch

from headlong.ops import batched_matmul
from headlong.ops.batched_matmul import matmul

SHAPES = [(1, 8, 8), (4, 16, 64), (12, 64, 64), (20, 32, 16), (1, 33, 20), (24, 256, 64)]


def draw(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("measured", [None, False], ids=["as measured", "elementwise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(monkeypatch, shape, dtype, measured, transposed):
    if measured is False:
        monkeypatch.setattr(batched_matmul, "_is_invariant", lambda *_: False)
    rows, inner, columns = shape
    a = draw(40, rows, inner, dtype=dtype)
    b = draw(40, columns, inner, dtype=dtype, seed=1).transpose(1, 2)
    b = b if transposed else b.contiguous()
    whole = matmul(a, b)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-11
    torch.testing.assert_close(whole.double(), a.double() @ b.double(), atol=tolerance, rtol=tolerance)
    for count in (1, 2, 7, 39):
        assert torch.equal(matmul(a[:count], b[:count]), whole[:count])
        assert torch.equal(matmul(a[count:], b[count:]), whole[count:])
    assert torch.equal(matmul(a.flip(1), b).flip(1), whole)


OTHER_PATHS = {
    "MKL_CBWR": "COMPATIBLE",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}
SCRIPT = """
import sys
from headlong import LLM, SamplingParams
prompts = ["Explain rain to a child.", "Once upon a time", "Give me three tips for sleeping better.", "The"]
for dtype in ("float32", "float64"):
    llm = LLM(dtype=dtype, chunk_tokens=9)
    plain = [llm.generate(p, SamplingParams(max_tokens=24, draft_tokens=0, logprobs=2)) for p in prompts]
    for depth in (0, 3, 8):
        drafted = llm.generate(prompts, SamplingParams(max_tokens=24, draft_tokens=depth, logprobs=2))
        for one, other in zip(plain, drafted):
            assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs), (dtype, depth)
print("identical")
"""


@pytest.mark.slow
@pytest.mark.parametrize("native", ["0", "1"], ids=["reference", "native"])
def test_the_engine_is_exact_on_the_paths_of_other_cpus(native):
    """As far as libraries can be told to behave as on a CPU without AVX-512."""
    env = os.environ | OTHER_PATHS | {"HEADLONG_NATIVE": native}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0 and done.stdout.strip() == "identical", done.stderr[-2000:]
