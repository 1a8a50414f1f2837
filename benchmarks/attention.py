"""The attention core of one layer on a GPU: prompts by walking and by splits, decoding, and whether they have the same
bits.

    python benchmarks/attention.py [--heads 24 --kv-heads 4 --head-dim 256] [--skip-decode]

Prints milliseconds and TFLOP/s of prompts, of which half of all products are masked and not counted, and microseconds
of decoded and verified tokens (in CUDA graphs; how fast keys and values are read, in TB/s). Then some tokens of a long
context are read at once, some at a time and one by one, and compared bit for bit and with float64.
"""

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cuda_times import milliseconds
from headlong.ops.gated_attention.reference import GatedAttentionWeights
from headlong.ops.gated_attention.triton import TritonGatedAttention
from headlong.ops.gated_attention.triton_alike import walks_alike
from headlong.ops.linear.triton_split_k import WHOLE_SUMS, PartialSums
from headlong.ops.triton_step import TritonStep
from headlong.types import Rows

DEVICE, PAGE_SIZE, NUM_PARTIALS, LAUNCHES = torch.device("cuda"), 64, 2, 8
PROMPTS = ((1, 2048), (1, 8192), (16, 1024), (1, 32768))
CONTEXTS = (1024, 8192, 32768)
DECODED = ((1, 1), (4, 1), (16, 1), (1, 4), (16, 4))
"""Rows, and the tokens of each."""


class Case(NamedTuple):
    """What the core attends with and to, prepared and written."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    gates: PartialSums
    out: Tensor
    step: TritonStep

    @classmethod
    def random(cls, net: TritonGatedAttention, rows: int, tokens: int, context: int) -> "Case":
        """The last tokens of each row's context."""
        w, num_tokens, pages = net.weights, rows * tokens, -(-context // PAGE_SIZE)
        table_RP = torch.randperm(rows * pages, device=DEVICE).view(rows, pages)
        nothing, width = (0,) * rows, w.num_heads * w.head_dim
        listed = Rows(nothing, (context - tokens,) * rows, (tokens,) * rows, nothing, nothing)
        queries = torch.randn(num_tokens, w.num_heads, w.head_dim, device=DEVICE) * 2 * w.head_dim**-0.5
        cache = (rows * pages, w.num_kv_heads, PAGE_SIZE, w.head_dim)
        keys, values = (torch.randn(cache, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
        gates = torch.randn(NUM_PARTIALS, num_tokens, width, device=DEVICE)
        args = {**WHOLE_SUMS, "num_tokens": num_tokens, "num_outs": width, "NUM_PARTIALS": NUM_PARTIALS}
        step, out = TritonStep.of(listed, table_RP, PAGE_SIZE), torch.empty(num_tokens, width, device=DEVICE)
        return cls(queries.bfloat16(), keys, values, PartialSums(gates, args), out.bfloat16(), step)

    def some(self, first: int, count: int) -> "Case":
        """Some tokens of a single row, as a step of their own."""
        here, start = slice(first, first + count), int(self.step.position_N[first])
        step = TritonStep.of(Rows((0,), (start,), (count,), (0,), (0,)), self.step.pages_RP, PAGE_SIZE)
        gates = PartialSums(
            self.gates.partials_PNO[:, here].contiguous(), {**self.gates.args, "num_tokens": count}
        )
        return self._replace(queries=self.queries[here], gates=gates, out=self.out[here].clone(), step=step)

    def truth(self, group: int) -> Tensor:
        """Of a single row, in float64."""
        context = int(self.step.position_N[-1]) + 1
        pages = self.step.pages_RP[0, : -(-context // PAGE_SIZE)].long()
        keys, values = (
            x[pages].transpose(0, 1).flatten(1, 2)[:, :context].double().repeat_interleave(group, 0)
            for x in (self.keys, self.values)
        )
        scores = torch.einsum("nhd,hmd->hnm", self.queries.double(), keys)
        hidden = torch.arange(context, device=DEVICE) > self.step.position_N[:, None]
        out = torch.einsum("hnm,hmd->nhd", scores.masked_fill_(hidden, -torch.inf).softmax(-1), values)
        return out.flatten(1) * self.gates.partials_PNO.sum(0).double().sigmoid()


def in_a_graph(work: Callable[[], object]) -> float:
    """Milliseconds of one of several launches in a CUDA graph."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            work()
    return milliseconds(graph.replay) / LAUNCHES


def prompts(net: TritonGatedAttention) -> None:
    w = net.weights
    for rows, tokens in PROMPTS:
        case, line = Case.random(net, rows, tokens, tokens), f"{rows:3} x {tokens:6}"
        work = 2 * rows * w.num_heads * w.head_dim * tokens * (tokens + 1)
        for name, act in (("walk", net.walk), ("split", net.split)):
            took = milliseconds(lambda act=act, case=case: act(*case), 5)
            line += f"   {name} {took:9.3f} ms {work / took / 1e9:5.0f} TFLOP/s"
        print(line, flush=True)


def decoding(net: TritonGatedAttention) -> None:
    for context in CONTEXTS:
        for rows, tokens in DECODED:
            case = Case.random(net, rows, tokens, context)
            took = in_a_graph(lambda case=case: net.split(*case))
            read = 2 * case.keys.numel() * case.keys.element_size()
            print(
                f"{rows:3} x {tokens} at {context:6}   {took * 1e3:8.1f} µs {read / took / 1e9:6.2f} TB/s",
                flush=True,
            )


def bits(net: TritonGatedAttention) -> None:
    """The last 392 tokens of 8,192, by every way."""
    case, found = Case.random(net, 1, 392, 8192), {}
    for name, act, count in (
        ("walk", net.walk, 392),
        ("walk, in chunks", net.walk, 56),
        ("split", net.split, 392),
    ):
        parts = [case.some(first, count) for first in range(0, 392, count)]
        for part in parts:
            act(*part)
        found[name] = torch.cat([part.out for part in parts])
    singles = [case.some(at, 1) for at in range(0, 392, 13)]
    for single in singles:
        net.split(*single)
    decoded = torch.cat([single.out for single in singles])
    truth = case.truth(net.group)
    for name, out in found.items():
        error = float((out.double() - truth).norm() / truth.norm())
        same = torch.equal(out, found["walk"]) and torch.equal(out[::13], decoded)
        print(f"{name}: {'the bits of' if same else 'OTHER BITS than'} decoding, error {error:.2e}")
    print(f"walks are {'' if walks_alike(net, case.keys, case.gates) else 'NOT '}found to be alike")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=int, default=24)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=256)
    parser.add_argument("--skip-decode", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    weights = GatedAttentionWeights(args.heads, args.kv_heads, args.head_dim, None, gated=True)
    net = TritonGatedAttention(weights, torch.bfloat16)
    bits(net)
    prompts(net)
    if not args.skip_decode:
        decoding(net)


if __name__ == "__main__":
    main()
