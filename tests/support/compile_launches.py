"""Compiles the kernels that a step launches, for GPUs that need not be there, and prints the shared memory of each.

    TRITON_INTERPRET=0 python tests/support/compile_launches.py CAPABILITY MEMORY

MEMORY are the bytes that a program may have there. Layers of real sizes are run on the CPU with launches that are
written down and not made. Prints the bytes of each, by operation and kernel.
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "ops"), str(TESTS / "support")]

from headlong.ops import triton_launch  # noqa: E402

CAPABILITY, MEMORY = map(int, sys.argv[1:])
# Before anybody asks for them.
triton_launch.CONVERTS_E4M3 = tl.constexpr(CAPABILITY >= 89)
triton_launch.HAS_PDL = tl.constexpr(CAPABILITY >= 90)
triton_launch.HAS_WGMMA = CAPABILITY // 10 == 9

import test_latent_attention as latents  # noqa: E402
import test_routing as routing  # noqa: E402
import test_triton_attention as attention  # noqa: E402
import test_triton_delta_net as delta_net  # noqa: E402
import test_triton_moe as moe  # noqa: E402

from headlong.ops.compressed_attention import triton as compressed_attention  # noqa: E402
from headlong.ops.compressed_attention.triton import TritonCompressedAttention  # noqa: E402
from headlong.ops.compressed_attention.weights import CompressedAttentionWeights  # noqa: E402
from headlong.ops.compressor.triton import TritonCompressor  # noqa: E402
from headlong.ops.compressor.weights import CompressorWeights  # noqa: E402
from headlong.ops.hyper_connection.triton import TritonCollapse, TritonHyperConnection  # noqa: E402
from headlong.ops.hyper_connection.weights import HyperWeights, StreamSizes  # noqa: E402
from headlong.ops.indexer.triton import TritonIndexer  # noqa: E402
from headlong.ops.indexer.weights import IndexerSizes  # noqa: E402
from headlong.ops.linear.reference import ReferenceLinear  # noqa: E402
from headlong.ops.norm.reference import RmsNorm  # noqa: E402
from headlong.ops.rope.pairs import PairRope  # noqa: E402
from headlong.ops.rope.reference import Rotary, angles  # noqa: E402
from headlong.ops.triton_step import TritonStep  # noqa: E402
from headlong.types import Rows  # noqa: E402
from support.ragged import Share, plan_rows  # noqa: E402

compressed_attention.shared_memory = lambda _device: MEMORY
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
POINTERS = {
    torch.float64: "*fp64", torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv", torch.int64: "*i64", torch.int32: "*i32", torch.int16: "*i16",
    torch.uint8: "*u8", torch.bool: "*i1",
}  # fmt: skip
Launch = tuple[JITFunction, dict[str, Any]]
launches: dict[tuple[str, str], Launch] = {}
"""By operation and what the kernel is compiled for."""


@contextlib.contextmanager
def recorded(operation: str) -> Iterator[None]:
    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:  # noqa: ARG001
        passed = dict(zip(kernel.arg_names, args, strict=False)) | given
        constants = {name: value for name, value in passed.items() if not isinstance(value, torch.Tensor)}
        launches[f"{operation}:{kernel.__name__}", str(constants)] = kernel, passed

    honest, JITFunction.run = JITFunction.run, run
    try:
        yield
    finally:
        JITFunction.run = honest


def type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    return {bool: "i1", int: "i32", float: "fp32"}[type(value)]


def shared_memory(kernel: JITFunction, passed: dict[str, Any]) -> int:
    options = {name: passed[name] for name in OPTIONS if passed.get(name) is not None}
    if triton_launch.HAS_PDL.value:
        options["launch_pdl"] = True
    given = {p.name: passed.get(p.name, p.default) for p in kernel.params}
    constants = {p.name: given[p.name] for p in kernel.params if p.is_constexpr or given[p.name] is None}
    types = {n: "constexpr" if n in constants else type_of(value) for n, value in given.items()}
    even = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, value) in enumerate(given.items())
        if types[name][0] == "*" or (types[name] == "i32" and value % 16 == 0)
    }
    source = ASTSource(kernel, types, constants, even)
    return triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options).metadata.shared


def record_attention() -> None:
    sinks_H = torch.zeros(64)
    for sizes, own in (
        ((24, 4, 256), {}), ((32, 8, 128), {}), ((14, 2, 64), {}), ((64, 8, 64), {"window": 128, "sinks_H": sinks_H}),
    ):  # fmt: skip
        weights = replace(attention.make(sizes), **own)
        net, cache = (
            attention.TritonGatedAttention(weights),
            attention.Pages([900], weights, torch.bfloat16, 64),
        )
        for count in (4, 600):  # decoded, and enough to be walked
            tokens = attention.draw([count], weights)[0]
            with recorded(f"attention {sizes}"):
                cache.call("__call__", net, tokens.bfloat16(), [Share(0, 200, count)])


def record_latents() -> None:
    weights = latents.make((20, 512, 192, 64, 256))
    net, sizes = latents.on_gpu(weights)[0], weights.sizes
    cache = latents.Pages([300], sizes, torch.bfloat16, latents.CPU, 64)
    with recorded("latent attention"):
        cache.call(net, latents.draw([4], sizes)[0].bfloat16(), [Share(0, 200, 4)])


def record_delta_net() -> None:
    key_heads, value_heads, dim = 16, 48, 128
    weights = delta_net.on_device((key_heads, value_heads, dim, dim))
    net, width = delta_net.TritonDeltaNet(weights), 2 * (key_heads + value_heads) * dim + 2 * value_heads
    state, windows = delta_net.fresh_state(weights, 2)
    for count in (1, 4, 200):
        plan = delta_net.plan(net, plan_rows([Share(0, 0, count)]))
        with recorded(f"delta rule, {count}"):
            net(torch.zeros(count, width), state, windows, plan)


def record_experts() -> None:
    sizes = moe.Sizes(experts=8, active=2, hidden=2048, inner=512, shared=512)
    for kind in ("bfloat16", "fp8_block", "int4_g32", "nvfp4_modelopt"):
        weights = moe.weights_of(kind, sizes)
        with recorded(f"experts, {kind}"):
            layer = moe.Layer(weights, torch.bfloat16)
            for count in (1, 64):
                layer(torch.zeros(count, sizes.hidden), moe.logits_of(count, sizes))


def record_deepseek_v4() -> None:
    """Sizes of V4-Flash, but for the hidden size."""
    heads, dim, hidden, rope = 64, 512, 1024, PairRope(32, 32)
    zeros, none = torch.zeros, RmsNorm(torch.ones(dim), 1e-6)
    turns = angles(torch.arange(300, 304), Rotary.of(1e4, 128, 128, latents.CPU), torch.float32)
    step = TritonStep.of(Rows((1,), (300,), (4,), (3,), (0,)), zeros(1, 8, dtype=torch.long), 64)
    sizes = StreamSizes(4, hidden, 1e-6, 1e-6, 20)
    x = zeros(4, 4, hidden)
    with recorded("hyper-connections"):
        for kind, mixes in ((TritonHyperConnection, 24), (TritonCollapse, 4)):
            weights = HyperWeights(sizes, zeros(mixes, 4 * hidden), zeros(mixes), zeros(3))
            net = kind(weights, ReferenceLinear(weights.fn_MX))
            if kind is TritonHyperConnection:
                _, mix = net(x, torch.clone)
                net.add(x, x[:, 0], mix)
            else:
                net(x)
    for ratio, series in ((4, 2), (128, 1)):
        with recorded(f"compressor of {ratio}"):
            bias, own = zeros(ratio, series * dim), torch.ones(32)
            net = TritonCompressor(CompressorWeights(ratio, dim, series, bias, none, rope, own))
            ring = zeros(2, series * ratio + 3, 2 * series * dim)
            net(zeros(4, 2 * series * dim), ring, zeros(9, -(-64 // ratio), dim).bfloat16(), turns, step)
    with recorded("indexer"):
        net = TritonIndexer(IndexerSizes(64, 128, 4, 64, rope))
        net(zeros(4, 64 * 128), zeros(4, 64), zeros(9, 16, 128).bfloat16(), turns, step)
    for ratio, on_pages in ((0, True), (0, False), (4, False), (128, False)):
        weights = CompressedAttentionWeights(heads, dim, 128, ratio, 1e-6, none, zeros(heads), rope, on_pages)
        net, chosen = TritonCompressedAttention(weights, torch.bfloat16), zeros(4, 512, dtype=torch.int32)
        window = zeros(9, 64, dim).bfloat16() if on_pages else zeros(2, 131, dim)
        entries = zeros(9, -(-64 // ratio), dim).bfloat16() if ratio else None
        with recorded(f"windows and entries of {ratio}"):
            queries = zeros(4, heads * dim)
            net(queries, zeros(4, dim), window, entries, chosen if ratio == 4 else None, turns, step)
    for given in (False, True):
        scores = routing.Routing(routing.EXPERTS, 4, scores="sqrtsoftplus", given=given)
        layer = routing.experts_of("triton", routing.weights_of(scores, not given, None, False))
        with recorded(f"routing, given {given}"):
            chosen = zeros(4, 4, dtype=torch.long) if given else None
            layer.route(zeros(4, routing.EXPERTS), chosen)


def main() -> None:
    for record in (record_attention, record_latents, record_delta_net, record_experts, record_deepseek_v4):
        record()
    found: dict[str, int] = {}
    for (name, _), launch in launches.items():
        found[name] = max(found.get(name, 0), shared_memory(*launch))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
