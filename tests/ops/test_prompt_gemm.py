"""The GEMM of many tokens in CUDA C++: it compiles without a GPU, into the instructions it is meant to be; on a GPU it
gives a token the bits of Triton's GEMM of few tokens."""

import re
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from headlong.ops.cuda import nvrtc
from headlong.ops.linear import prompt_gemm, triton_split_k
from headlong.ops.linear.cuda_gemm import Variant
from headlong.ops.linear.triton import TritonLinear
from headlong.ops.linear.triton_unpack import E4M3, FLOAT
from headlong.ops.moe import prompt_experts
from headlong.ops.norm.normed import PartialNorm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WEIGHTS = [(width, False, False) for width in prompt_gemm.WIDTHS[FLOAT]]
WEIGHTS += [(width, True, grouped) for width in prompt_gemm.WIDTHS[E4M3] for grouped in (True, False)]
VARIANTS = [
    Variant(width, gated, codes, grouped, bits)
    for width, codes, grouped in WEIGHTS
    for gated, bits in ((False, 32), (True, 16))
]
VARIANTS += [
    Variant(width, gated, bits == 8, bits == 8, 16 if gated else 32, experts=True)
    for bits, widths in prompt_experts.WIDTHS.items()
    for width in widths
    for gated in (False, True)
]
ALWAYS = {
    Variant(192, True, False, False, 16),
    Variant(112, False, True, True, 32),
    Variant(128, True, True, True, 16, experts=True),
}
"""One of each way to read weights; the others are slow."""
SHAPES = [(5120 - 64, 2048), (1024, 5120 - 8), (2048, 4096)]
HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cpu" or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]


def library_is_there() -> bool:
    try:
        nvrtc._library()
    except nvrtc.CompileError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not library_is_there(), reason="NVRTC is not installed")


@needs_compiler
@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(v, marks=[] if v in ALWAYS else pytest.mark.slow, id="-".join(map(str, v)))
        for v in VARIANTS
    ],
)
def test_it_compiles_without_spilling(variant, tmp_path):
    triton = pytest.importorskip("triton")
    tools, cubin = Path(triton.__file__).parent / "backends/nvidia/bin", tmp_path / "kernel.cubin"
    cubin.write_bytes(nvrtc._compiled(variant.source, variant.options))

    def told(option: str) -> str:
        run = subprocess.run([tools / "cuobjdump", option, cubin], capture_output=True, text=True, check=True)
        return run.stdout

    usage = told("-res-usage")
    assert "STACK:0" in usage and "LOCAL:0" in usage, usage
    code = told("-sass")
    products = re.findall(r"HGMMA\.64x(\d+)x16\.F32\.BF16", code)
    assert set(products) == {str(variant.block_tokens)}
    waits = len(re.findall(r"WARPGROUP\.DEPBAR", code))
    assert waits < len(products), "the compiler waits for every product"
    shared = int(re.search(r"SHARED:(\d+)", usage)[1])  # type: ignore[index]
    assert shared + variant.stages * variant.stage_bytes + 1024 <= 227 << 10 and variant.stages >= 4


@needs_compiler
def test_what_was_compiled_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source, options = 'extern "C" __global__ void nothing() {}', ["--gpu-architecture=sm_90a"]
    code = nvrtc.machine_code(source, options)
    assert code[:4] == b"\x7fELF"
    monkeypatch.setattr(nvrtc, "_compiled", None)
    assert nvrtc.machine_code(source, options) == code
    (kept,) = tmp_path.rglob("*.cubin")
    assert kept.read_bytes() == code


@needs_compiler
def test_a_folder_that_takes_nothing_and_a_source_that_is_none(tmp_path, monkeypatch):
    (tmp_path / "headlong").write_text("a file, where a folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = ["--gpu-architecture=sm_90a"]
    assert nvrtc.machine_code('extern "C" __global__ void nothing() {}', options)[:4] == b"\x7fELF"
    with pytest.raises(nvrtc.CompileError, match="nonsense"):
        nvrtc.machine_code("nonsense", options)


def test_without_the_library(monkeypatch):
    monkeypatch.setattr(nvrtc, "_names", lambda: ["libnowhere.so"])
    nvrtc._library.cache_clear()
    try:
        with pytest.raises(nvrtc.CompileError, match="NVRTC"):
            nvrtc.machine_code("", [])
    finally:
        nvrtc._library.cache_clear()


@pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU")
def test_without_a_hopper_gpu_triton_multiplies():
    weight = TritonLinear([torch.randn(1024, 2048).bfloat16()]).weights[0]
    assert weight.is_split and prompt_gemm._fits(weight)
    assert not prompt_gemm.serves(weight, 1 << 14)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("counts", [(70, 0, 128, 129, 1), (0, 0, 5), (300,)])
def test_pairs_are_sorted_and_cut_into_tiles(width, counts):
    experts = [expert for expert, count in enumerate(counts) for _ in range(count)]
    order = torch.randperm(len(experts), generator=torch.Generator().manual_seed(1))
    experts_P = torch.tensor(experts, dtype=torch.int32)[order].to(DEVICE)
    pairs_P, tiles_T3 = prompt_experts.sort_pairs(experts_P, len(counts), width)
    assert experts_P[pairs_P.long()].tolist() == experts
    of_one = pairs_P.cpu().split(list(counts))
    assert all(pairs.tolist() == sorted(pairs.tolist()) for pairs in of_one)
    starts, expected = [0, *torch.tensor(counts).cumsum(0).tolist()], []
    for expert, (start, end) in enumerate(pairwise(starts)):
        expected += [[expert, at, min(end - at, width)] for at in range(start, end, width)]
    found = tiles_T3.tolist()
    assert found[: len(expected)] == expected and not any(map(any, found[len(expected) :]))


@pytest.mark.parametrize("parts", [1, 3, 80])
def test_inverse_norms(parts):
    squares_NP = torch.rand(5, parts, device=DEVICE) + 0.5
    found = prompt_gemm.inverse_norms(PartialNorm(torch.empty(5, 1, device=DEVICE), squares_NP, 1e-6))
    torch.testing.assert_close(found, (squares_NP.double().sum(1) + 1e-6).rsqrt().float())


def weight_of(kind: str, outs: int, ins: int):
    from test_triton_linear import linear

    return linear(kind, (outs, ins)).weights[0]


@pytest.mark.parametrize("kind", ["bfloat16", "fp8_block", "fp8_channel"])
@pytest.mark.parametrize(("outs", "ins"), SHAPES)
class TestOnHopper:
    pytestmark = HOPPER

    def test_sums_have_the_bits_of_few_tokens(self, kind, outs, ins):
        weight = weight_of(kind, outs, ins)
        for count in (512, 1000, 4096):
            x = torch.randn(count, ins, device=DEVICE).bfloat16()
            assert prompt_gemm.serves(weight, 1 << 14)
            few = x.new_empty(count, outs, dtype=torch.float32)
            for first in range(0, count, 64):
                some = slice(first, first + 64)
                triton_split_k.gemm(weight, x[some], 64, None, None, few[some])
            assert torch.equal(prompt_gemm.sums(weight, x), few)

    def test_gates_have_the_bits_of_few_tokens(self, kind, outs, ins):
        weight = weight_of(kind, outs // 128 * 128, ins)
        x = torch.randn(700, ins, device=DEVICE).bfloat16()
        squares_NP = torch.rand(700, 16, device=DEVICE)
        for dtype in (torch.bfloat16, torch.float32):
            assert prompt_gemm.serves(weight, 1 << 14, gated=dtype)
            found, few = (x.new_empty(700, weight.num_outs // 2, dtype=dtype) for _ in range(2))
            partial = PartialNorm(x, squares_NP, 1e-6)
            prompt_gemm.gated(weight, x, found, partial)
            for first in range(0, 700, 50):
                some = slice(first, first + 50)
                triton_split_k.gated_gemm(weight, x[some], 64, None, few[some], partial.some(some))
            assert torch.equal(found, few)
