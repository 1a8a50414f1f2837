"""The GEMM of many tokens on Hopper against cuBLAS and against Triton's, and whether it gives the same bits.

    python benchmarks/prompt_gemm.py [--tokens 8192] [--fp8] [--widths 128,192] [--shapes 34816x5120g,5120x17408]

A shape is outputs x inputs; one that ends in g is gated, silu(gate) · up. Medians of CUDA-event times, TFLOP/s. cuBLAS
multiplies the same numbers in bfloat16.
"""

import argparse
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

from cuda_times import milliseconds
from headlong.ops.linear import triton_split_k
from headlong.ops.linear.cuda_gemm import Variant, launch
from headlong.ops.linear.prompt_gemm import WIDTHS
from headlong.ops.linear.triton import TritonLinear
from headlong.ops.linear.triton_unpack import E4M3, FLOAT
from headlong.ops.linear.triton_weight import GemmWeight
from random_weights import Packing, RandomWeights

CUDA = torch.device("cuda")
SHAPES = "34816x5120g,5120x17408,10240x5120,8192x5120,6144x5120,5120x6144"


def made(outs: int, ins: int, *, fp8: bool) -> tuple[GemmWeight, torch.Tensor]:
    """A random weight, and what it is in bfloat16."""
    weight = RandomWeights(torch.bfloat16, CUDA, Packing("fp8", "fp8") if fp8 else Packing()).matrix(
        "layers.0.weight", outs, ins
    )
    (laid,) = TritonLinear([weight]).weights
    return laid, weight if isinstance(weight, torch.Tensor) else weight.dequantize(0, outs).to(torch.bfloat16)


def measured(shape: str, num_tokens: int, widths: list[int], *, fp8: bool) -> list[str]:
    """A row of the table."""
    gated = shape.endswith("g")
    outs, ins = (int(size) for size in shape.rstrip("g").split("x"))
    weight, whole = made(outs, ins, fp8=fp8)
    x_ND = torch.randn(num_tokens, ins, device=CUDA).to(torch.bfloat16)
    kind = torch.bfloat16 if gated else torch.float32
    out, truth = (torch.empty(num_tokens, outs // (1 + gated), device=CUDA, dtype=kind) for _ in range(2))

    def by_triton() -> None:
        for first in range(0, num_tokens, 2048):
            part = slice(first, first + 2048)
            if gated:
                triton_split_k.gated_gemm(weight, x_ND[part], 128, None, truth[part])
            else:
                triton_split_k.gemm(weight, x_ND[part], 128, None, None, truth[part])

    times = [milliseconds(lambda: x_ND @ whole.T), milliseconds(by_triton, 3)]
    same = []
    for width in widths:
        variant = Variant(width, gated, fp8, fp8, 16 if gated else 32)
        out.fill_(float("nan"))
        times.append(milliseconds(partial(launch, weight, x_ND, out, None, variant)))
        same.append(torch.equal(out, truth))
    speeds = [2e-9 * num_tokens * outs * ins / time for time in times]
    return [
        shape,
        *(f"{speed:.0f}" for speed in speeds),
        str(all(same)),
        f"{max(speeds[2:]) / speeds[0]:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--widths", default="")
    parser.add_argument("--shapes", default=SHAPES)
    args = parser.parse_args()
    widths = [int(width) for width in filter(None, args.widths.split(","))]
    widths = widths or list(WIDTHS[E4M3 if args.fp8 else FLOAT])
    title = f"{args.tokens} tokens, {'FP8' if args.fp8 else 'bfloat16'}, TFLOP/s"
    columns = [f"{width} tokens a block" for width in widths]
    table = Table("shape", "cuBLAS", "Triton", *columns, "same bits", "of cuBLAS", title=title)
    for shape in args.shapes.split(","):
        table.add_row(*measured(shape, args.tokens, widths, fp8=args.fp8))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
